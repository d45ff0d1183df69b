"""The ServerApp: Flower's FedAvg, alone or under a policy of paceline."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    nodes, policy = int(context.run_config["nodes"]), str(context.run_config["policy"])
    strategy: Strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    if policy:
        from paceline.flower import PolicyStrategy

        strategy = PolicyStrategy(policy, strategy)
    weights = np.random.default_rng(0).normal(size=int(context.run_config["parameters"])).astype(np.float32)
    strategy.start(grid, ArrayRecord({"w": Array(weights)}), num_rounds=int(context.run_config["rounds"]))
