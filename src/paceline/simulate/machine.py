"""The machine of one worker in a simulated cluster: the state of its iteration, its transfers and its faults."""

from __future__ import annotations

from collections.abc import Callable

from paceline.simulate.clock import Clock
from paceline.simulate.cluster_spec import WorkerSpec, worker_rng
from paceline.simulate.compute_times import ComputeTimes
from paceline.simulate.network import DIRECTIONS, Direction, Flow, Network, Port

NEVER = -1.0


class Machine:
    """The machine of one worker, with its transfers."""

    __slots__ = (
        "_clock",
        "_network",
        "base_version",
        "batch",
        "compute_began",
        "compute_ends",
        "compute_seconds",
        "connection",
        "cut_until",
        "expected",
        "flows",
        "granted_version",
        "halted",
        "incarnation",
        "is_ahead",
        "iteration",
        "member",
        "number",
        "own_batch",
        "paused_until",
        "ports",
        "pull_at",
        "random",
        "resets",
        "round_batch",
        "silent_since",
        "spec",
        "times",
        "unannounced",
        "up",
        "version",
    )

    def __init__(
        self, number: int, spec: WorkerSpec, clock: Clock, network: Network, seed: int, local_steps: int = 1
    ) -> None:
        self.number = number
        self.spec = spec
        self._clock, self._network = clock, network
        self.ports: dict[Direction, Port] = {way: network.port(number, way) for way in DIRECTIONS}
        self.random = worker_rng(number, seed)
        self.times = ComputeTimes(spec, self.random, local_steps)
        self.own_batch = local_steps * spec.batch  # samples of a round, if the policy names no number
        self.incarnation = 0
        self.connection = number  # the number under which the job knows this incarnation
        self.up = True
        self.member = False
        self.paused_until = self.cut_until = 0.0
        self.silent_since = 0.0  # while it is paused or cut off
        self.resets = 0
        self.flows: dict[Direction, Flow] = {}  # the newest transfer in each direction
        self.halted: list[tuple[Direction, float, Callable[[Machine], None]]] = []  # transfers on a link that is cut
        self.start()

    def start(self) -> None:
        """Begin a new incarnation, without a model."""
        self.iteration = 0
        self.batch = self.own_batch
        self.version = -1  # of the model that the machine has
        self.base_version = self.granted_version = 0
        self.round_batch = self.batch  # samples of the round that the machine computes, or has computed last
        self.expected: int | None = None  # staleness of the update computed from the granted version
        self.compute_seconds = self.compute_began = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget the iteration under way, with its transfers."""
        self.resets += 1
        self.compute_ends = self.pull_at = NEVER
        self.is_ahead = False  # does the machine compute a round, or has computed it, before the last reply is in?
        self.unannounced = False  # is a gradient ready that the job cannot hear of, because of a cut or a pause?
        for flow in self.flows.values():
            self._network.stop(flow)
        self.flows.clear()
        self.halted.clear()

    @property
    def is_silent(self) -> bool:
        """Whether the machine sends no heartbeats."""
        return not self.up or self._clock.now < max(self.paused_until, self.cut_until)

    # Transfers

    def transfer(self, direction: Direction, size: float, done: Callable[[Machine], None]) -> None:
        """Carry bytes between this machine and the servers, then call `done(machine)`."""
        if self._clock.now < self.cut_until:
            self.halted.append((direction, size, done))
        else:
            self.flows[direction] = self.ports[direction].start(size, done, self)

    def halt_transfers(self) -> None:
        """Stop the transfers under way, because the link is cut. `resume_transfers` continues them."""
        for direction, flow in self.flows.items():
            if not flow.is_over:
                done = flow.done
                self.halted.append((direction, self._network.stop(flow), done))
        self.flows.clear()

    def resume_transfers(self) -> None:
        """Continue the halted transfers with the bytes that they still have to carry."""
        halted, self.halted = self.halted, []
        for direction, size, done in halted:
            self.transfer(direction, size, done)
