"""One worker's machine in a simulated cluster: what it is doing, and what holds it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from paceline.simulate.cluster_spec import WorkerSpec, chance_of
from paceline.simulate.network import DIRECTIONS, Direction, Flow, Network, Port

NEVER = -1.0


class Machine:
    """A worker's machine."""

    __slots__ = (
        "base_version",
        "batch",
        "compute_ends",
        "compute_seconds",
        "connection",
        "cut_until",
        "expected",
        "flows",
        "go",
        "granted_version",
        "halted",
        "incarnation",
        "iteration",
        "member",
        "mute",
        "number",
        "paused_until",
        "ports",
        "pull_at",
        "pushed_at",
        "random",
        "returning",
        "silent_since",
        "spec",
        "stops",
        "up",
        "version",
    )

    def __init__(self, number: int, spec: WorkerSpec, network: Network, seed: int) -> None:
        self.number = number
        self.ports: dict[Direction, Port] = {way: network.port(number, way) for way in DIRECTIONS}
        self.spec = spec
        self.random = chance_of(number, seed)
        self.incarnation = 0
        self.connection = number  # of this incarnation, to the job
        self.up = True
        self.member = False
        self.paused_until = self.cut_until = 0.0
        self.silent_since = 0.0  # while paused or cut
        self.stops = 0  # how often what was under way was forgotten
        self.start()

    def start(self) -> None:
        """Begin with nothing."""
        self.iteration = 0
        self.batch = self.spec.batch
        self.version = -1  # of the model it has
        self.base_version = self.granted_version = 0
        self.expected: int | None = None  # staleness, of what it will make of the version it was granted
        self.compute_seconds = 0.0
        self.pushed_at = NEVER
        self.flows: dict[Direction, Flow] = {}  # the last in each direction
        self.halted: list[tuple[Direction, float, Callable[[Machine], None]]] = []  # transfers on a link that is cut
        self.stop()

    def stop(self) -> None:
        """Forget what was under way."""
        self.stops += 1
        self.compute_ends = self.pull_at = NEVER
        self.mute = False  # has it computed while its link was cut?
        self.returning: Literal["no", "coming", "back"] = "no"  # streamed: the slices that were pushed
        self.go = False  # streamed: it is granted, and waits for the last slice
        self.halted.clear()
