"""The nodes of a federation and their numbers. A node that fails is left out for a while, and then for longer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 600.0  # seconds for which a node that failed is left out; doubled each time


@dataclass
class _Node:
    identity: int  # Flower's
    is_member: bool = False
    failures: int = 0  # in a row
    until: float = 0.0  # when it may join again
    is_suspended: bool = False  # owes a reply for so long that it was given up


class NodeList:
    """Numbers nodes from 0 in the order of their appearance, so that groups by number are of equal size."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._number: dict[int, int] = {}  # identity → number

    @property
    def workers(self) -> range:
        """The numbers of all nodes that were ever seen."""
        return range(len(self._nodes))

    def node(self, worker: int) -> int:
        """Return Flower's identity of a node."""
        return self._nodes[worker].identity

    def see(self, identities: Iterable[int], now: float) -> tuple[list[int], list[int]]:
        """Take note of the nodes that are connected. Return the numbers of those to take in and of those to give up."""
        here = sorted(identities)
        for identity in here:
            if identity not in self._number:
                self._number[identity] = len(self._nodes)
                self._nodes.append(_Node(identity))
        connected = {self._number[identity] for identity in here}
        joined, gone = [], []
        for worker, node in enumerate(self._nodes):
            if worker not in connected:
                if node.is_member:
                    node.is_member = False
                    gone.append(worker)
                node.is_suspended = False  # it may have been started again when it comes back
            elif not node.is_member and not node.is_suspended and node.until <= now:
                node.is_member = True
                joined.append(worker)
        return joined, gone

    def suspend(self, worker: int) -> None:
        """Leave a node out until it disconnects. It may hang, and would take a model and a place in its group."""
        self._nodes[worker].is_member = False
        self._nodes[worker].is_suspended = True

    def fail(self, worker: int, now: float) -> None:
        """Leave a node out for a while, because its reply was of no use."""
        node = self._nodes[worker]
        node.is_member = False
        node.until = now + min(FIRST_PAUSE * 2**node.failures, LONGEST_PAUSE)
        node.failures += 1

    def succeed(self, worker: int) -> None:
        """Forgive a node its failures."""
        self._nodes[worker].failures = 0

    def as_json(self) -> list[int]:
        """Return the identities of all nodes, in the order of their numbers."""
        return [node.identity for node in self._nodes]

    def recall(self, identities: Iterable[int]) -> None:
        """Number nodes as an earlier run did."""
        for identity in identities:
            self._number[identity] = len(self._nodes)
            self._nodes.append(_Node(identity))
