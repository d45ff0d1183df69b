"""A Flower strategy whose rounds are driven by a policy of paceline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from flwr.supercore import log

from paceline.flower.run import FlowerRun, RunOptions
from paceline.observe.observer import Observer
from paceline.policies import Policy, PolicyError, make, with_mean_weights


class PolicyStrategy(Strategy):
    """Lets a policy decide which nodes train, when, and which of their replies move the model.

    The wrapped strategy still makes the messages (`configure_train`), averages (`aggregate_train`) and evaluates. The
    policy replaces its choice of nodes: `fraction_train` has no effect, and `min_available_nodes` nodes must be
    connected before the first message.

        strategy = PolicyStrategy("fl-r2sp:groups=4,fraction=0.75", FedAvg())
        result = strategy.start(grid, arrays, num_rounds=20)
    """

    def __init__(
        self,
        policy: str | Policy = "fl-r2sp",
        strategy: Strategy | None = None,
        *,
        checkpoint: str | Path | None = None,
        interval: float = 0.5,
        observer: Observer | None = None,
    ) -> None:
        """policy: a name with options, as for `paceline federate`, or a policy that no run has used yet.

        strategy: the strategy to wrap; None: FedAvg. checkpoint: a folder. The state is saved there, and a run that
        finds one there goes on from it. interval: seconds between two looks for replies. observer: receives the trace.
        """
        self.policy = make(with_mean_weights(policy)) if isinstance(policy, str) else policy
        self.policy_name = policy if isinstance(policy, str) else type(policy).__name__
        if getattr(self.policy, "tuner", None):
            raise PolicyError(f"{self.policy_name}: a Flower node has a batch of its own, so leave tune_batches out.")
        self.strategy = strategy or FedAvg()
        self.options = RunOptions(interval, Path(checkpoint) if checkpoint else None, observer or Observer())

    def summary(self) -> None:
        """Log the policy, and the wrapped strategy's own summary."""
        log(INFO, "\t├──> Policy: %s", self.policy_name)
        log(INFO, "\t├──> %s:", type(self.strategy).__name__)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages."""
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average by the wrapped strategy."""
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average by the wrapped strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train until each node that takes part has replied `num_rounds` times, on average. Return the result.

        timeout: seconds after which a node that owes a reply is given up, until it replies after all.
        """
        run = FlowerRun(self, grid, initial_arrays, num_rounds, timeout, self.options)
        return run.run(train_config or ConfigRecord(), evaluate_config or ConfigRecord(), evaluate_fn)
