"""The ServerApp: Flower's FedAvg, and the same FedAvg under policies of paceline."""

from __future__ import annotations

import json
import time
from logging import INFO
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.supercore import log

from flower_digits import task
from paceline.flower import PolicyStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    rounds, seed, results = int(config["num-rounds"]), int(config["seed"]), str(config["results"])
    initial = task.initial_weights(seed)
    if config["warm-up"]:  # the first round of a simulation also starts its processes
        strategy_of("fedavg", "").start(grid, as_record(initial), num_rounds=1)
    images, labels = task.test_data()
    curves: dict[str, list[tuple[float, float]]] = {}  # policy → seconds and accuracy after each round
    for policy in str(config["policies"]).split(";"):
        begin = time.perf_counter()
        curve = curves[policy] = []

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            found = task.accuracy({name: array.numpy() for name, array in arrays.items()}, images, labels)
            curve.append((time.perf_counter() - begin, found))  # noqa: B023  # called in this pass of the loop
            return MetricRecord({"accuracy": found})

        strategy_of(policy, str(config["checkpoint"])).start(
            grid, as_record(initial), num_rounds=rounds, evaluate_fn=evaluate
        )
    log(INFO, "Test accuracy by round, and the seconds that all rounds took:")
    for policy, curve in curves.items():
        shown = " ".join(f"{found:.1%}" for _, found in curve)
        log(INFO, "%22s: %s (%.0f s)", policy, shown, curve[-1][0])
    if results:
        Path(results).write_text(json.dumps(curves))


def strategy_of(policy: str, checkpoint: str) -> Strategy:
    averaging = FedAvg(fraction_evaluate=0.0)
    if policy == "fedavg":
        return averaging
    return PolicyStrategy(policy, averaging, checkpoint=checkpoint or None)


def as_record(weights: task.Weights) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in weights.items()})
