"""The contract between a policy and its driver: events in, decisions out.

A policy is a pure state machine. Its driver (a simulator, a parameter server, a federated engine) reports each event
and its time. The policy returns decisions, which the driver carries out in the given order. A policy opens no socket,
reads no clock, starts no thread and holds no tensor.

A driver promises:
 - `now` never decreases;
 - every `Grant` to a member is followed by one `ready` and one `arrived` for that worker, or by `left`. After a Cancel,
   the `ready` and the `arrived` of the cancelled iteration may or may not follow;
 - a worker that rejoins is a new incarnation. Its Updates carry the new number, so no two updates are equal. After
   `left` the driver reports no event of the old incarnation;
 - `Update.iteration` counts the Grants of that worker since it joined, from 1;
 - every `Apply` makes one new version of the model, numbered from 1;
 - if `hears_ready` is false, the driver may skip `ready` and assume the Turn.

A policy promises:
 - the same events give the same decisions;
 - it applies or discards every update that has arrived, exactly once (it may apply a kept update many times);
 - it leaves no update undecided when the last member leaves;
 - if it is streamed or pipelined, every Apply belongs to one Stream; otherwise it makes no Streams;
 - the job never stalls: while there are members, one of them holds an unanswered Grant or a `WakeAt` is set.
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
    """The result of one iteration of one worker, without the tensor.

    base_version: the model version from which the update was computed.
    compute_seconds: the time of the computation alone, as the worker measured it.
    incarnation: a number that is new each time the worker joins. Worker, incarnation and iteration identify the update.
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
    """Let the worker push now. Answers `ready`."""

    worker: WorkerId


@record
class Stream:
    """How to apply pushes that begin now, slice by slice. Only for a driver that streams or pipelines.

    The updates that these workers announced last (`ready`) are applied together. Each slice is applied as soon as all
    of the workers have sent it and, if `in_order`, after all earlier Streams have been applied to that slice. It is
    returned to the workers at once. An Apply follows when all slices have arrived. It has these weights and names these
    updates, in this order, without those of workers that left before their push was complete or were cancelled. If no
    update remains, no Apply follows.

    expected_staleness: the staleness of the updates that these workers will compute from the returned slices, counted
    from this Stream; None if the policy does not know it in advance.
    """

    workers: tuple[WorkerId, ...]
    weights: tuple[float, ...]
    in_order: bool = True
    expected_staleness: int | None = None


@record
class Add:
    """Permission to add the update, times this weight, to a running sum instead of holding it until it is applied.

    The Apply that names the update will name the sum and everything in it. If the update is discarded instead, so is
    everything else in the sum. A driver that holds its updates may ignore this decision.
    """

    update: Update
    sum: int
    weight: float


@record
class Apply:
    """Change the model by these updates, together and in this order. This makes the next version.

    If `mix` is None, each update is a gradient step at its own learning rate times its weight. Otherwise the workers
    have pushed model weights: model ← (1−mix)·model + mix·(mean of the pushed weights, by weight).

    sums: if all the updates were added to running sums (Add), the numbers of these sums and the factor of each.
    Applying the sums gives the same model as applying the updates.
    """

    updates: tuple[Update, ...]
    weights: tuple[float, ...]
    mix: float | None = None
    sums: tuple[tuple[int, float], ...] = ()


@record
class Keep:
    """Put the update aside in this slot and drop the slot's old update. Later Applies may name the kept update."""

    update: Update
    slot: int


@record
class Discard:
    """Drop the update."""

    update: Update


@record
class Grant:
    """Let the worker pull the newest model and run its next iteration.

    batch_size: the batch to compute; None means the worker's own.
    expected_staleness: the staleness of the resulting update; None if the policy does not know it in advance.
    """

    worker: WorkerId
    batch_size: int | None = None
    expected_staleness: int | None = None


@record
class Cancel:
    """Abandon the worker's iteration. If its push was streamed, skip the slices that are not applied yet."""

    worker: WorkerId


@record
class WakeAt:
    """Call `woke` at this time. A new WakeAt replaces the old one. An early or repeated `woke` is harmless."""

    time: float


Decision: TypeAlias = Turn | Stream | Add | Apply | Keep | Discard | Grant | Cancel | WakeAt
Decisions: TypeAlias = list[Decision]


#: The kinds of values that only a driver itself may report by `measured`. A worker that reports such a kind is not
#: passed on to the policy.
DRIVER_KINDS = frozenset({"momentum", "cosine", "pardon", "own_batch", "held"})


