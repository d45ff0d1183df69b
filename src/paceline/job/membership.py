"""Which workers take part, and at which stage of the conversation each of them is."""

from __future__ import annotations

from enum import Enum

from paceline.job.events import GradientComputed
from paceline.job.identity import Identity


class Stage(Enum):
    """Where one incarnation of a worker stands."""

    WAITING = "welcomed, and the policy does not know of it yet"
    IDLE = "waits for a Grant"
    COMPUTING = "was granted an iteration; it pulls and computes"
    ANNOUNCED = "has told that its update is ready, or soon will be"
    TURNED = "was told to push its update"
    CANCELLED = "its iteration was cancelled; it waits for a Grant"
    FINISHING = "has no more to train on; it waits for the others"
    FINISHED = "was told the last version"
    GONE = "takes no part any more"

    __hash__ = object.__hash__  # by identity, which is quicker than by name


class Transition(Enum):
    """What leads from one stage to the next."""

    ADMIT = "the policy is told of it"
    GRANT = "the policy grants it an iteration"
    ANNOUNCE = "it tells that its update is ready, or soon will be"
    TURN = "the policy tells it to push"
    ARRIVE = "its update is in, at all shards"
    CANCEL = "the policy cancels its iteration"
    FINISH = "it has no more to train on"
    END = "it is told the last version"
    LEAVE = "it leaves, or is given up"

    __hash__ = object.__hash__


_ENDS = {Transition.FINISH: Stage.FINISHING, Transition.LEAVE: Stage.GONE}

#: From a stage, by a step, to a stage. A step that is not here cannot be made.
TRANSITIONS: dict[Stage, dict[Transition, Stage]] = {
    Stage.WAITING: {Transition.ADMIT: Stage.IDLE, **_ENDS},
    Stage.IDLE: {Transition.GRANT: Stage.COMPUTING, **_ENDS},
    Stage.COMPUTING: {Transition.ANNOUNCE: Stage.ANNOUNCED, Transition.CANCEL: Stage.CANCELLED, **_ENDS},
    Stage.ANNOUNCED: {
        Transition.TURN: Stage.TURNED,
        Transition.ARRIVE: Stage.IDLE,
        Transition.CANCEL: Stage.CANCELLED,
        **_ENDS,
    },
    Stage.TURNED: {Transition.ARRIVE: Stage.IDLE, Transition.CANCEL: Stage.CANCELLED, **_ENDS},
    Stage.CANCELLED: {Transition.GRANT: Stage.COMPUTING, **_ENDS},
    Stage.FINISHING: {Transition.END: Stage.FINISHED, Transition.LEAVE: Stage.GONE},
    Stage.FINISHED: {Transition.LEAVE: Stage.GONE},
    Stage.GONE: {},
}
RUNNING = frozenset({Stage.COMPUTING, Stage.ANNOUNCED, Stage.TURNED})  # at work on an iteration
IN_ORDER = RUNNING | {Stage.IDLE, Stage.CANCELLED}  # the policy counts it as a member


class StageError(RuntimeError):
    """A step that cannot be made: a policy, or a driver, has broken its contract."""


class Member:
    """One incarnation of a worker."""

    __slots__ = (
        "applied",
        "batch_size",
        "connection",
        "exclusion",
        "expected",
        "granted_version",
        "heard",
        "incarnation",
        "iteration",
        "last_applied",
        "parts",
        "pull",
        "ready",
        "stage",
        "told_version",
        "worker",
    )

    def __init__(self, worker: int, incarnation: int, connection: int, now: float) -> None:
        self.worker, self.incarnation = worker, incarnation
        self.connection: int | None = connection  # None while its connection is lost
        self.heard = now
        self.stage = Stage.WAITING
        self.iteration = 0
        self.granted_version = 0  # by its last Grant, as the four that follow
        self.batch_size: int | None = None
        self.pull = True
        self.expected: int | None = None
        self.ready: GradientComputed | None = None  # the update of this iteration, until it is in
        self.parts = 0  # shards that have this iteration's update: bit n is shard n's
        self.applied = 0  # the newest iteration that was applied
        self.last_applied = -1  # the version that it made
        self.exclusion = ""  # why the policy leaves it out, if it does
        self.told_version = -1  # the last version of the model, once it was told

    @property
    def identity(self) -> Identity:
        """Of the update of this iteration."""
        return Identity(self.worker, self.incarnation, self.iteration)

    def step(self, step: Transition) -> None:
        """Go on to the next stage. StageError if this step leads nowhere from here."""
        then = TRANSITIONS[self.stage].get(step)
        if then is None:
            raise StageError(f"Worker {self.worker} cannot {step.name} now: it is at {self.stage.name}.")
        self.stage = then


class Roster:
    """All members, and whether anybody may still train."""

    def __init__(self, wanted: int, awaited: frozenset[int] | None = None, restored: bool = False) -> None:
        """wanted: how many workers the job was meant for. awaited: those that had not left the generation before.

        Where a checkpoint was restored and nobody knows which workers those were (None), as many as were wanted may
        yet come.
        """
        self.training: dict[int, Member] = {}  # worker → member; in the policy's order, or about to be
        self.finishing: dict[int, Member] = {}  # out of the order, and waiting for the last model
        self.awaited: set[int] = set(awaited or ())  # given up, or of the generation before, and not back
        self._unknown = wanted if restored and awaited is None else 0  # workers that may come, whoever they are
        self._came: set[int] = set()

    def find(self, worker: int) -> Member | None:
        """The member with this number."""
        return self.training.get(worker) or self.finishing.get(worker)

    def present(self) -> list[Member]:
        """Everybody who takes part."""
        return [*self.training.values(), *self.finishing.values()]

    def free_number(self) -> int:
        """The first number that nobody has. A member whose connection is lost is most likely the caller's old self."""
        taken = {member.worker for member in self.present() if member.connection is not None}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def enter(self, member: Member) -> None:
        """A worker joins, or joins again."""
        self.training[member.worker] = member
        self.awaited.discard(member.worker)
        self._came.add(member.worker)

    def finish(self, member: Member) -> None:
        """A member has no more to train on."""
        member.step(Transition.FINISH)
        del self.training[member.worker]
        self.finishing[member.worker] = member

    def leave(self, member: Member, expected_back: bool) -> None:
        """A member takes no part any more."""
        member.step(Transition.LEAVE)
        self.training.pop(member.worker, None)
        self.finishing.pop(member.worker, None)
        if expected_back:
            self.awaited.add(member.worker)

    def expect_no_more(self) -> None:
        """Workers that have not come by now will not come."""
        self._unknown = 0

    @property
    def may_yet_come(self) -> bool:
        """Does nobody train, though an unknown worker may come and do so?"""
        return not self.training and not self.awaited and len(self._came) < self._unknown

    @property
    def nobody_trains(self) -> bool:
        """Does nobody train, and will nobody come back who would?"""
        return not self.training and not self.awaited and len(self._came) >= self._unknown

    @property
    def expected(self) -> frozenset[int]:
        """The workers that would go on in another generation."""
        unfinished = {member.worker for member in self.present() if member.stage is not Stage.FINISHED}
        return frozenset(self.awaited | unfinished)
