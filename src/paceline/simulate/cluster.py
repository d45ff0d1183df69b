"""A whole cluster under a virtual clock, with a policy in charge.

An iteration of a worker: it is granted, pulls the model, computes, pushes its gradient, and waits. The job is run by
the same JobState that a real coordinator runs. Here its events come from machines and links that are simulated, and its
instructions move them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.job import Identity, JobConfig, JobState, events, instructions
from paceline.observe.driver import Fault
from paceline.observe.observer import Observer, Tee
from paceline.observe.summary import Report, Summary
from paceline.policies import Apply, Discard, Keep, Policy
from paceline.simulate.clock import Clock
from paceline.simulate.cluster_spec import ClusterSpec
from paceline.simulate.machine import NEVER, Machine
from paceline.simulate.network import DIRECTIONS, Direction, Mesh, Network, Rounds, Star
from paceline.simulate.simulated_model import SimulatedModel
from paceline.simulate.transfer.gate import LinkGate
from paceline.simulate.transfer.pipelined import Pipeline


class SimulationError(RuntimeError):
    """The run could not go on."""


@dataclass(frozen=True)
class SimulationResult:
    """What a simulated run came to."""

    report: Report
    streamed: bool
    events: int  # taken off the heap
    wall_seconds: float
    simulated_seconds: float


class Cluster:
    """A simulated cluster. Make one, and `run` it once."""

    def __init__(
        self,
        spec: ClusterSpec,
        policy: Policy,
        iterations: int,
        seed: int = 0,
        streamed: bool = False,
        observer: Observer | None = None,
        model: SimulatedModel | None = None,
    ) -> None:
        self.spec = spec
        self._model = model
        self.clock = Clock()
        self.streamed = streamed and policy.streamable
        policy.streamed = self.streamed
        self._goal = iterations * len(spec.workers)
        # What a fault costs belongs to the run, whenever it comes; so where there are any, nothing is left out.
        warm_up = min(iterations // 4, 25) if model else iterations // 4  # who trains may stop long before the end
        self.summary = Summary(warm_up=0 if spec.faults else warm_up * len(spec.workers))
        self._observer: Observer = self.summary if observer is None else Tee(self.summary, observer)
        # To the job the servers are one shard: an update is in at all of them at the same time.
        config = JobConfig(shards=1, workers=len(spec.workers), lease=spec.lease)
        self.state = JobState(policy, config, self._observer, sees_pulls=True)
        self._pushes_freely = self.state.ledger.pushes_freely
        self.trip = 4 * spec.latency  # push, Grant, request and pull: each waits for one way
        self._busy_until = 0.0  # when the servers will have applied all they were told to
        # When which version will be there to be pulled; and what is to be done with updates after that.
        self._applying: deque[tuple[float, int, Apply | Keep | Discard]] = deque()
        self._applied = 0
        self._wake = NEVER
        self._stopped = False
        self._watched = observer is not None  # by somebody who wants to know of transfers and links too
        use = self._link_use if self._watched else None
        links = [worker.link for worker in spec.workers]
        in_turn = policy.takes_turns and (self.streamed or not spec.colocate)
        self.network: Network
        if not spec.colocate:
            self.network = Star(self.clock, links, {way: spec.capacity(way) for way in DIRECTIONS}, use)
        elif in_turn:
            self.network = Rounds(self.clock, links, use)
        else:
            self.network = Mesh(self.clock, links, use)
        self.machines = [Machine(number, worker, self.network, seed) for number, worker in enumerate(spec.workers)]
        self._count = len(self.machines)  # a machine's connections have its number, modulo this
        self._gates: dict[Direction, LinkGate[Machine]] = {}
        if in_turn:  # in a mesh there is no server's link to hand on
            begin: dict[Direction, Callable[[Machine], None]] = {"in": self._begin_push, "out": self._begin_pull}
            self._gates = {
                way: LinkGate(self.clock, self.network.occupies(spec.model_bytes, way), begin[way])
                for way in DIRECTIONS
            }
        self._pipeline = Pipeline(self) if policy.pipelined else None
        self._hears_loss = policy.hears_loss
        self._do: dict[type, Callable[[Any], None]] = {
            instructions.SendGrant: self._grant,
            instructions.SendPushNow: self._turn,
            instructions.OrderApply: self._apply,
            instructions.SetTimer: self._wake_at,
            instructions.SendCancel: self._cancel,
            instructions.SendExpelled: self._expelled,
            instructions.OrderInitialWeights: self._give,
        }
        if model:
            self._do |= dict.fromkeys((instructions.OrderKeep, instructions.OrderDiscard), self._after_applies)

    def run(self, progress: Callable[[float], None] | None = None) -> SimulationResult:
        """Run until every worker has done its iterations, on average. `progress` hears how far it is, from 0 to 1."""
        began = time.perf_counter()
        for fault in self.spec.faults:
            self.clock.at(fault.time, self._fault, fault)
        if self._model and self._hears_loss:
            self._tell(events.ModelDescribed(self._model.momentum))
        for machine in self.machines:
            self._join(machine)
        while self.clock.run(most=50 if self._model else 50_000):
            if progress:
                progress(self.summary.arrivals / self._goal)
        self._note_applied(math.inf)
        if self.summary.arrivals < self._goal and not self._stopped:
            raise SimulationError(
                f"After {self.clock.now:g} s nobody can go on, with {self.summary.arrivals} of {self._goal} iterations "
                "done; the faults have left too few workers."
            )
        wall_seconds = time.perf_counter() - began
        return SimulationResult(self.summary.report(), self.streamed, self.clock.pops, wall_seconds, self.clock.now)

    def stop(self) -> None:
        """Let the run end now."""
        self._stopped = True
        self.clock.running = False

    # One iteration

    def _join(self, machine: Machine) -> None:
        machine.start()
        machine.incarnation += 1
        machine.connection += self._count
        machine.up = machine.member = True
        self._tell(events.WorkerJoined(machine.connection, machine.number))

    def _give(self, giver: instructions.OrderInitialWeights) -> None:
        """The weights that the model begins with are there already."""
        self.clock.at(self.clock.now, self._tell, events.ShardInitialized(0, giver.worker, giver.incarnation))

    def _grant(self, grant: instructions.SendGrant) -> None:
        machine = self.machines[grant.to % self._count]
        machine.iteration = grant.iteration
        machine.batch = grant.batch_size or machine.spec.batch
        machine.granted_version = grant.version
        machine.expected = grant.expected
        if self._model:
            self._model.grant(machine.number, machine.expected)
        now = self.clock.now
        if self._pipeline and not self._pipeline.returns_to(machine):
            self._pipeline.join(machine)
        if not machine.up:
            return  # nobody is there to hear it; its lease will run out
        if self._pipeline and self._pipeline.returns_to(machine):
            self._hand_back(machine)
            self._pipeline.when_whole(machine, self._pulled)
        elif machine.returning == "coming":
            self._hand_back(machine)
            machine.go = True
        elif machine.returning == "back" and machine.pushed_at == now:
            self._hand_back(machine)
            self._later(machine, self._slice_seconds(machine), self._pulled)  # but for the last slice
        elif machine.version == self.state.ledger.version:
            self._compute(machine)  # it has the newest already
        else:
            arrives = now + self.trip
            machine.pull_at = arrives if arrives > self._busy_until else self._busy_until
            if machine.pull_at > now:
                self.clock.at(machine.pull_at, self._pull, machine)
            else:
                self._pull(machine)

    def _pull(self, machine: Machine) -> None:
        if machine.pull_at != self.clock.now:
            return
        machine.pull_at = NEVER
        gate = self._gates.get("out")
        if gate:
            gate.enter(machine.granted_version, machine)
        else:
            self._begin_pull(machine)

    def _begin_pull(self, machine: Machine) -> None:
        self._note_applied(self.clock.now)
        if machine.expected is not None:  # of the version that was the newest at its Grant
            machine.expected -= self._applied - machine.granted_version
        machine.granted_version = self._applied
        if self._model:
            self._model.pull(machine.number, machine.expected)
        if self._watched:
            self._observer.pulling(self.clock.now, machine.number)
        self.transfer(machine, "out", self.spec.model_bytes, self._pulled)

    def _hand_back(self, machine: Machine) -> None:
        """Its slices come back to it as they are applied: it has the newest model."""
        self._note_applied(math.inf)
        if self._model:
            self._model.pull(machine.number, machine.expected)

    def _pulled(self, machine: Machine) -> None:
        machine.version = machine.granted_version
        machine.returning, machine.go = "no", False
        self._compute(machine)

    def _compute(self, machine: Machine) -> None:
        now = self.clock.now
        machine.base_version = machine.version
        if self._model:
            self._model.compute(machine.number, machine.batch)
        self._observer.pulled(now, machine.number, machine.version)
        machine.compute_seconds = machine.spec.draw(machine.batch, machine.random)
        begins = now if now > machine.paused_until else machine.paused_until
        machine.compute_ends = begins + machine.compute_seconds
        self.clock.at(machine.compute_ends, self._computed, machine)

    def _computed(self, machine: Machine) -> None:
        if machine.compute_ends != self.clock.now:
            return
        machine.compute_ends = NEVER
        if self.clock.now < machine.cut_until:
            machine.mute = True  # nobody hears it until its link is back
        else:
            self._tell_ready(machine)

    def _tell_ready(self, machine: Machine) -> None:
        loss = self._model.loss(machine.number) if self._model and self._hears_loss else None
        seconds, version = machine.compute_seconds, machine.base_version
        self._tell(
            events.GradientComputed(machine.connection, machine.iteration, version, machine.batch, seconds, loss)
        )
        if self._pushes_freely:
            self._push(machine)

    def _turn(self, turn: instructions.SendPushNow) -> None:
        machine = self.machines[turn.to % self._count]
        if machine.up:  # else nobody is there to push; its lease will run out
            self._push(machine)

    def _push(self, machine: Machine) -> None:
        gate = self._gates.get("in")
        if gate:
            gate.enter(machine.base_version, machine)
        else:
            self._begin_push(machine)

    def _begin_push(self, machine: Machine) -> None:
        if self._watched:
            self._observer.pushing(self.clock.now, machine.number)
        if self._pipeline:
            self._pipeline.push(machine)
            return
        self.transfer(machine, "in", self.spec.model_bytes, self.pushed)
        if self.streamed:
            machine.returning = "coming"
            self._later(machine, self._slice_seconds(machine), self._begin_return)

    def _begin_return(self, machine: Machine) -> None:
        """Streamed: what was pushed comes back, one slice behind."""
        self.transfer(machine, "out", self.spec.model_bytes, self._returned)

    def _returned(self, machine: Machine) -> None:
        machine.returning = "back"
        if machine.go:
            self._pulled(machine)

    def pushed(self, machine: Machine) -> None:
        """A whole push is in."""
        machine.pushed_at = self.clock.now
        if self._model:
            self._model.arrive(Identity(machine.number, machine.incarnation, machine.iteration))
        self._tell(events.UpdateArrived(0, machine.number, machine.incarnation, machine.iteration))
        if self.summary.arrivals >= self._goal:
            self.clock.running = False

    # The job

    def _tell(self, event: events.Event) -> None:
        """Tell the job what happened, and carry out its instructions."""
        do = self._do
        for instruction in self.state.handle(event, self.clock.now):
            carry_out = do.get(type(instruction))
            if carry_out is not None:  # the others are not our affair: there are no sockets, files or tensors here
                carry_out(instruction)

    def _apply(self, apply: instructions.OrderApply) -> None:
        if self._pipeline:  # it has applied it slice by slice
            self._applying.append((self.clock.now, apply.version, apply.decision))
            self._note_applied(self.clock.now)
            return
        self._applying.append((self.server_time(self.spec.apply_seconds), apply.version, apply.decision))
        if self.streamed:  # hardly anybody pulls, and what is over must not pile up
            self._note_applied(self.clock.now)

    def _note_applied(self, by: float) -> None:
        """See which version the servers have by then."""
        applying = self._applying
        while applying and applying[0][0] <= by:
            at, self._applied, what = applying.popleft()
            if self._model:
                self._change(self._model, what, at)

    def _after_applies(self, instruction: instructions.OrderKeep | instructions.OrderDiscard) -> None:
        """In the order of the decisions: an Apply before it may name what is replaced."""
        what = instruction.decision
        if self._applying:
            self._applying.append((self._applying[-1][0], self._applying[-1][1], what))
        elif self._model:
            self._change(self._model, what, self.clock.now)

    def _change(self, model: SimulatedModel, what: Apply | Keep | Discard, at: float) -> None:
        if isinstance(what, Keep):
            model.keep(what)
        elif isinstance(what, Discard):
            model.discard(what.update)
        else:
            cosines = model.apply(what, at)
            if cosines:  # told when what goes on now is done
                self.clock.at(self.clock.now, self._tell, events.UpdatesCompared(what.updates, tuple(cosines)))
            if model.over:
                self.stop()

    def _wake_at(self, wake: instructions.SetTimer) -> None:
        time, now = wake.time, self.clock.now
        self._wake = time if time > now else now
        self.clock.at(self._wake, self._woke, self._wake)

    def _woke(self, at: float) -> None:
        if at == self._wake:
            self._wake = NEVER
            self._tell(events.TimerFired())

    def _cancel(self, cancel: instructions.SendCancel) -> None:
        self._abandon(self.machines[cancel.to % self._count])

    def server_time(self, seconds: float) -> float:
        """When the servers will have done work of so many seconds, after all that they have to do."""
        now, busy = self.clock.now, self._busy_until
        self._busy_until = done = (busy if busy > now else now) + seconds
        return done

    # Transfers

    def transfer(self, machine: Machine, direction: Direction, size: float, done: Callable[[Machine], None]) -> None:
        """Carry bytes between a machine and the servers; then `done(machine)`."""
        if self.clock.now < machine.cut_until:
            machine.halted.append((direction, size, done))
        else:
            machine.flows[direction] = machine.ports[direction].start(size, done, machine)

    def _slice_seconds(self, machine: Machine) -> float:
        """Streamed: how far what comes back is behind what is pushed."""
        spec = self.spec
        return (spec.one_way(machine.spec) + spec.apply_seconds) / spec.slices + self.trip

    def _later(self, machine: Machine, seconds: float, do: Callable[[Machine], None]) -> None:
        stops = machine.stops

        def if_still(_: None) -> None:
            if machine.stops == stops and machine.up and machine.member:
                do(machine)

        self.clock.at(self.clock.now + seconds, if_still)

    # Faults

    def _fault(self, fault: Fault) -> None:
        machine = self.machines[fault.worker]
        now = self.clock.now
        if fault.kind == "rejoin":
            self._rejoin(machine)
        elif fault.kind == "kill":
            if machine.up:
                self._fall_silent(machine)
                self._abandon(machine)
                machine.up = False
                self.clock.at(machine.silent_since + self.spec.lease, self._check_leases)
        elif machine.up:
            until = now + fault.seconds
            self._fall_silent(machine)
            if fault.kind == "pause":
                longer = until - max(machine.paused_until, now)  # a pause within a pause adds nothing
                machine.paused_until = max(machine.paused_until, until)
                if longer > 0 and machine.compute_ends != NEVER:
                    machine.compute_ends += longer
                    self.clock.at(machine.compute_ends, self._computed, machine)
            else:
                machine.cut_until = max(machine.cut_until, until)
                for direction, flow in machine.flows.items():
                    if not flow.is_over:
                        done = flow.done
                        machine.halted.append((direction, self.network.stop(flow), done))
                machine.flows.clear()
            if until > machine.silent_since + self.spec.lease:
                self.clock.at(machine.silent_since + self.spec.lease, self._check_leases)
            self.clock.at(until, self._recover, (machine, machine.incarnation))

    def _recover(self, what: tuple[Machine, int]) -> None:
        """A pause or a cut is over."""
        machine, incarnation = what
        if machine.incarnation != incarnation or not machine.up:
            return
        now = self.clock.now
        if not machine.member:
            if now >= max(machine.paused_until, machine.cut_until):
                self._rejoin(machine)
        elif now >= machine.cut_until:
            halted, machine.halted = machine.halted, []
            for direction, size, done in halted:
                self.transfer(machine, direction, size, done)
            if machine.mute:
                machine.mute = False
                self._tell_ready(machine)

    def _is_silent(self, machine: Machine) -> bool:
        return not machine.up or self.clock.now < max(machine.paused_until, machine.cut_until)

    def _fall_silent(self, machine: Machine) -> None:
        """A machine is heard now, and then no more."""
        if not self._is_silent(machine):
            machine.silent_since = self.clock.now
            if machine.member:
                self._tell(events.WorkerAlive(machine.connection))

    def _check_leases(self, _: None) -> None:
        """Somebody's lease runs out now. Everybody who is not silent beats, as real workers do all the time."""
        for machine in self.machines:
            if machine.member and not self._is_silent(machine):
                self._tell(events.WorkerAlive(machine.connection))
        self._tell(events.TimePassed(self.clock.now))

    def _expelled(self, expelled: instructions.SendExpelled) -> None:
        """A lease has run out."""
        self._part_with(self.machines[expelled.to % self._count])

    def _part_with(self, machine: Machine) -> None:
        self._abandon(machine)
        machine.member = False
        if self._pipeline:
            self._pipeline.leave(machine)

    def _rejoin(self, machine: Machine) -> None:
        """A new incarnation comes; of the old one nothing more is heard."""
        if machine.up and machine.member:
            return
        if machine.member:
            self._part_with(machine)
            self._tell(events.ConnectionLost(machine.connection))
        machine.paused_until = machine.cut_until = 0.0
        self._join(machine)

    def _abandon(self, machine: Machine) -> None:
        """Stop whatever it is doing."""
        for flow in machine.flows.values():
            self.network.stop(flow)
        machine.flows.clear()
        machine.stop()
        if self._model:
            self._model.drop(machine.number)
        for gate in self._gates.values():
            gate.leave(machine)

    # Watching

    def _link_use(self, direction: Direction, fraction: float) -> None:
        self._observer.used(self.clock.now, direction, fraction)
