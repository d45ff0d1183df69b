"""The ClientApp: it sleeps for as long as a device would train, and then moves the model a little."""

from __future__ import annotations

import random
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    seconds = float(context.run_config["compute"]) + random.lognormvariate(-2, 1)
    time.sleep(seconds)
    (weights,) = (array.numpy() for array in message.content["arrays"].values())
    moved = weights + np.random.default_rng().normal(0, 0.01, weights.shape).astype(np.float32)
    metrics = MetricRecord({"num-examples": 32, "compute-seconds": seconds})
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(moved)}), "metrics": metrics}), reply_to=message)
