"""The ServerApp: Flower's FedAvg, and the same FedAvg under policies of paceline."""

from __future__ import annotations

import time
from logging import INFO

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.supercore import log

from flower_digits import task
from paceline.flower import PolicyStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    rounds = int(context.run_config["num-rounds"])
    images, labels = task.test_data()
    curves: dict[str, list[tuple[float, float]]] = {}  # policy → seconds and accuracy after each round
    for policy in str(context.run_config["policies"]).split(";"):
        begin = time.perf_counter()
        curve = curves[policy] = []

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            found = task.accuracy({name: array.numpy() for name, array in arrays.items()}, images, labels)
            curve.append((time.perf_counter() - begin, found))  # noqa: B023  # called in this pass of the loop
            return MetricRecord({"accuracy": found})

        initial = ArrayRecord({name: Array(array) for name, array in task.initial_weights().items()})
        strategy_of(policy, str(context.run_config["checkpoint"])).start(
            grid, initial, num_rounds=rounds, evaluate_fn=evaluate
        )
    log(INFO, "Test accuracy by round, and the seconds that all rounds took:")
    for policy, curve in curves.items():
        shown = " ".join(f"{found:.1%}" for _, found in curve)
        log(INFO, "%22s: %s (%.0f s)", policy, shown, curve[-1][0])


def strategy_of(policy: str, checkpoint: str) -> Strategy:
    averaging = FedAvg(fraction_evaluate=0.0)
    if policy == "fedavg":
        return averaging
    return PolicyStrategy(policy, averaging, checkpoint=checkpoint or None)
