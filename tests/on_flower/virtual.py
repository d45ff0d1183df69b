"""A federation in virtual time: Flower's own in-memory grid, and nodes that reply when their time comes.

The nodes speak to Flower's LinkState, as supernodes do. Sleeping advances the time, so a run of hours takes
milliseconds, and the same run gives the same trace.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from paceline.flower.run_clock import RunClock

Train = Callable[[dict[str, np.ndarray[Any, Any]], int], dict[str, np.ndarray[Any, Any]]]
FOREVER = 1e9  # seconds between two heartbeats of a node


class VirtualClock(RunClock):
    """A clock that advances when somebody sleeps, and calls what is due on the way."""

    def __init__(self) -> None:
        self.time = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self.time

    def at(self, time: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(time, self.time), next(self._numbers), do))

    def sleep(self, seconds: float) -> None:
        until = self.time + max(seconds, 1e-6)
        while self._due and self._due[0][0] <= until:
            self.time, _, do = heapq.heappop(self._due)
            do()
        self.time = until


@dataclass
class VirtualNode:
    """A node that takes `seconds` to train. It handles one message after the other."""

    seconds: float
    train: Train
    examples: int = 32
    metrics: dict[str, Any] = field(default_factory=dict)
    answers: bool = True
    repeats: int = 1  # how often it sends the same reply
    fails: bool = False
    free_at: float = 0.0  # when it has handled all its messages
    trained: int = 0
    identity: int = 0  # that Flower gives it


class VirtualGrid(InMemoryGrid):
    """Flower's in-memory grid, with virtual nodes. Flower numbers nodes at random; the nodes are in that order."""

    def __init__(self, clock: VirtualClock, nodes: Iterable[VirtualNode]) -> None:
        super().__init__(
            LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()), pull_interval=0.0
        )
        self.clock = clock
        number = self.state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP)
        TaskIdentity.run_id = number
        self.set_run(self.state.get_run_info(run_ids=[number])[0])
        nodes = list(nodes)
        identities = sorted(self.state.create_node("owner", "owner", secrets.token_bytes(32), FOREVER) for _ in nodes)
        self.nodes = dict(zip(identities, nodes, strict=True))
        for identity, node in self.nodes.items():
            node.identity = identity
            self.connect(node)
        self.pushed: list[tuple[float, int, str]] = []  # time, node and kind of each message

    def connect(self, node: VirtualNode) -> None:
        self.state.acknowledge_node_heartbeat(node.identity, FOREVER)

    def disconnect(self, node: VirtualNode) -> None:
        self.state.acknowledge_node_heartbeat(node.identity, 0.0)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        numbers = super().push_messages(messages)
        for message in messages:
            node = self.nodes[message.metadata.dst_node_id]
            kind = message.metadata.message_type
            self.pushed.append((self.clock.now(), node.identity, kind))
            node.free_at = max(node.free_at, self.clock.now()) + (node.seconds if kind == "train" else 0.0)
            self.clock.at(node.free_at, lambda node=node: self._answer(node))  # type: ignore[misc]
        return numbers

    def _answer(self, node: VirtualNode) -> None:
        """Let a node take its oldest message, and reply."""
        for message in self.state.get_message_ins(node.identity, limit=1):
            if not node.answers:
                continue
            for _ in range(node.repeats):
                reply = self._reply(node, message)
                reply.metadata.__dict__["_message_id"] = str(uuid4())
                self.state.store_message_res(reply)

    def _reply(self, node: VirtualNode, message: Message) -> Message:
        if node.fails:
            return Message(Error(code=1, reason="the app failed"), reply_to=message)
        metrics = MetricRecord({"num-examples": node.examples} | node.metrics)
        if message.metadata.message_type == "evaluate":
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        arrays = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
        node.trained += 1
        made = {name: Array(array) for name, array in node.train(arrays, node.trained).items()}
        return Message(RecordDict({"arrays": ArrayRecord(made), "metrics": metrics}), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        waiting = set(self.push_messages(messages))
        found: list[Message] = []
        end = self.clock.now() + (timeout or 1e9)
        while waiting and self.clock.now() < end:
            self.clock.sleep(0.5)
            replies = list(self.pull_messages(waiting))
            found += replies
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
        return found