class Policy(ABC):
    """Decides which workers may proceed, when, and with what batch size.

    A subclass declares its options as `Annotated` arguments of `__init__` (see `paceline.policies.options`). The values
    are checked on construction, and `paceline.policies.make` makes the same policy from a name with options.
    """

    #: Whether each slice of an update can be applied as it arrives: true if updates are applied one by one, at once.
    streamable: bool = False
    #: Set by the driver before the first event if it applies slices as they arrive. The policy then answers `ready`
    #: with a Stream, and its Turn may gate the push.
    streamed: bool = False
    #: Whether transfers use the servers' links one after the other, in the order of Turns and Grants.
    takes_turns: bool = False
    #: Whether transfers use the servers' links one after the other, in the order in which they are requested. Unlike
    #: the members of one turn, workers that are granted together pull one by one too.
    queues_transfers: bool = False
    #: Whether the policy puts updates aside (Keep) to name them again in later Applies.
    keeps: bool = False
    #: Whether workers push model weights instead of gradients, to be mixed into the server's model.
    mixes: bool = False
    #: Whether the driver reports (`measured`), after each Apply of several updates, the cosine of each update with the
    #: sum of all of them.
    compares: bool = False
    #: Whether the policy reads the losses of updates. A simulation that trains then computes them before an update
    #: arrives.
    hears_loss: bool = False
    #: Whether a shard may return its slice as soon as all members have sent it, before the barrier's Apply. A Stream
    #: names these members.
    pipelined: bool = False

    #: The number of groups of workers that the user asked for, if any.
    asked_groups: int | None = None

    #: Whether the policy wants to know which updates of a Stream the servers hold while they wait for the others.
    hears_held: bool = False

    #: One line for `paceline policies`.
    summary: ClassVar[str] = ""

    @property
    def least_workers(self) -> int:
        """The number of workers that the options need to take effect. With fewer, the policy acts as another scheme."""
        return 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]
        if "ready" in cls.__dict__ and "hears_ready" not in cls.__dict__:
            cls.hears_ready = True  # type: ignore[assignment,method-assign]  # a policy with its own `ready` needs it

    @property
    def hears_ready(self) -> bool:
        """Whether the driver must report `ready`. It may skip it if the only answer is ever a Turn."""
        return False

    @property
    def one_by_one(self) -> bool:
        """Whether transfers use the servers' links one after the other."""
        return self.takes_turns or self.queues_transfers

    def streams_together(self, workers: int) -> bool:
        """Return whether a Stream may name several of so many workers. Each slice waits until all have sent it."""
        return False

    @abstractmethod
    def joined(self, worker: WorkerId, now: float) -> Decisions:
        """A worker has joined and waits for a Grant."""

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        """A worker has computed its gradient from `batch_size` samples and waits for a Turn to push it."""
        return [Turn(worker)]

    @abstractmethod
    def arrived(self, update: Update, now: float) -> Decisions:
        """A whole push has arrived. Its worker waits for a Grant."""

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        """The driver has measured a value, such as a validation loss or the `cosine` of an Update.

        `pardon` is a request of the operator to take these workers back. A policy with `hears_loss` receives the
        `momentum` of the server's optimizer once it is known, before any worker joins. `own_batch` is the batch size
        that a worker computes if a Grant names none. It is reported once for each worker, before the first event of its
        first update, if the driver knows it. The first update itself may be smaller, at the end of an epoch. A
        policy with `hears_held` is told `held` when all of a worker's update is at the servers, which wait for the
        others of its Stream. Most policies ignore all of this.
        """
        return []

    @abstractmethod
    def left(self, worker: WorkerId, now: float) -> Decisions:
        """A worker has left or was given up. Its updates that had fully arrived still count.

        The exception is an update for which no Stream was made yet: a Stream can only name members.
        """

    def woke(self, now: float) -> Decisions:
        """The time of a WakeAt has come."""
        return []

    def exclusion(self, worker: WorkerId) -> str:
        """Return why the policy leaves this member out, as a sentence; empty if the member takes part."""
        return ""

    def memory(self) -> dict[str, Any]:
        """Return the state to remember across a restart, as JSON values. After a restart all workers join anew."""
        return {}

    def recall(self, memory: Mapping[str, Any]) -> None:  # noqa: B027  # most policies have nothing to recall
        """Restore an earlier policy's `memory`, before the first event. Ignore invalid values."""


def apply_one(update: Update, weight: float) -> Apply:
    """Return an Apply of a single update."""
    return Apply((update,), (weight,))


def grant_all(workers: Sequence[WorkerId]) -> Decisions:
    """Return a plain Grant for each worker."""
    return [Grant(worker) for worker in workers]
