"""One run of a PolicyStrategy: messages to nodes out, replies in, until all rounds are done.

A round is over when each node that takes part has replied once more, on average. No node waits for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore import log

from paceline.flower import checkpoint
from paceline.flower.all_nodes import all_nodes
from paceline.flower.checkpoint import FlowerCheckpoint
from paceline.flower.evaluations import Evaluations
from paceline.flower.global_model import Arrays, ArraysModel, Reply, WeighedModel
from paceline.flower.messages import EXAMPLES, as_reply, read_reply, to_arrays, to_record, train_message
from paceline.flower.node_list import NodeList
from paceline.flower.policy_driver import Order, PolicyDriver
from paceline.flower.reply_inbox import THREADS, ReplyInbox
from paceline.flower.round_metrics import RoundMetrics
from paceline.flower.run_clock import RunClock
from paceline.flower.strategy_state import StrategyState
from paceline.observe.observer import Observer, Tee

if TYPE_CHECKING:
    from paceline.flower.strategy import PolicyStrategy

FLOWER = logging.getLogger("flwr")
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True)
class RunOptions:
    """How a run looks for replies, and where it saves its state."""

    interval: float  # seconds between two looks
    checkpoint: Path | None
    observer: Observer
    clock: RunClock = field(default_factory=RunClock)
    threads: int = THREADS  # that ask for replies; 0: the run itself asks


@dataclass(frozen=True)
class _Sent:
    """A message that has no reply yet."""

    order: Order
    node: int
    time: float


@dataclass
class FlowerRun:
    """The state of a run."""

    strategy: PolicyStrategy
    grid: Grid
    initial_arrays: ArrayRecord
    num_rounds: int
    timeout: float
    options: RunOptions
    round: int = 1
    result: Result = field(default_factory=Result)

    def __post_init__(self) -> None:
        self._weighted_by: str = getattr(self.strategy.strategy, "weighted_by_key", EXAMPLES)
        self._model: ArraysModel[Message] = ArraysModel(to_arrays(self.initial_arrays), self._aggregate)
        self._strategy_state = StrategyState(self.strategy.strategy)
        self._metrics = RoundMetrics()
        watcher = Tee(self._metrics, self.options.observer)
        self._driver = PolicyDriver(self.strategy.policy, self._model, watcher)
        self._nodes_seen = NodeList()
        self._inbox = ReplyInbox(self.grid, self.options.threads)
        self._sent: dict[str, _Sent] = {}  # message → its receiver and its Order
        self._content: tuple[int, int, RecordDict] | None = None  # round and version, and the content of its messages
        self._clock = self.options.clock
        self._began = self._clock.now()
        self._config = ConfigRecord()

    @property
    def _now(self) -> float:
        return self._clock.now() - self._began

    def run(self, train_config: ConfigRecord, evaluate_config: ConfigRecord, evaluate_fn: Evaluate | None) -> Result:
        """Train for all rounds, and return the result."""
        log(INFO, "Starting %s:", type(self.strategy).__name__)
        self.strategy.summary()
        self._config = train_config
        inbox = ReplyInbox(self.grid, self.options.threads)
        evaluations = Evaluations(
            self.strategy, self.grid, evaluate_config, self.timeout, self.result, self._clock, inbox
        )
        if not self._restore() and evaluate_fn:
            self._evaluate(0, evaluate_fn)
        log(INFO, "[ROUND %s/%s]", self.round, self.num_rounds)
        while self.round <= self.num_rounds:
            self._look()
            evaluations.collect()
            while self.round <= self.num_rounds and self._driver.progress >= self.round - 1e-9:
                self._end_round()
                evaluations.begin(self.round, to_record(self._model.arrays), self._nodes_seen.as_json())
                if evaluate_fn:
                    self._evaluate(self.round, evaluate_fn)
                self.round += 1
                self._save()
                if self.round <= self.num_rounds:
                    log(INFO, "[ROUND %s/%s]", self.round, self.num_rounds)
            if self.round <= self.num_rounds:
                self._sleep()
        evaluations.finish(self.options.interval)
        self.result.arrays = to_record(self._model.arrays)
        log(INFO, "%s has finished in %.2fs", type(self.strategy).__name__, self._now)
        return self.result

    # Events

    def _look(self) -> None:
        """Read the list of nodes and their replies, and act on them."""
        joined, gone = self._nodes_seen.see(self.grid.get_node_ids(), self._now)
        for worker in gone:
            self._leave(worker, "is no longer connected")
        for worker in joined:
            self._send(self._driver.join(worker, self._now))
        if self._sent:
            for reply in self._inbox.collect(list(self._sent)):
                self._hear(reply)
        for message, sent in list(self._sent.items()):
            if self._clock.now() - sent.time > self.timeout:
                self._forget(message)
                if self._driver.is_awaited(sent.order):
                    self._nodes_seen.suspend(sent.order.worker)
                    self._leave(sent.order.worker, f"did not reply within {self.timeout:.0f} s")
        if self._driver.wake_time is not None and self._driver.wake_time <= self._now:
            self._send(self._driver.wake(self._now))

    def _hear(self, reply: Message) -> None:
        """Take a reply. A second one to the same message, and one that comes too late, changes nothing."""
        sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
        if sent is None:
            return
        order = sent.order
        if not self._driver.is_awaited(order):
            self._model.give_back(order.version)
            return
        read = read_reply(reply, self._weighted_by)
        fault = read if isinstance(read, str) else self._model.fault(read.arrays)
        if fault or isinstance(read, str):
            self._model.give_back(order.version)
            self._leave(order.worker, f"is left out for now: {fault}")
            self._nodes_seen.fail(order.worker, self._now)
            return
        self._nodes_seen.succeed(order.worker)
        seconds = read.seconds or self._clock.now() - sent.time
        update = self._driver.update_of(order, max(1, round(read.examples)), seconds, read.loss)
        self._model.put(update, Reply(read.arrays, reply))
        excluded = self._exclusions()
        self._send(self._driver.reply(update, self._now))
        for worker, why in self._exclusions().items():
            if worker not in excluded:
                log(WARNING, "\t└──> Node %s is excluded: %s.", self._nodes_seen.node(worker), why)

    def _leave(self, worker: int, why: str) -> None:
        log(WARNING, "\t└──> Node %s %s.", self._nodes_seen.node(worker), why)
        if worker in self._driver:
            self._send(self._driver.leave(worker, self._now, lost=True))

    def _exclusions(self) -> dict[int, str]:
        policy = self.strategy.policy
        return {worker: why for worker in self._nodes_seen.workers if (why := policy.exclusion(worker))}

    # Actions

    def _send(self, orders: list[Order]) -> None:
        """Send the newest model to the nodes of these orders."""
        if not orders:
            return
        content = self._train_content()
        messages = []
        for order in orders:
            self._model.lend()
            node = self._nodes_seen.node(order.worker)
            messages.append(train_message(content, node, self.round, self.timeout))
        now = self._clock.now()
        # The grid leaves out messages that it refuses, so the nodes are found by the messages' own numbers.
        pushed = list(self.grid.push_messages(messages))
        numbers = {message.metadata.message_id: order for message, order in zip(messages, orders, strict=True)}
        for number in filter(None, pushed):
            order = numbers.pop(number)
            self._sent[number] = _Sent(order, self._nodes_seen.node(order.worker), now)
        for order in numbers.values():
            self._model.give_back(order.version)
            self._leave(order.worker, "cannot be sent a message")

    def _train_content(self) -> RecordDict:
        """Return the content of the wrapped strategy's message to train. It is the same for all nodes."""
        key = (self.round, self._driver.version)
        if self._content is None or self._content[:2] != key:
            arrays = to_record(self._model.arrays)
            with _quiet():
                grid = all_nodes(self.grid, self._nodes_seen.as_json())
                messages = list(self.strategy.configure_train(self.round, arrays, self._config, grid))
            if not messages:
                raise ValueError("The wrapped strategy configures no training: set its fraction_train above 0.")
            self._content = (*key, messages[0].content)
        return self._content[2]

    def _aggregate(self, models: list[WeighedModel[Message]]) -> Arrays | None:
        """Average models by the wrapped strategy."""
        self._train_content()  # some strategies note in configure_train the model that replies are compared with
        metrics = [next(iter(model.origin.content.metric_records.values())) for model in models]
        total = float(sum(float(each[self._weighted_by]) for each in metrics))
        replies = [as_reply(model, self._weighted_by, total) for model in models]
        with _quiet():
            arrays, aggregated = self.strategy.aggregate_train(self.round, replies)
        self._metrics.aggregated(aggregated, total)
        self._content = None
        return None if arrays is None else to_arrays(arrays)

    def _end_round(self) -> None:
        metrics = self._metrics.take(self._driver.participants, len(self._exclusions()), self._now)
        self.result.train_metrics_clientapp[self.round] = metrics
        log(INFO, "\t└──> MetricRecord: %s", metrics)

    def _evaluate(self, server_round: int, evaluate_fn: Evaluate) -> None:
        found = evaluate_fn(server_round, to_record(self._model.arrays))
        log(INFO, "\t└──> Global evaluation: %s", found)
        if found is not None:
            self.result.evaluate_metrics_serverapp[server_round] = found

    def _forget(self, message: str) -> None:
        self._model.give_back(self._sent.pop(message).order.version)

    def _sleep(self) -> None:
        """Wait for the next look."""
        seconds, wake = self.options.interval, self._driver.wake_time
        if wake is not None:
            seconds = min(seconds, wake - self._now)
        self._clock.sleep(max(0.0, seconds))

    # The checkpoint

    def _save(self) -> None:
        if self.options.checkpoint:
            strategy = self._strategy_state.arrays()
            checkpoint.save(self.options.checkpoint, FlowerCheckpoint(self._state(), self._model.arrays, strategy))

    def _state(self) -> dict[str, Any]:
        return {
            "policy": self.strategy.policy_name,
            "round": self.round,
            "version": self._driver.version,
            "memory": self.strategy.policy.memory(),
            "nodes": self._nodes_seen.as_json(),
            "result": checkpoint.metrics_as_json(self.result),
        }

    def _restore(self) -> bool:
        """Go on from a checkpoint, if there is one. Return whether there was."""
        if not self.options.checkpoint or not (found := checkpoint.load(self.options.checkpoint)):
            return False
        state = found.state
        if state["policy"] != self.strategy.policy_name:
            raise ValueError(
                f"The checkpoint in {self.options.checkpoint} is of the policy {state['policy']}: use another folder."
            )
        if fault := self._model.fault(found.model):
            raise ValueError(f"The checkpoint in {self.options.checkpoint} does not fit this model: {fault}.")
        self._model.arrays = dict(found.model)
        self._strategy_state.recall(found.strategy)
        self._model.version = self._driver.ledger.version = int(state["version"])
        self.round = int(state["round"])
        self._driver.progress = float(self.round - 1)
        self.strategy.policy.recall(state["memory"])
        self._nodes_seen.recall(state["nodes"])
        checkpoint.recall_metrics(self.result, state["result"])
        log(INFO, "Continuing after round %s from %s", self.round - 1, self.options.checkpoint)
        return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log warnings alone: a strategy logs each message that it configures, and here that is each update."""
    level = FLOWER.level
    FLOWER.setLevel(logging.WARNING)
    try:
        yield
    finally:
        FLOWER.setLevel(level)
