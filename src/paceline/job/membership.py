"""The members of a job, and the stage of the protocol at which each of them is."""

from __future__ import annotations

from enum import Enum

from paceline.job.identity import Identity
from paceline.policies import Update


class Stage(Enum):
    """The stage of one incarnation of a worker."""

    WAITING = "welcomed; the policy does not know the worker yet"
    IDLE = "waits for a Grant"
    COMPUTING = "has a Grant; pulls and computes"
    ANNOUNCED = "announced that its gradient has begun or is computed"
    TURNED = "was told to push its update"
    CANCELLED = "its iteration was cancelled; waits for a Grant"
    FINISHING = "has no samples left; waits for the other workers"
    FINISHED = "was told the last version of the model"
    GONE = "left, or was given up"

    __hash__ = object.__hash__  # by identity, which is faster than by name


class Transition(Enum):
    """A transition from one stage to another."""

    ADMIT = "the policy is told that the worker joined"
    GRANT = "the policy grants an iteration"
    ANNOUNCE = "the worker announces that its gradient has begun or is computed"
    TURN = "the policy lets the worker push"
    ARRIVE = "the update has arrived at all shards"
    CANCEL = "the policy cancels the iteration"
    FINISH = "the worker has no samples left"
    END = "the worker is told the last version of the model"
    LEAVE = "the worker leaves or is given up"

    __hash__ = object.__hash__


_ENDS = {Transition.FINISH: Stage.FINISHING, Transition.LEAVE: Stage.GONE}

#: The stage that each transition leads to, for each stage. All other transitions are errors.
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
RUNNING = frozenset({Stage.COMPUTING, Stage.ANNOUNCED, Stage.TURNED})  # an iteration is running
ADMITTED = RUNNING | {Stage.IDLE, Stage.CANCELLED}  # the policy counts the worker as a member


class StageError(RuntimeError):
    """A transition that is not in the table: a policy or a driver has broken its contract."""


class Member:
    """One incarnation of a worker."""

    __slots__ = (
        "applied_iteration",
        "applied_version",
        "batch_size",
        "connection",
        "exclusion",
        "expected_staleness",
        "final_version",
        "granted_version",
        "heard",
        "held",
        "ignored_batches",
        "incarnation",
        "iteration",
        "own_batch",
        "parts",
        "pull",
        "size",
        "stage",
        "taken",
        "update",
        "visits",
        "weight",
        "worker",
    )

    def __init__(self, worker: int, incarnation: int, connection: int, now: float) -> None:
        self.worker, self.incarnation = worker, incarnation
        self.connection: int | None = connection  # None while the connection is lost
        self.heard = now  # the time of the last message
        self.stage = Stage.WAITING
        self.iteration = 0
        # The last Grant
        self.granted_version = 0
        self.batch_size: int | None = None
        self.own_batch = 0  # the batch size that it computes if a Grant names none; 0: not known
        self.ignored_batches = 0  # updates in a row that had another batch size than their Grants
        self.pull = True
        self.visits = False  # whether SendVisit says when it pushes each part of its update
        self.expected_staleness: int | None = None
        # The update of this iteration, from its announcement until it has arrived at all shards
        self.update: Update | None = None
        self.taken: tuple[int, ...] = ()  # the sample requests that it was computed from
        self.parts = 0  # the shards that have received their parts: bit n is for shard n
        self.held = 0  # the shards that hold their parts until others can be applied with them
        self.size: tuple[float, float, float] | None = None  # of these parts together, if updates are clipped
        self.applied_iteration = 0  # the newest iteration that was applied
        self.applied_version = -1  # the version that it made
        self.weight: float | None = None  # with which its last update was applied; 0 if it was discarded
        self.exclusion = ""  # why the policy excludes this worker, if it does
        self.final_version = -1  # the last version of the model, once the worker was told

    @property
    def identity(self) -> Identity:
        """The identity of this iteration's update."""
        return Identity(self.worker, self.incarnation, self.iteration)

    def step(self, transition: Transition) -> None:
        """Move to the next stage. Raise StageError if the transition is not allowed at this stage."""
        following = TRANSITIONS[self.stage].get(transition)
        if following is None:
            raise StageError(f"Worker {self.worker} is at stage {self.stage.name}, which allows no {transition.name}.")
        self.stage = following


class Roster:
    """All members, and the workers that may still come."""

    def __init__(self, wanted: int, awaited: frozenset[int] | None = None, restored: bool = False) -> None:
        """wanted: the number of workers in the job's configuration.

        awaited: the workers that had not left the previous generation. If the job was restored and they are unknown
        (None), the roster expects `wanted` workers with any numbers.
        """
        self.training: dict[int, Member] = {}  # worker → member that the policy knows, or that waits for admission
        self.finishing: dict[int, Member] = {}  # worker → member that waits for the last version of the model
        self.awaited: set[int] = set(awaited or ())  # workers that may come back
        self._unknown = wanted if restored and awaited is None else 0  # workers to expect, whatever their numbers are
        self._came: set[int] = set()

    def find(self, worker: int) -> Member | None:
        """Return the member with this number, or None."""
        return self.training.get(worker) or self.finishing.get(worker)

    def present(self) -> list[Member]:
        """Return all members."""
        return [*self.training.values(), *self.finishing.values()]

    def first_free_number(self) -> int:
        """Return the lowest free number.

        The number of a member without a connection counts as free: its old process has most likely been restarted.
        """
        taken = {member.worker for member in self.present() if member.connection is not None}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def enter(self, member: Member) -> None:
        """Add a worker that joins or rejoins."""
        self.training[member.worker] = member
        self.awaited.discard(member.worker)
        self._came.add(member.worker)

    def finish(self, member: Member) -> None:
        """Move a member that has no samples left to those that wait for the last version."""
        member.step(Transition.FINISH)
        del self.training[member.worker]
        self.finishing[member.worker] = member

    def leave(self, member: Member, expected_back: bool) -> None:
        """Remove a member. expected_back: wait for it to join again."""
        member.step(Transition.LEAVE)
        self.training.pop(member.worker, None)
        self.finishing.pop(member.worker, None)
        if expected_back:
            self.awaited.add(member.worker)

    def stop_expecting_unknown(self) -> None:
        """Stop waiting for workers whose numbers are unknown."""
        self._unknown = 0

    @property
    def awaits_only_unknown(self) -> bool:
        """True if no worker trains, and only workers with unknown numbers may still come."""
        return not self.training and not self.awaited and len(self._came) < self._unknown

    @property
    def training_is_over(self) -> bool:
        """True if no worker trains and none may still come."""
        return not self.training and not self.awaited and len(self._came) >= self._unknown

    @property
    def expected(self) -> frozenset[int]:
        """The workers that the next generation must wait for."""
        unfinished = {member.worker for member in self.present() if member.stage is not Stage.FINISHED}
        return frozenset(self.awaited | unfinished)
