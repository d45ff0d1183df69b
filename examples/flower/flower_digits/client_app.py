"""The ClientApp: it is written for Flower, and knows nothing of paceline's policies."""

from __future__ import annotations

import time

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_digits import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    begin = time.perf_counter()
    images, labels = task.data_of(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    weights = {name: array.numpy() for name, array in message.content["arrays"].items()}
    steps, rate = int(context.run_config["local-steps"]), float(context.run_config["rate"])
    seed = hash((context.node_id, int(message.content["config"]["server-round"]))) % 2**32
    weights, loss = task.train(weights, images, labels, steps, rate, seed)
    metrics = MetricRecord(
        {"num-examples": len(labels), "train_loss": loss, "compute-seconds": time.perf_counter() - begin}
    )
    arrays = ArrayRecord({name: Array(array) for name, array in weights.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    images, labels = task.data_of(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    weights = {name: array.numpy() for name, array in message.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": task.accuracy(weights, images, labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
