"""The worker's side of the protocol: one incarnation of a worker, as a pure state machine.

Messages of the worker and of the coordinator can be lost with a connection. So this class has no queue of messages
that must be read at the right moment. It keeps the content of each message as state until it is used or outdated. The
worker then cannot miss a Turn of an iteration that was cancelled meanwhile, or a Grant that arrives while it waits for
another answer.

A WorkerState opens no socket and starts no thread. Its driver passes the coordinator's messages to it, and sends the
messages that its methods return.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any, Literal

from paceline.job import instructions
from paceline.job.instructions import Instruction


class Phase(Enum):
    """The phase of a worker."""

    WAITING = "waits for a Grant"
    COMPUTING = "has a Grant, and computes"
    ANNOUNCED = "has announced a gradient that is being computed"
    READY = "has announced a gradient that is computed"
    FINISHING = "has no samples left, and waits for the last version of the model"
    FINISHED = "knows the last version of the model"
    LEFT = "has announced that it leaves"


#: For each step of a worker: the phases that allow it, and the phase that it leads to.
STEPS: dict[str, tuple[frozenset[Phase], Phase]] = {
    "take a Grant": (frozenset({Phase.WAITING, Phase.READY}), Phase.COMPUTING),
    "announce a gradient": (frozenset({Phase.COMPUTING}), Phase.ANNOUNCED),
    "finish a gradient": (frozenset({Phase.COMPUTING, Phase.ANNOUNCED}), Phase.READY),
    "finish training": (frozenset(Phase) - {Phase.FINISHED, Phase.LEFT}, Phase.FINISHING),
    "leave": (frozenset(Phase) - {Phase.LEFT}, Phase.LEFT),
}


class WorkerState:
    """The state of one incarnation of a worker.

    The messages may be those of the wire, or the events and instructions of `paceline.job`: their fields are the same.
    """

    def __init__(self) -> None:
        self.phase = Phase.WAITING
        self.iteration = 0  # the current iteration, or the last one
        self.newest: Any = None  # the newest Grant that was received
        self.must_send_weights = False  # True if the coordinator asked this worker for the initial weights
        self.exclusion = ""  # why the policy excludes this worker, if it does
        self.last_version: int | None = None  # of the model, once the training is over
        self.leave_confirmed = False  # True if the coordinator has confirmed that the worker left
        self._turned = 0  # the newest iteration that may be pushed
        self.parts = 0  # of each shard, if visits say when to push them
        self._visits: list[tuple[int, int]] = []  # shard and part of each visit that has not begun
        self._begun: set[tuple[int, int]] = set()  # visits of this iteration that have begun
        self._ended: dict[tuple[int, int], Any] = {}  # visits of this iteration → the message that they have ended
        self._cancelled = 0  # the newest iteration that was cancelled
        self._requests: dict[int, Any] = {}  # number → a request for samples that has no answer
        self._given: dict[int, Any] = {}  # number → the answer, until it is taken
        self._started: Any = None  # the announcement of a gradient that has begun, until its Turn
        self._ready: Any = None  # the announcement of a computed gradient, until its iteration is over
        # The announcement of a computed gradient may be lost even though its iteration is over. Then its samples would
        # never be handed out again. So it is repeated on each new connection, until a later message is answered.
        self._unconfirmed: dict[int, Any] = {}  # iteration → the announcement
        self._before_request: dict[int, frozenset[int]] = {}  # request → the iterations unconfirmed when it was sent
        self._before_beat: deque[frozenset[int]] = deque()  # the same for each heartbeat that has no answer
        self._offer: Any = None  # the offer of other weights, until it is answered
        self._kept: Any = None  # the answer that the job keeps its own weights, until it is taken
        self._finish: Any = None
        self._leave: Any = None

    # Steps of the worker

    def _step(self, name: str) -> None:
        """Take a step. Raise RuntimeError if the phase does not allow it."""
        allowed, following = STEPS[name]
        if self.phase not in allowed:
            raise RuntimeError(f"A worker in phase {self.phase.name} cannot {name}.")
        self.phase = following

    @property
    def is_granted(self) -> bool:
        """True if there is a Grant that the worker has not taken yet."""
        return self.newest is not None and self.newest.iteration > self.iteration

    def take_grant(self) -> Any:
        """Begin the iteration of the newest Grant, and return that Grant."""
        self._step("take a Grant")
        self.iteration = self.newest.iteration
        return self.newest

    def announce(self, started: Any) -> list[Any]:
        """Record that the first pieces of a gradient can be pushed. Return the messages to send."""
        self._step("announce a gradient")
        self._started = started
        return [started]

    def announce_ready(self, ready: Any) -> list[Any]:
        """Record that the gradient is computed. Return the messages to send."""
        self._step("finish a gradient")
        self._started = None
        self._ready = ready
        if self.is_over(ready.iteration):
            self._retire_ready()
        return [ready]

    def _retire_ready(self) -> None:
        """End the iteration of the last computed gradient. Keep its announcement until it is confirmed."""
        ready, self._ready = self._ready, None
        if ready.taken:
            self._unconfirmed[ready.iteration] = ready

    def turn(self, iteration: int) -> Literal["now", "never", "later"]:
        """Return when the update of this iteration may be pushed: "never" if the iteration is over."""
        if self.is_over(iteration):
            return "never"
        return "now" if self._turned >= iteration else "later"

    def is_over(self, iteration: int) -> bool:
        """Return True if this iteration was cancelled, or a later one was granted."""
        return self._cancelled >= iteration or (self.newest is not None and self.newest.iteration > iteration)

    def request(self, request: Any) -> list[Any]:
        """Record a request for samples. Return the messages to send."""
        self._requests[request.number] = request
        self._before_request[request.number] = frozenset(self._unconfirmed)
        return [request]

    def take_samples(self, number: int) -> Any:
        """Return the samples that answer the request with this number, or None if there is no answer yet."""
        return self._given.pop(number, None)

    def offer(self, offer: Any) -> list[Any]:
        """Record that the worker offers its weights. Return the messages to send.

        If the job takes the weights of the main worker, this incarnation ends.
        """
        self._offer = offer
        return [offer]

    def take_kept(self) -> Any:
        """Return the answer that the job keeps its own weights, or None if there is no answer yet."""
        kept, self._kept = self._kept, None
        return kept

    def finish(self, finish: Any) -> list[Any]:
        """Record that the worker has no samples left. Return the messages to send."""
        self._step("finish training")
        self._finish = finish
        return [finish]

    def leave(self, leave: Any) -> list[Any]:
        """Record that the worker leaves. Return the messages to send."""
        self._step("leave")
        self._leave = leave
        return [leave]

    def beat(self, beat: Any) -> list[Any]:
        """Record a heartbeat. Return the messages to send."""
        self._before_beat.append(frozenset(self._unconfirmed))
        return [beat]

    # Messages of the coordinator

    def heard(self, instruction: Instruction) -> None:
        """Receive an instruction of the job directly, without a wire between the job and this worker."""
        match instruction:
            case instructions.SendGrant():
                self.granted(instruction)
            case instructions.SendPushNow():
                self.turned(instruction.iteration, instruction.parts)
            case instructions.SendVisit():
                self.visit_ordered(instruction)
            case instructions.SendCancel():
                self.cancelled(instruction.iteration)
            case instructions.SendSamples():
                self.given(instruction)
            case instructions.SendWeightsRequest():
                self.weights_requested()
            case instructions.SendWeightsKept():
                self.weights_kept(instruction)
            case instructions.SendExcluded():
                self.excluded(instruction.reason)
            case instructions.SendFinished():
                self.training_finished(instruction.version)
            case instructions.SendHeartbeat():
                self.beat_answered()
            case instructions.SendLeave():
                self.leave_answered()

    def granted(self, grant: Any) -> None:
        """Receive a Grant. A Grant older than the newest one changes nothing."""
        if self.newest is None or grant.iteration > self.newest.iteration:
            self.newest, self.exclusion = grant, ""
            if self._ready is not None:
                self._retire_ready()

    def turned(self, iteration: int, parts: int = 0) -> None:
        """Receive the permission to push the update of this iteration. parts: of each shard, if visits follow."""
        if iteration > self._turned:
            self._turned, self.parts = iteration, parts
            self._visits, self._begun, self._ended = [], set(), {}
        self._started = None

    def visit_ordered(self, visit: Any) -> None:
        """Receive the order to push a part of the update to a shard. A repeated order changes nothing."""
        place = (visit.shard, visit.part)
        if visit.iteration == self._turned and place not in self._begun and place not in self._visits:
            self._visits.append(place)

    def take_visit(self, iteration: int) -> tuple[int, int] | None:
        """Begin a visit that was ordered for this iteration. Return its shard and part, or None if there is none."""
        if iteration != self._turned or not self._visits:
            return None
        place = self._visits.pop(0)
        self._begun.add(place)
        return place

    def end_visit(self, ended: Any) -> list[Any]:
        """Record that a visit has ended. Return the messages to send."""
        if ended.iteration == self._turned:
            self._ended[ended.shard, ended.part] = ended
        return [ended]

    def cancelled(self, iteration: int) -> None:
        """Receive the cancellation of this iteration."""
        self._cancelled = max(self._cancelled, iteration)
        if self._ready is not None and self._ready.iteration <= self._cancelled:
            self._retire_ready()

    def given(self, samples: Any) -> None:
        """Receive the samples that answer a request."""
        if self._requests.pop(samples.number, None) is not None:
            self._given[samples.number] = samples
            self._confirm(self._before_request.pop(samples.number))

    def weights_requested(self) -> None:
        """Receive the request for the initial weights of the model."""
        self.must_send_weights = True

    def weights_kept(self, kept: Any) -> None:
        """Receive the answer that the job keeps its own weights. An answer to no offer changes nothing."""
        if self._offer is not None:
            self._offer, self._kept = None, kept

    def excluded(self, reason: str) -> None:
        """Receive the reason why the policy excludes this worker. It holds until the next Grant."""
        self.exclusion = reason

    def training_finished(self, version: int) -> None:
        """Receive the last version of the model: the training is over."""
        if self.phase is Phase.FINISHING:
            self.phase, self._finish = Phase.FINISHED, None
            self.last_version = version

    def beat_answered(self) -> None:
        """Receive the answer to the oldest heartbeat."""
        if self._before_beat:
            self._confirm(self._before_beat.popleft())

    def leave_answered(self) -> None:
        """Receive the confirmation that this worker has left."""
        self.leave_confirmed, self._leave = True, None

    def _confirm(self, iterations: frozenset[int]) -> None:
        """Stop repeating the announcements of these iterations: the coordinator has received them."""
        for iteration in iterations:
            self._unconfirmed.pop(iteration, None)

    def reconnected(self) -> list[Any]:
        """Return the messages to repeat on a new connection, because they may have been lost with the old one."""
        self._before_beat.clear()  # a heartbeat of the old connection is not answered on the new one
        again = [*self._unconfirmed.values(), *self._requests.values(), *self._ended.values()]
        single = (self._started, self._ready, self._offer, self._finish, self._leave)
        return again + [each for each in single if each is not None]
