"""A worker's process: a real WorkerState, and a script that does with it what a real worker's threads do."""

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

ANSWER_SECONDS = 10.0  # after which a server that does not answer is called again
RETRY_SECONDS = 2.0  # after which a shard that has not answered is asked again


class MustRejoin(Exception):
    """This incarnation is over; the worker joins again."""


class WorkerRefused(Exception):
    """The server does not want this worker."""


@dataclass(frozen=True)
class WelcomeTerms:
    """What a worker is told when it joins."""

    worker: int
    incarnation: int
    generation: str
    gated: bool
    streams: bool
    holders: tuple[SimulatedShardProcess, ...]


class SimulatedWorker:
    """One process of a worker. When it is over, somebody else may start another."""

    def __init__(self, world: World, number: int, chance: random.Random) -> None:
        self.world, self.number, self.chance = world, number, chance
        self.process = SimulatedProcess(world.clock)
        self.ended = ""  # why the process has ended
        self._state = WorkerState()
        self._control: SimulatedConnection | None = None
        self._welcome: WelcomeTerms | None = None
        self._resumed = self._over = False
        self._refused = ""
        self._heard = 0.0
        self._taken = 0
        self._lives = 0
        self._script = self._work()
        self.process.do(self._poke)

    # What it does, as `serve/worker/client.py` and `serve/worker/incarnation.py` do it

    def _work(self) -> Iterator[None]:
        while True:
            try:
                yield from self._live()
                self.ended = "done"
                return
            except MustRejoin:
                continue
            except WorkerRefused as refused:
                self.ended = str(refused)
                return

    def _live(self) -> Iterator[None]:
        yield from self._join()
        world, state = self.world, self._state
        version = yield from self._go_on()
        while True:
            self._taken += 1
            number, batch = self._taken, state.newest.batch_size or world.setting.batch
            self._say(
                state.request, events.SamplesRequested(0, number, batch, world.setting.samples, world.setting.epochs)
            )
            given = yield from self._until_given(number)
            samples = tuple(range(given.start, given.stop))
            if not samples:
                break
            yield from self._sleep(self.chance.uniform(0.2, 2.0) * world.setting.pace[self.number])
            yield from self._answer(version, number, samples)
            version = yield from self._go_on()
        self._say(state.finish, events.WorkerFinished(0))
        yield from self._until(lambda: state.last_version is not None)
        assert state.last_version is not None
        yield from self._pull(state.last_version)
        self._say(state.leave, events.WorkerLeft(0))
        yield from self._until(lambda: state.has_parted)

    def _until_given(self, number: int) -> Generator[None, None, instructions.SendSamples]:
        given: list[instructions.SendSamples] = []

        def take() -> bool:
            answer = self._state.take_given(number)
            if answer is not None:
                given.append(answer)
            return bool(given)

        yield from self._until(take)
        return given[0]

    def _go_on(self) -> Generator[None, None, int]:
        state = self._state
        while True:
            yield from self._until(lambda: state.gives or state.is_granted)
            if not state.gives:
                break
            state.gives = False
            assert self._welcome is not None
            yield from self._ask_all(partial(_begin, (self._welcome.worker, self._welcome.incarnation)))
        granted = state.take_grant()
        if granted.pull:
            yield from self._pull(granted.version)
        return int(granted.version)

    def _answer(self, version: int, number: int, samples: tuple[int, ...]) -> Iterator[None]:
        state, welcome = self._state, self._welcome
        assert welcome is not None
        iteration = state.iteration
        ready = events.GradientComputed(0, iteration, version, len(samples), 0.5, 1.0 / (1 + version), (number,))
        announces = welcome.streams and self.number % 2 == 1
        if announces:
            self._say(state.announce, events.GradientBegun(0, iteration, version, len(samples)))
        else:
            self._say(state.tell_ready, ready)
        if welcome.gated:
            yield from self._until(lambda: state.turn(iteration) != "later")
        if not state.is_over(iteration):
            update = Identity(welcome.worker, welcome.incarnation, iteration)
            if welcome.streams:
                yield from self._push_pieces(update, samples)
            else:
                yield from self._ask_all(lambda holder, answer: holder.shard.push(update, samples, answer))
        if announces:
            self._say(state.tell_ready, ready)

    def _push_pieces(self, update: Identity, samples: tuple[int, ...]) -> Iterator[None]:
        assert self._welcome is not None
        waits: list[Callable[[], bool]] = []
        for holder in self._welcome.holders:
            for piece in range(len(holder.shard.pieces)):
                waits.append(self._ask(holder, partial(_push_piece, update, piece, samples)))
                yield from self._sleep(self.chance.uniform(0.0, 0.1))
        yield from self._until(lambda: all(done() for done in waits))

    def _pull(self, version: int) -> Iterator[None]:
        yield from self._ask_all(lambda holder, answer: holder.shard.pull(version, answer))

    # Waiting

    def _poke(self) -> None:
        """Go on as far as possible."""
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
            self._poke()

        self.process.after(seconds, wake)
        while not over[0]:
            yield

    # The coordinator

    def _join(self) -> Iterator[None]:
        self._lives += 1
        self._state, self._welcome = WorkerState(), None
        self._over, self._resumed, self._refused = False, False, ""
        while self._welcome is None:
            self._hang_up()
            self._control = self.world.connect(self)
            if self._control:
                self._control.send(self, events.WorkerJoined(self._control.number, self.number))
                yield from self._wait_for_answer(lambda: self._welcome is not None, patience=3 * ANSWER_SECONDS)
            else:
                yield from self._sleep(self.chance.uniform(0.05, 2.0))
        self._heard = self.process.clock.now
        self._beat(self._lives)

    def _wait_for_answer(self, found: Callable[[], bool], patience: float) -> Iterator[None]:
        """Until there is an answer, the connection is lost, or patience is."""
        tried, late = self._control, [False]

        def give_up() -> None:
            late[0] = True
            self._poke()

        self.process.after(patience, give_up)
        yield from self._until(lambda: found() or late[0] or self._control is not tried)

    def _say(self, note: Callable[[Any], list[Any]], message: Any) -> None:
        for each in note(message):
            self._send(each)

    def _send(self, message: Any) -> None:
        if self._control and self._resumed:
            self._control.send(self, replace(message, connection=self._control.number))

    def _beat(self, life: int) -> None:
        lease = self.world.setting.lease
        if self.ended or life != self._lives or self._over:
            return
        if self._resumed and self.process.clock.now - self._heard > lease:
            self._control_lost()
        self._say(self._state.beat, events.WorkerAlive(0))
        self.process.after(lease / 3, lambda: self._beat(life))

    def received(self, connection: SimulatedConnection, message: Any) -> None:
        if connection is not self._control or self.ended:
            return
        self._heard = self.process.clock.now
        match message:
            case WelcomeTerms():
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
        self._poke()

    def lost(self, connection: SimulatedConnection) -> None:
        if connection is self._control and not self.ended:
            self._control_lost()

    def _control_lost(self) -> None:
        """Call again as the same incarnation; before the Welcome, the script joins again."""
        self._hang_up()
        if self._welcome is None:
            self._poke()
        elif not self._over:
            self._come_back(self._lives)

    def _come_back(self, life: int) -> None:
        if self.ended or self._over or life != self._lives or self._resumed or self._welcome is None:
            return
        self._hang_up()
        self._control = self.world.connect(self)
        if self._control:
            who = (self._welcome.worker, self._welcome.incarnation, self._welcome.generation)
            self._control.send(self, events.WorkerResumed(self._control.number, *who))
        wait = ANSWER_SECONDS if self._control else self.chance.uniform(0.05, 2.0)
        self.process.after(wait, lambda: self._come_back(life))

    def _hang_up(self) -> None:
        self._resumed = False
        if self._control:
            self._control.close(self)
            self._control = None

    def kill(self) -> None:
        """The process dies. The system closes its connections."""
        self._hang_up()
        self.process.kill()
        self.ended = "killed"

    def cut(self, notice: float) -> None:
        """Its control connection is lost."""
        if self._control:
            self._control.cut(notice)

    # Shards

    def _ask_all(self, call: Callable[[SimulatedShardProcess, Callable[[str], None]], None]) -> Iterator[None]:
        assert self._welcome is not None
        waits = [self._ask(holder, call) for holder in self._welcome.holders]
        yield from self._until(lambda: all(done() for done in waits))

    def _ask(
        self, holder: SimulatedShardProcess, call: Callable[[SimulatedShardProcess, Callable[[str], None]], None]
    ) -> Callable[[], bool]:
        """Ask a shard, and again until it answers. True once it has."""
        life, answered = self._lives, [False]

        def arrive(answer: str) -> None:
            if life == self._lives and not self.ended:
                if answer == "expelled":
                    self._over = True
                answered[0] = True
                self._poke()

        def answer_with(answer: str) -> None:
            if self.chance.random() > self.world.setting.loss:
                delay = self.chance.expovariate(50.0)
                self.process.clock.at(self.process.clock.now + delay, lambda _: self.process.do(lambda: arrive(answer)))

        def ask() -> None:
            if answered[0] or life != self._lives or self._over or self.ended:
                return
            if self.chance.random() > self.world.setting.loss:
                holder.process.after(self.chance.expovariate(50.0), lambda: call(holder, answer_with))
            self.process.after(RETRY_SECONDS, ask)

        ask()
        return lambda: answered[0]


def _begin(who: tuple[int, int], holder: SimulatedShardProcess, answer: Callable[[str], None]) -> None:
    holder.begin(who, answer)


def _push_piece(
    update: Identity, piece: int, samples: tuple[int, ...], holder: SimulatedShardProcess, answer: Callable[[str], None]
) -> None:
    holder.shard.push_piece(update, piece, samples, answer)
