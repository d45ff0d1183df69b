"""The process of a worker: a real WorkerState, and a script that uses it as the threads of a real worker do."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.job import Identity, WorkerState, events, instructions
from paceline.simulate.protocol.transport import SimulatedConnection, SimulatedProcess

if TYPE_CHECKING:
    from paceline.simulate.protocol.run import World
    from paceline.simulate.protocol.server import SimulatedShardProcess

ANSWER_SECONDS = 10.0  # without an answer, after which the worker reconnects to the server
RETRY_SECONDS = 2.0  # without an answer, after which a request to a shard is repeated


class MustRejoin(Exception):
    """This incarnation has ended; the worker must join again."""


class WorkerRefused(Exception):
    """The server has refused this worker."""


@dataclass(frozen=True)
class SimulatedWelcome:
    """The answer of the server to a worker that joins."""

    worker: int
    incarnation: int
    generation: str
    gated: bool
    streams: bool
    shard_processes: tuple[SimulatedShardProcess, ...]


class SimulatedWorker:
    """A process of a worker. After its end, a new process may be started."""

    def __init__(self, world: World, number: int, rng: random.Random) -> None:
        self.world, self.number, self.rng = world, number, rng
        self.process = SimulatedProcess(world.clock)
        self.ended = ""  # why the process has ended; "" while it runs
        self._state = WorkerState()
        self._control: SimulatedConnection | None = None
        self._welcome: SimulatedWelcome | None = None
        self._resumed = self._over = False
        self._refused = ""
        self._heard = 0.0
        self._requests = 0
        self._incarnation = 0
        self._loads = world.setting.loads == "all" or (world.setting.loads == "main" and number == 0)
        self._has_loaded = False
        self._script = self._work()
        self.process.do(self._run_script)

    # The script, which follows `serve/worker/client.py` and `serve/worker/incarnation.py`

    def _work(self) -> Iterator[None]:
        while True:
            try:
                yield from self._run_incarnation()
                self.ended = "done"
                return
            except MustRejoin:
                continue
            except WorkerRefused as refused:
                self.ended = str(refused)
                return

    def _run_incarnation(self) -> Iterator[None]:
        yield from self._join()
        world, state = self.world, self._state
        version = yield from self._next_grant()
        if self._loads and not self._has_loaded:
            yield from self._load_weights()
        while True:
            self._requests += 1
            number, batch = self._requests, state.newest.batch_size or world.setting.batch
            self._record_and_send(
                state.request, events.SamplesRequested(0, number, batch, world.setting.samples, world.setting.epochs)
            )
            given = yield from self._receive(partial(state.take_samples, number))
            samples = tuple(range(given.start, given.stop))
            if not samples:
                break
            yield from self._sleep(self.rng.uniform(0.2, 2.0) * world.setting.pace[self.number])
            yield from self._push_gradient(version, number, samples)
            version = yield from self._next_grant()
        self._record_and_send(state.finish, events.WorkerFinished(0))
        yield from self._until(lambda: state.last_version is not None)
        assert state.last_version is not None
        yield from self._pull(state.last_version)
        self._record_and_send(state.leave, events.WorkerLeft(0))
        yield from self._until(lambda: state.leave_confirmed)

    def _load_weights(self) -> Iterator[None]:
        """Load other weights, and offer them to the job. If it keeps its own, pull them."""
        yield from self._sleep(self.rng.uniform(0.0, 1.0))
        self._has_loaded = True
        self._record_and_send(self._state.offer, events.WeightsOffered(0))
        kept = yield from self._receive(self._state.take_kept)
        yield from self._pull(kept.version)

    def _receive(self, take: Callable[[], Any]) -> Generator[None, None, Any]:
        """Wait until `take` returns an answer, and return it."""
        answers: list[Any] = []

        def taken() -> bool:
            answer = take()
            if answer is not None:
                answers.append(answer)
            return bool(answers)

        yield from self._until(taken)
        return answers[0]

    def _next_grant(self) -> Generator[None, None, int]:
        state = self._state
        while True:
            yield from self._until(lambda: state.must_send_weights or state.is_granted)
            if not state.must_send_weights:
                break
            state.must_send_weights = False
            assert self._welcome is not None
            yield from self._request_all(partial(_begin, (self._welcome.worker, self._welcome.incarnation)))
        granted = state.take_grant()
        if granted.pull:
            yield from self._pull(granted.version)
        return int(granted.version)

    def _push_gradient(self, version: int, number: int, samples: tuple[int, ...]) -> Iterator[None]:
        state, welcome = self._state, self._welcome
        assert welcome is not None
        iteration = state.iteration
        ready = events.GradientComputed(0, iteration, version, len(samples), 0.5, 1.0 / (1 + version), (number,))
        announces = welcome.streams and self.number % 2 == 1
        if announces:
            self._record_and_send(state.announce, events.GradientBegun(0, iteration, version, len(samples)))
        else:
            self._record_and_send(state.announce_ready, ready)
        if welcome.gated:
            yield from self._until(lambda: state.turn(iteration) != "later")
        if not state.is_over(iteration):
            update = Identity(welcome.worker, welcome.incarnation, iteration)
            if welcome.streams and state.parts:
                yield from self._push_in_visits(update, samples)
            elif welcome.streams:
                yield from self._push_pieces(update, samples)
            else:
                yield from self._request_all(
                    lambda shard_process, answer: shard_process.shard.push(update, samples, answer)
                )
        if announces:
            self._record_and_send(state.announce_ready, ready)

    def _push_pieces(self, update: Identity, samples: tuple[int, ...]) -> Iterator[None]:
        assert self._welcome is not None
        waits: list[Callable[[], bool]] = []
        for shard_process in self._welcome.shard_processes:
            for piece in range(len(shard_process.shard.pieces)):
                waits.append(self._request(shard_process, partial(_push_piece, update, piece, samples)))
                yield from self._sleep(self.rng.uniform(0.0, 0.1))
        yield from self._until(lambda: all(done() for done in waits))

    def _push_in_visits(self, update: Identity, samples: tuple[int, ...]) -> Iterator[None]:
        """Push the part beside this worker at once, and the others as the coordinator orders visits."""
        assert self._welcome is not None
        state, iteration, parts = self._state, update.iteration, self._state.parts
        waits: list[Callable[[], bool]] = []
        visits: dict[tuple[int, int], list[Callable[[], bool]]] = {}  # under way → whether its pieces are answered
        left = {
            (number, part)
            for number in range(len(self._welcome.shard_processes))
            for part in range(parts)
            if number != self._welcome.worker
        }

        def push(number: int, part: int) -> list[Callable[[], bool]]:
            assert self._welcome is not None
            process = self._welcome.shard_processes[number]
            count = len(process.shard.pieces)
            pieces = range(part * count // parts, (part + 1) * count // parts)
            sent = [self._request(process, partial(_push_piece, update, piece, samples)) for piece in pieces]
            waits.extend(sent)
            return sent

        def progress() -> bool:
            for place in [each for each, sent in visits.items() if all(done() for done in sent)]:
                del visits[place]
                self._record_and_send(state.end_visit, events.VisitEnded(0, iteration, *place))
            while begun := state.take_visit(iteration):
                left.discard(begun)
                visits[begun] = push(*begun)
            return state.is_over(iteration) or not (left or visits)

        if self._welcome.worker < len(self._welcome.shard_processes):
            for part in range(parts):
                push(self._welcome.worker, part)
        yield from self._until(progress)
        for place in sorted(left):
            push(*place)
        yield from self._until(lambda: all(done() for done in waits))

    def _pull(self, version: int) -> Iterator[None]:
        yield from self._request_all(lambda shard_process, answer: shard_process.shard.pull(version, answer))

    # Waiting

    def _run_script(self) -> None:
        """Run the script until it has to wait."""
        if not self.ended:
            next(self._script, None)
            if self.ended:
                self._hang_up()
                self.process.kill()
                self.world.worker_ended(self)

    def _until(self, found: Callable[[], Any]) -> Iterator[None]:
        while not found():
            if self._refused:
                raise WorkerRefused(self._refused)
            if self._over:
                raise MustRejoin
            yield

    def _sleep(self, seconds: float) -> Iterator[None]:
        over = [False]

        def wake() -> None:
            over[0] = True
            self._run_script()

        self.process.after(seconds, wake)
        while not over[0]:
            yield

    # The coordinator

    def _join(self) -> Iterator[None]:
        self._incarnation += 1
        self._state, self._welcome = WorkerState(), None
        self._over, self._resumed, self._refused = False, False, ""
        while self._welcome is None:
            self._hang_up()
            self._control = self.world.connect(self)
            if self._control:
                self._control.send(self, events.WorkerJoined(self._control.number, self.number))
                yield from self._wait_for_answer(lambda: self._welcome is not None, patience=3 * ANSWER_SECONDS)
            else:
                yield from self._sleep(self.rng.uniform(0.05, 2.0))
        self._heard = self.process.clock.now
        self._send_heartbeats(self._incarnation)

    def _wait_for_answer(self, found: Callable[[], bool], patience: float) -> Iterator[None]:
        """Wait until there is an answer, the connection is lost, or `patience` seconds have passed."""
        tried, late = self._control, [False]

        def give_up() -> None:
            late[0] = True
            self._run_script()

        self.process.after(patience, give_up)
        yield from self._until(lambda: found() or late[0] or self._control is not tried)

    def _record_and_send(self, note: Callable[[Any], list[Any]], message: Any) -> None:
        for each in note(message):
            self._send(each)

    def _send(self, message: Any) -> None:
        if self._control and self._resumed:
            self._control.send(self, replace(message, connection=self._control.number))

    def _send_heartbeats(self, incarnation: int) -> None:
        lease = self.world.setting.lease
        if self.ended or incarnation != self._incarnation or self._over:
            return
        if self._resumed and self.process.clock.now - self._heard > lease:
            self._control_lost()
        self._record_and_send(self._state.beat, events.WorkerAlive(0))
        self.process.after(lease / 3, lambda: self._send_heartbeats(incarnation))

    def received(self, connection: SimulatedConnection, message: Any) -> None:
        if connection is not self._control or self.ended:
            return
        self._heard = self.process.clock.now
        match message:
            case SimulatedWelcome():
                self._welcome, self._resumed = message, True
            case instructions.SendResumed():
                self._resumed = True
                for each in self._state.reconnected():
                    self._send(each)
            case instructions.SendExpelled():
                self._over = True
            case instructions.SendRefused(_, reason):
                self._refused = reason
            case _:
                self._state.heard(message)
        self._run_script()

    def lost(self, connection: SimulatedConnection) -> None:
        if connection is self._control and not self.ended:
            self._control_lost()

    def _control_lost(self) -> None:
        """Reconnect as the same incarnation. Before the Welcome, the script joins again instead."""
        self._hang_up()
        if self._welcome is None:
            self._run_script()
        elif not self._over:
            self._reconnect(self._incarnation)

    def _reconnect(self, incarnation: int) -> None:
        if self.ended or self._over or incarnation != self._incarnation or self._resumed or self._welcome is None:
            return
        self._hang_up()
        self._control = self.world.connect(self)
        if self._control:
            identity = (self._welcome.worker, self._welcome.incarnation, self._welcome.generation)
            self._control.send(self, events.WorkerResumed(self._control.number, *identity))
        wait = ANSWER_SECONDS if self._control else self.rng.uniform(0.05, 2.0)
        self.process.after(wait, lambda: self._reconnect(incarnation))

    def _hang_up(self) -> None:
        self._resumed = False
        if self._control:
            self._control.close(self)
            self._control = None

    def kill(self) -> None:
        """Kill the process. Its connections are closed."""
        self._hang_up()
        self.process.kill()
        self.ended = "killed"

    def cut(self, notice: float) -> None:
        """Lose the connection to the coordinator."""
        if self._control:
            self._control.cut(notice)

    # Shards

    def _request_all(self, call: Callable[[SimulatedShardProcess, Callable[[str], None]], None]) -> Iterator[None]:
        assert self._welcome is not None
        waits = [self._request(shard_process, call) for shard_process in self._welcome.shard_processes]
        yield from self._until(lambda: all(done() for done in waits))

    def _request(
        self, shard_process: SimulatedShardProcess, call: Callable[[SimulatedShardProcess, Callable[[str], None]], None]
    ) -> Callable[[], bool]:
        """Send a request to a shard, and repeat it until it answers.

        Return a function that says whether it has answered.
        """
        incarnation, answered = self._incarnation, [False]

        def arrive(answer: str) -> None:
            if incarnation == self._incarnation and not self.ended:
                if answer == "expelled":
                    self._over = True
                answered[0] = True
                self._run_script()

        def answer_with(answer: str) -> None:
            if self.rng.random() > self.world.setting.loss:
                delay = self.rng.expovariate(50.0)
                self.process.clock.at(self.process.clock.now + delay, lambda _: self.process.do(lambda: arrive(answer)))

        def ask() -> None:
            if answered[0] or incarnation != self._incarnation or self._over or self.ended:
                return
            if self.rng.random() > self.world.setting.loss:
                shard_process.process.after(self.rng.expovariate(50.0), lambda: call(shard_process, answer_with))
            self.process.after(RETRY_SECONDS, ask)

        ask()
        return lambda: answered[0]


def _begin(identity: tuple[int, int], shard_process: SimulatedShardProcess, answer: Callable[[str], None]) -> None:
    shard_process.begin(identity, answer)


def _push_piece(
    update: Identity,
    piece: int,
    samples: tuple[int, ...],
    shard_process: SimulatedShardProcess,
    answer: Callable[[str], None],
) -> None:
    shard_process.shard.push_piece(update, piece, samples, answer)
