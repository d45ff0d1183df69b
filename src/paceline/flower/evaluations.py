"""Evaluations by the nodes. They are asked after each round, and nobody waits for their answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from logging import INFO
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore import log

from paceline.flower.all_nodes import all_nodes
from paceline.flower.reply_inbox import ReplyInbox
from paceline.flower.run_clock import RunClock

if TYPE_CHECKING:
    from paceline.flower.strategy import PolicyStrategy


@dataclass
class _Asked:
    """The evaluation of one round."""

    until: float
    waiting: set[str]
    replies: list[Message] = field(default_factory=list)


class Evaluations:
    """The evaluations that are under way."""

    def __init__(
        self,
        strategy: PolicyStrategy,
        grid: Grid,
        config: ConfigRecord,
        timeout: float,
        result: Result,
        clock: RunClock,
        inbox: ReplyInbox,
    ) -> None:
        self._strategy, self._grid, self._config = strategy, grid, config
        self._timeout, self._result, self._clock, self._inbox = timeout, result, clock, inbox
        self._asked: dict[int, _Asked] = {}  # round → its evaluation

    def begin(self, server_round: int, arrays: ArrayRecord, known: Iterable[int]) -> None:
        """Ask those of the nodes that the wrapped strategy chooses that are connected. known: all nodes ever seen."""
        grid = all_nodes(self._grid, known)
        messages = list(self._strategy.configure_evaluate(server_round, arrays, self._config, grid))
        connected = set(self._grid.get_node_ids())
        messages = [message for message in messages if message.metadata.dst_node_id in connected]
        if messages:
            waiting = set(filter(None, self._grid.push_messages(messages)))
            self._asked[server_round] = _Asked(self._clock.now() + self._timeout, waiting)

    def collect(self) -> None:
        """Take the answers that have come, and average those of a round that is complete or out of time."""
        waiting = [message for asked in self._asked.values() for message in asked.waiting]
        if not waiting:
            return
        for reply in self._inbox.collect(waiting):
            for asked in self._asked.values():
                if reply.metadata.reply_to_message_id in asked.waiting:
                    asked.waiting.remove(reply.metadata.reply_to_message_id)
                    asked.replies.append(reply)
        for server_round, asked in list(self._asked.items()):
            if not asked.waiting or self._clock.now() > asked.until:
                del self._asked[server_round]
                found = self._strategy.aggregate_evaluate(server_round, asked.replies)
                if found is not None:
                    log(INFO, "\t└──> Evaluation by the nodes after round %s: %s", server_round, found)
                    self._result.evaluate_metrics_clientapp[server_round] = found

    def finish(self, interval: float) -> None:
        """Wait for the last answers."""
        while self._asked:
            self.collect()
            if self._asked:
                self._clock.sleep(interval)
