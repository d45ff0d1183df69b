"""The ClientApp: it is written for Flower, and knows nothing of paceline's policies."""

from __future__ import annotations

import time
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_digits import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    begin = time.perf_counter()
    images, labels = data_of(context)
    weights = {name: array.numpy() for name, array in message.content["arrays"].items()}
    steps, rate = int(context.run_config["local-steps"]), float(context.run_config["rate"])
    seeds = [context.run_config["seed"], context.node_config["partition-id"], message.content["config"]["server-round"]]
    weights, loss = task.train(weights, images, labels, steps, rate, [int(seed) for seed in seeds])
    metrics = MetricRecord(
        {"num-examples": len(labels), "train_loss": loss, "compute-seconds": time.perf_counter() - begin}
    )
    arrays = ArrayRecord({name: Array(array) for name, array in weights.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    images, labels = data_of(context)
    weights = {name: array.numpy() for name, array in message.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": task.accuracy(weights, images, labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def data_of(context: Context) -> tuple[Any, Any]:
    node, nodes = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return task.data_of(node, nodes, int(context.run_config["seed"]))
