"""A whole cluster under a virtual clock, with a policy in charge.

In an iteration a worker is granted, pulls the model, computes, pushes its gradient, and waits. With local steps, an
iteration is a round of them, and what it pushes is their sum. The job is run by the same JobState that a real
coordinator runs. Here its events come from simulated machines and links, and its instructions move them. How gradients
and models travel is decided by a transfer: whole, streamed or pipelined.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.job import Identity, JobConfig, JobState, events, instructions
from paceline.job.visits import parts_of
from paceline.observe.observer import Observer, Tee
from paceline.observe.summary import Report, Summary
from paceline.policies import Policy
from paceline.simulate.clock import Clock
from paceline.simulate.cluster_spec import ClusterSpec
from paceline.simulate.colocated_network import Mesh, Rounds
from paceline.simulate.computing_time import ComputingTime
from paceline.simulate.fault_injector import FaultInjector
from paceline.simulate.machine import NEVER, Machine
from paceline.simulate.network import DIRECTIONS, Direction, Network, Star
from paceline.simulate.servers import Servers
from paceline.simulate.simulated_model import SimulatedModel
from paceline.simulate.transfer.pipelined import PipelinedTransfer
from paceline.simulate.transfer.streamed import StreamedTransfer
from paceline.simulate.transfer.whole import WholeTransfer
from paceline.simulate.visited_network import VisitedNetwork


class SimulationError(RuntimeError):
    """The run could not reach its end."""


@dataclass(frozen=True)
class SimulationResult:
    """The report of a simulated run, and what the simulation took."""

    report: Report
    streamed: bool
    events: int  # taken off the clock's heap
    wall_seconds: float
    simulated_seconds: float
    pulls_saved: int = 0  # iterations that began without a pull, because the worker had the newest model already
    warmed_up_at: float = 0.0  # when the warm-up was over
    computing: tuple[float, ...] = ()  # by worker: the share of the time since then in which it computed


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
        at_most: int | None = None,
    ) -> None:
        """iterations: of each worker, on average. at_most: as many, if the model may end the run sooner.

        A model computes a gradient in every step, so with one the workers must exchange gradients.
        """
        if model and not spec.exchanges_gradients:
            raise ValueError("a simulated model needs workers that exchange float32 gradients in every step")
        self.spec = spec
        self.model = model
        self.clock = Clock()
        self.streamed = streamed and policy.streamable
        policy.streamed = self.streamed
        self._goal = (at_most or iterations) * len(spec.workers)
        # A training may stop long before its last iteration, so its warm-up is short. With faults there is none: the
        # report counts what a fault costs, whenever it happens.
        warm_up = min(iterations // 4, 25) if model else iterations // 4
        self.summary = Summary(warm_up=0 if spec.faults else warm_up * len(spec.workers))
        self._observer: Observer = self.summary if observer is None else Tee(self.summary, observer)
        #: Observes when transfers begin and how full links are. The summary does not need that.
        self.transfer_observer = None if observer is None else self._observer
        # To the job all servers are one shard: an update arrives at all of them at the same time.
        config = JobConfig(shards=1, workers=len(spec.workers), lease=spec.lease)
        self.state = JobState(policy, config, self._observer, sees_pulls=True)
        self.servers = Servers(self.clock, model, self.tell, self.stop)
        self.message_seconds = 4 * spec.latency  # a push, its Grant, the request and the pull: one way each
        self._timer = NEVER
        self._stopped = False
        # Without separate servers there is no server's link to take turns on, unless updates are streamed.
        in_turn = policy.one_by_one and (self.streamed or not spec.colocate)
        if spec.colocate and policy.streams_together(len(spec.workers)):
            in_turn = False  # the members of a turn are at different servers at a time, and share the links
        self.network = self._build_network(in_turn)
        self.machines = [
            Machine(number, worker, self.clock, self.network, seed, spec.local_steps)
            for number, worker in enumerate(spec.workers)
        ]
        self._computing = ComputingTime(self.machines, self.summary)
        self._count = len(self.machines)  # the connections of a machine have its number modulo this
        kind = PipelinedTransfer if policy.pipelined else StreamedTransfer if self.streamed else WholeTransfer
        self._transfer = kind(self, in_turn)
        self._transfer.passes_together = not policy.queues_transfers
        self._pushes_freely = self.state.ledger.pushes_freely
        self._hears_loss = policy.hears_loss
        # There are no sockets, files or tensors here, so the other instructions need nothing done.
        self._carry_out: dict[type, Callable[[Any], None]] = {
            instructions.SendGrant: self._grant,
            instructions.SendPushNow: self._push_now,
            instructions.OrderApply: self._transfer.apply,
            instructions.OrderStream: self._transfer.stream,
            instructions.SetTimer: self._set_timer,
            instructions.SendCancel: self._cancel,
            instructions.SendExpelled: self._expel,
            instructions.OrderInitialWeights: self._initialize,
        }
        if model:
            self._carry_out |= dict.fromkeys((instructions.OrderKeep, instructions.OrderDiscard), self._keep_or_discard)

    def _build_network(self, in_turn: bool) -> Network:
        links = [worker.link for worker in self.spec.workers]
        use = self._report_link_use if self.transfer_observer else None
        if not self.spec.colocate:
            capacity = {way: self.spec.capacity(way) for way in DIRECTIONS}
            if self.spec.replicas and self.spec.servers > 1:
                capacity["in"] /= 2  # with each update, another server's is passed on to a backup beside this server
            return Star(self.clock, links, capacity, use)
        kind = (VisitedNetwork if parts_of(len(links)) else Rounds) if in_turn else Mesh
        return kind(self.clock, links, use)

    def _report_link_use(self, direction: Direction, fraction: float) -> None:
        self._observer.used(self.clock.now, direction, fraction)

    def run(self, progress: Callable[[float], None] | None = None) -> SimulationResult:
        """Run until the workers have done their iterations, on average. `progress` is called with the part done so far.

        Raise SimulationError if the run cannot reach its end because too few workers are left.
        """
        began = time.perf_counter()
        FaultInjector(self).schedule(self.spec.faults)
        if self.model and self._hears_loss:
            self.tell(events.ModelDescribed(self.model.momentum))
        for machine in self.machines:
            self.join(machine)
        while self.clock.run(most=50 if self.model else 50_000):
            if progress:
                progress(self.summary.arrivals / self._goal)
        self.servers.catch_up(math.inf)
        if self.summary.arrivals < self._goal and not self._stopped:
            raise SimulationError(
                f"After {self.clock.now:g} s no worker can continue, with {self.summary.arrivals} of {self._goal} "
                "iterations done; the faults have left too few workers."
            )
        wall_seconds = time.perf_counter() - began
        saved = self._transfer.pulls_saved
        return SimulationResult(
            self.summary.report(),
            self.streamed,
            self.clock.pops,
            wall_seconds,
            self.clock.now,
            saved,
            self._computing.since,
            self._computing.shares(self.clock.now),
        )

    def stop(self) -> None:
        """End the run now."""
        self._stopped = True
        self.clock.running = False

    # The job

    def tell(self, event: events.Event) -> None:
        """Pass an event to the job, and carry out its instructions."""
        carry_out = self._carry_out
        for instruction in self.state.handle(event, self.clock.now):
            do = carry_out.get(type(instruction))
            if do is not None:
                do(instruction)

    def _initialize(self, giver: instructions.OrderInitialWeights) -> None:
        """Report that the initial weights have arrived. The simulated model has them from the start."""
        self.clock.at(self.clock.now, self.tell, events.ShardInitialized(0, giver.worker, giver.incarnation))

    def _keep_or_discard(self, order: instructions.OrderKeep | instructions.OrderDiscard) -> None:
        self.servers.keep_or_discard(order.decision)

    def _set_timer(self, timer: instructions.SetTimer) -> None:
        """Set the job's timer. A new time replaces the old one, and a time in the past is now."""
        at, now = timer.time, self.clock.now
        self._timer = at if at > now else now
        self.clock.at(self._timer, self._fire_timer, self._timer)

    def _fire_timer(self, at: float) -> None:
        if at == self._timer:
            self._timer = NEVER
            self.tell(events.TimerFired())

    # One iteration

    def _grant(self, grant: instructions.SendGrant) -> None:
        machine = self.machines[grant.to % self._count]
        machine.iteration = grant.iteration
        machine.batch = grant.batch_size or machine.own_batch
        machine.granted_version = grant.version
        machine.expected = grant.expected
        if self.model:
            self.model.grant(machine.number, machine.expected)
        self._transfer.enter_round(machine)
        if machine.up:  # otherwise the Grant is lost, and the worker's lease will expire
            self._transfer.granted(machine)

    def model_arrived(self, machine: Machine) -> None:
        """Let a worker compute with the model of its granted version, which has arrived."""
        machine.version = machine.granted_version
        self.compute(machine)

    def compute(self, machine: Machine) -> None:
        """Let a worker compute with the model that it has. One that is ahead adds its new steps to this model."""
        self._observer.pulled(self.clock.now, machine.number, machine.version)
        if not machine.is_ahead:
            if self.model:
                self.model.compute(machine.number, machine.batch)
            self._begin_round(machine)
            return
        machine.is_ahead = False
        if machine.compute_ends == NEVER:  # it has waited for this model
            self._finish_round(machine)

    def _begin_round(self, machine: Machine) -> None:
        now = self.clock.now
        machine.round_batch = machine.batch
        machine.compute_seconds = machine.times.draw(machine.batch)
        machine.compute_began = begins = now if now > machine.paused_until else machine.paused_until
        self.compute_until(machine, begins + machine.compute_seconds)

    def compute_until(self, machine: Machine, ends: float) -> None:
        """Let a worker's computation end at this time."""
        machine.compute_ends = ends
        self.clock.at(ends, self._computed, machine)

    def _computed(self, machine: Machine) -> None:
        if machine.compute_ends != self.clock.now:
            return  # the iteration was abandoned, or a pause made it longer
        machine.compute_ends = NEVER
        self._computing.add(machine, self.clock.now)
        if not machine.is_ahead:  # otherwise the reply to the last update is not in
            self._finish_round(machine)

    def _finish_round(self, machine: Machine) -> None:
        if machine.is_silent:
            machine.unannounced = True
        else:
            self.announce_gradient(machine)

    def announce_gradient(self, machine: Machine) -> None:
        """Tell the job that a worker has computed its gradient."""
        loss = self.model.loss(machine.number) if self.model and self._hears_loss else None
        seconds, batch, resets = machine.compute_seconds, machine.round_batch, machine.resets
        machine.base_version = version = machine.version
        self.tell(events.GradientComputed(machine.connection, machine.iteration, version, batch, seconds, loss))
        if self._pushes_freely:
            self._transfer.push(machine)
        if self.spec.overlap and machine.resets == resets:
            machine.is_ahead = True
            self._begin_round(machine)

    def _push_now(self, turn: instructions.SendPushNow) -> None:
        machine = self.machines[turn.to % self._count]
        if machine.up:  # otherwise the message is lost, and the worker's lease will expire
            self._transfer.push(machine)

    def update_arrived(self, machine: Machine) -> None:
        """Tell the job that the update of a worker has arrived at all servers."""
        if self.model:
            self.model.arrive(Identity(machine.number, machine.incarnation, machine.iteration))
        self.tell(events.UpdateArrived(0, machine.number, machine.incarnation, machine.iteration))
        self._computing.begin_after_warm_up(self.clock.now)
        if self.summary.arrivals >= self._goal:
            self.clock.running = False

    def update_held(self, machine: Machine) -> None:
        """Tell the job that the whole update of a worker is at the servers, which wait for others."""
        self.tell(events.UpdateHeldBack(0, machine.number, machine.incarnation, machine.iteration))

    # Membership

    def join(self, machine: Machine) -> None:
        """Let a machine join the job as a new incarnation of its worker."""
        machine.start()
        machine.incarnation += 1
        machine.connection += self._count
        machine.up = machine.member = True
        self.tell(events.WorkerJoined(machine.connection, machine.number))

    def _cancel(self, cancel: instructions.SendCancel) -> None:
        self.abandon(self.machines[cancel.to % self._count])

    def _expel(self, expelled: instructions.SendExpelled) -> None:
        self.part_with(self.machines[expelled.to % self._count])

    def abandon(self, machine: Machine) -> None:
        """Abandon the iteration that a machine has under way, and the round that it computes ahead."""
        machine.reset()
        if self.model:
            self.model.drop(machine.number)
        self._transfer.abandon(machine)

    def part_with(self, machine: Machine) -> None:
        """Abandon the iteration of a machine that is no longer a member."""
        self.abandon(machine)
        machine.member = False
        self._transfer.leave(machine)
