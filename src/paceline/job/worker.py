"""One incarnation of a worker, as a pure state machine: what it has heard, and what it has to say again.

A worker's messages and the coordinator's may be lost with a connection. So nothing here is a queue that somebody must
read at the right moment: what was heard is kept as a state until it is used or outdated. A Turn of an iteration that
was cancelled meanwhile, or a Grant that comes while another answer is waited for, can then not be missed.

It opens no socket and starts no thread. A driver tells it the messages of the coordinator, and sends what it returns.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any, Literal

from paceline.job import instructions
from paceline.job.instructions import Instruction


class Phase(Enum):
    """Where a worker stands."""

    WAITING = "waits for a Grant"
    COMPUTING = "was granted an iteration, and computes"
    ANNOUNCED = "has announced a gradient that is being computed"
    READY = "has told that its gradient is computed"
    FINISHING = "has no more to train on, and waits for the last version"
    FINISHED = "knows the last version"
    LEFT = "has taken its leave"


#: From which phases a worker may make a step, and to which phase it leads.
STEPS: dict[str, tuple[frozenset[Phase], Phase]] = {
    "take the Grant": (frozenset({Phase.WAITING, Phase.READY}), Phase.COMPUTING),
    "announce": (frozenset({Phase.COMPUTING}), Phase.ANNOUNCED),
    "tell that its gradient is ready": (frozenset({Phase.COMPUTING, Phase.ANNOUNCED}), Phase.READY),
    "finish": (frozenset(Phase) - {Phase.FINISHED, Phase.LEFT}, Phase.FINISHING),
    "leave": (frozenset(Phase) - {Phase.LEFT}, Phase.LEFT),
}


class WorkerState:
    """What one incarnation of a worker knows."""

    def __init__(self) -> None:
        self.phase = Phase.WAITING
        self.iteration = 0  # the one that the worker runs, or ran last
        self.newest: Any = None  # the newest Granted that was heard
        self.gives = False  # is it asked for the weights that the model begins with?
        self.exclusion = ""  # why it is not granted any more, if it is not
        self.last_version: int | None = None  # of the model, once the training is over
        self.has_parted = False  # has the server heard that it leaves?
        self._turned = 0  # the newest iteration that has its turn
        self._cancelled = 0  # the newest iteration that was cancelled
        self._requests: dict[int, Any] = {}  # number → a Want without an answer
        self._given: dict[int, Any] = {}  # number → the answer, until it is taken
        self._started: Any = None  # announced, and without a turn
        self._ready: Any = None  # told, and without the Grant that answers it
        # A Ready whose iteration is over may not have been heard, and then others wait for its samples. It is said
        # again on a new connection until something that was said after it has been answered.
        self._unconfirmed: dict[int, Any] = {}  # iteration → its Ready
        self._before_request: dict[int, frozenset[int]] = {}  # number of a Want → what was unconfirmed when it was said
        self._before_beat: deque[frozenset[int]] = deque()  # the same for each Beat without an answer
        self._finish: Any = None
        self._leave: Any = None

    # What the worker does

    def _step(self, name: str) -> None:
        allowed, then = STEPS[name]
        if self.phase not in allowed:
            raise RuntimeError(f"A worker at {self.phase.name} cannot {name}.")
        self.phase = then

    @property
    def is_granted(self) -> bool:
        """Is there a Grant that was not taken yet?"""
        return self.newest is not None and self.newest.iteration > self.iteration

    def take_grant(self) -> Any:
        """Begin the iteration of the newest Grant."""
        self._step("take the Grant")
        self.iteration = self.newest.iteration
        return self.newest

    def announce(self, started: Any) -> list[Any]:
        """A gradient is being computed, and can soon be pushed. What to send."""
        self._step("announce")
        self._started = started
        return [started]

    def tell_ready(self, ready: Any) -> list[Any]:
        """The gradient is computed. What to send."""
        self._step("tell that its gradient is ready")
        self._started = None
        self._ready = ready
        if self.is_over(ready.iteration):
            self._put_by()
        return [ready]

    def _put_by(self) -> None:
        """The iteration of the last Ready is over."""
        ready, self._ready = self._ready, None
        if ready.taken:
            self._unconfirmed[ready.iteration] = ready

    def turn(self, iteration: int) -> Literal["now", "never", "later"]:
        """May the update of this iteration be pushed? Never, if the iteration is over."""
        if self.is_over(iteration):
            return "never"
        return "now" if self._turned >= iteration else "later"

    def is_over(self, iteration: int) -> bool:
        """Was this iteration cancelled, or has another been granted since?"""
        return self._cancelled >= iteration or (self.newest is not None and self.newest.iteration > iteration)

    def request(self, request: Any) -> list[Any]:
        """Ask for samples. What to send."""
        self._requests[request.number] = request
        self._before_request[request.number] = frozenset(self._unconfirmed)
        return [request]

    def take_given(self, number: int) -> Any:
        """The samples that were given under this number; None if they are not here yet."""
        return self._given.pop(number, None)

    def finish(self, finish: Any) -> list[Any]:
        """There is no more to train on. What to send."""
        self._step("finish")
        self._finish = finish
        return [finish]

    def leave(self, leave: Any) -> list[Any]:
        """Take leave. What to send."""
        self._step("leave")
        self._leave = leave
        return [leave]

    def beat(self, beat: Any) -> list[Any]:
        """Show that the worker is alive. What to send."""
        self._before_beat.append(frozenset(self._unconfirmed))
        return [beat]

    # Messages of the coordinator

    def heard(self, instruction: Instruction) -> None:
        """Take in an instruction that the job has for this worker, where no wire lies between them."""
        match instruction:
            case instructions.SendGrant():
                self.granted(instruction)
            case instructions.SendPushNow():
                self.turned(instruction.iteration)
            case instructions.SendCancel():
                self.cancelled(instruction.iteration)
            case instructions.SendSamples():
                self.given(instruction)
            case instructions.SendWeightsRequest():
                self.weights_requested()
            case instructions.SendExcluded():
                self.excluded(instruction.reason)
            case instructions.SendFinished():
                self.training_finished(instruction.version)
            case instructions.SendHeartbeat():
                self.beat_answered()
            case instructions.SendLeave():
                self.parted()

    def granted(self, grant: Any) -> None:
        """The coordinator grants an iteration. A Grant that is older than the newest changes nothing."""
        if self.newest is None or grant.iteration > self.newest.iteration:
            self.newest, self.exclusion = grant, ""
            if self._ready is not None:
                self._put_by()

    def turned(self, iteration: int) -> None:
        """The update of this iteration may be pushed now."""
        self._turned = max(self._turned, iteration)
        self._started = None

    def cancelled(self, iteration: int) -> None:
        """This iteration is to be abandoned."""
        self._cancelled = max(self._cancelled, iteration)
        if self._ready is not None and self._ready.iteration <= self._cancelled:
            self._put_by()

    def given(self, samples: Any) -> None:
        """Samples are assigned, under the number of a request."""
        if self._requests.pop(samples.number, None) is not None:
            self._given[samples.number] = samples
            self._confirm(self._before_request.pop(samples.number))

    def weights_requested(self) -> None:
        """The coordinator asks this worker for the initial weights of the model."""
        self.gives = True

    def excluded(self, reason: str) -> None:
        """The policy leaves this worker out until its next Grant."""
        self.exclusion = reason

    def training_finished(self, version: int) -> None:
        """The training is over, and this is the last version of the model."""
        if self.phase is Phase.FINISHING:
            self.phase, self._finish = Phase.FINISHED, None
            self.last_version = version

    def beat_answered(self) -> None:
        """The coordinator has answered the oldest heartbeat."""
        if self._before_beat:
            self._confirm(self._before_beat.popleft())

    def parted(self) -> None:
        """The coordinator knows that this worker has left."""
        self.has_parted, self._leave = True, None

    def _confirm(self, iterations: frozenset[int]) -> None:
        for iteration in iterations:
            self._unconfirmed.pop(iteration, None)

    def reconnected(self) -> list[Any]:
        """The connection was lost, and there is a new one. What to say again, since it may not have been heard."""
        self._before_beat.clear()  # a Beat of the old connection is not answered on the new one
        again = [*self._unconfirmed.values(), *self._requests.values()]
        return again + [each for each in (self._started, self._ready, self._finish, self._leave) if each is not None]
