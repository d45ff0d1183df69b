"""What a policy is told and what it may answer.

A policy is a pure state machine. Its driver (a simulator, a parameter server, a federated engine) tells it what
happened and when; the policy answers with decisions, which the driver carries out in the order given. A policy
opens no socket, reads no clock, starts no thread and knows no tensor.

What a driver promises:
 - `now` never goes backwards;
 - every `Grant` to a member is followed by one `ready` and one `arrived` of that worker, or by `left`. If the
   iteration was cancelled in between, its `ready` or `arrived` may still come, or not;
 - a worker that rejoins is a new incarnation. Its Updates carry the new number, so two updates are never equal.
   Nothing of the old incarnation is reported after `left`;
 - `Update.iteration` counts the Grants of that worker since it joined, from 1;
 - every `Apply` makes one new version of the model, numbered from 1;
 - where `hears_ready` is false it may leave out `ready`, and take the Turn for granted.

What a policy promises:
 - the same events give the same decisions;
 - every arrived update is applied or discarded, exactly once (a kept one may be applied many times);
 - nothing is left lying when the last member leaves;
 - where it is streamed or pipelined, every Apply is of one Stream; otherwise there are no Streams;
 - somebody always runs: while there are members, one of them holds an unanswered Grant or a `WakeAt` is set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from paceline.policies.options import checked
from paceline.policies.record import record

WorkerId: TypeAlias = int


@record
class Update:
    """What one worker computed in one iteration, without the tensor.

    base_version: the model version the worker pulled, from which the update was computed.
    compute_seconds: time in computation alone, as the worker measured it.
    incarnation: a number that is new each time that the worker joins. Worker, incarnation and iteration identify the
    update.
    """

    worker: WorkerId
    iteration: int
    base_version: int
    batch_size: int
    compute_seconds: float
    loss: float | None = None
    incarnation: int = 1


@record
class Turn:
    """Push now. Answers `ready`."""

    worker: WorkerId


@record
class Stream:
    """How pushes that begin now are applied, said before they are in; only where the driver streams or pipelines.

    The updates that these workers have last announced by `ready` are applied together, slice by slice: each slice as
    soon as all of them have sent it and, if `in_order`, after all earlier Streams have been applied to that slice. It
    is returned to them at once. The Apply that names them follows when all of it is in, with these weights, these
    updates and no others, in this order; those who left before theirs was in, or were cancelled, are missing from it.
    If nobody is left, no Apply follows.

    expected_staleness: where the policy knows it in advance, what the staleness of the updates will be that these
    workers make of what is returned to them, counted from this Stream.
    """

    workers: tuple[WorkerId, ...]
    weights: tuple[float, ...]
    in_order: bool = True
    expected_staleness: int | None = None


@record
class Add:
    """The update may be added to a running sum, times this weight, instead of being held until it is applied.

    The Apply that names the update will name the sum, and all that is in it. If the update is discarded after all, so
    is all else in the sum. A driver that holds its updates need not mind.
    """

    update: Update
    sum: int
    weight: float


@record
class Apply:
    """Change the model by these updates, together, in this order; this makes the next version.

    With `mix` unset, each update is a gradient step at its own learning rate times its weight. With `mix` set, what
    was pushed are weights of a model: model ← (1−mix)·model + mix·(mean of those, by weight).

    sums: if all of the updates were added up (Add), in which sums, and what each counts times: it comes to the same.
    """

    updates: tuple[Update, ...]
    weights: tuple[float, ...]
    mix: float | None = None
    sums: tuple[tuple[int, float], ...] = ()


@record
class Keep:
    """Put the update aside under this slot, in place of what was there; it may be named in later Applies."""

    update: Update
    slot: int


@record
class Discard:
    """Drop the update."""

    update: Update


@record
class Grant:
    """Pull the newest model and run the next iteration.

    batch_size: None means the worker's own.
    expected_staleness: where the policy knows it in advance, what the staleness of the resulting update will be.
    """

    worker: WorkerId
    batch_size: int | None = None
    expected_staleness: int | None = None


@record
class Cancel:
    """Abandon the iteration under way. Where its push was streamed, what has not been applied yet is skipped."""

    worker: WorkerId


@record
class WakeAt:
    """Call `woke` at this time. A new WakeAt replaces the old one; an early or repeated `woke` is harmless."""

    time: float


Decision: TypeAlias = Turn | Stream | Add | Apply | Keep | Discard | Grant | Cancel | WakeAt
Decisions: TypeAlias = list[Decision]


class Policy(ABC):
    """Who may go, when, and with what batch.

    A subclass's `__init__` declares its options with `Annotated` types (see `paceline.policies.options`): their
    values are checked on construction, and a name with options makes the same policy (`paceline.policies.make`).
    """

    #: Can each slice of an update be applied as it arrives? It can where updates are applied one by one, at once.
    streamable: bool = False
    #: Set by the driver, before the first event, if it does apply so. A policy then answers `ready` with a Stream,
    #: and may gate the push by its Turn.
    streamed: bool = False
    #: Are transfers to be let onto the servers' links one after the other, in the order of Turns and Grants?
    takes_turns: bool = False
    #: Does it put updates aside (Keep), to name them again in later Applies?
    keeps: bool = False
    #: Are weights of a model pushed instead of gradients, to be mixed into the server's?
    mixes: bool = False
    #: Is it to be told (`measured`) the cosine of every update with the whole of what was applied, after each Apply of
    #: several?
    compares: bool = False
    #: Does it look at the losses of updates? A simulation that trains then knows them by the time an update is in.
    hears_loss: bool = False
    #: May a shard answer with its slice as soon as all members' slices are in, before the barrier's Apply? Which
    #: members those are is said by a Stream.
    pipelined: bool = False

    #: One line for `paceline policies`.
    summary: ClassVar[str] = ""

    @property
    def least_workers(self) -> int:
        """How many workers it takes for the options to make sense. With fewer it works, but as another scheme."""
        return 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]
        if "ready" in cls.__dict__ and "hears_ready" not in cls.__dict__:
            cls.hears_ready = True  # type: ignore[assignment,method-assign]  # who answers for itself is asked

    @property
    def hears_ready(self) -> bool:
        """Must `ready` be told? Where it is answered with a Turn and nothing else, always, a driver may save that."""
        return False

    @abstractmethod
    def joined(self, worker: WorkerId, now: float) -> Decisions:
        """A worker came. It waits for a Grant."""

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        """A worker has computed its gradient, of so many samples, and asks to push it."""
        return [Turn(worker)]

    @abstractmethod
    def arrived(self, update: Update, now: float) -> Decisions:
        """A whole push is in. Its worker waits for a Grant."""

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        """Something was measured outside: a validation loss, the `cosine` of an Update. Most policies do not mind.

        A `pardon` of several workers is a person's word: they are to be taken back. Who hears losses is told the
        `momentum` of the server's optimizer too, once it is known, before anybody joins.
        """
        return []

    @abstractmethod
    def left(self, worker: WorkerId, now: float) -> Decisions:
        """A worker left or was given up. What had fully arrived from it still counts.

        But not where a Stream would have to name it that has not been given: a Stream is of members.
        """

    def woke(self, now: float) -> Decisions:
        """A WakeAt has come due."""
        return []

    def exclusion(self, worker: WorkerId) -> str:
        """Why this member is not granted any more, in a sentence; empty where it takes part."""
        return ""

    def memory(self) -> dict[str, Any]:
        """What is worth knowing after a restart, when everybody has to join anew; values that JSON knows."""
        return {}

    def recall(self, memory: Mapping[str, Any]) -> None:  # noqa: B027  # most have nothing to recall
        """Take over an earlier policy's `memory`, before the first event. What makes no sense is passed over."""


def apply_one(update: Update, weight: float) -> Apply:
    """The Apply of a policy that applies updates one by one."""
    return Apply((update,), (weight,))


def grant_all(workers: Sequence[WorkerId]) -> Decisions:
    """One plain Grant for each."""
    return [Grant(worker) for worker in workers]
