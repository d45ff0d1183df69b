"""One incarnation of a worker, as a pure state machine: what it has heard, and what it has to say again.

A worker's messages and the coordinator's may be lost with a connection. So nothing here is a queue that somebody must
read at the right moment: what was heard is kept as a state until it is used or outdated. A Turn of an iteration that
was cancelled meanwhile, or a Grant that comes while another answer is waited for, can then not be missed.

It is told the messages of the wire, or a simulator's, and knows them by their names and fields. It opens no socket and
starts no thread.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any, Literal


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
    "tell Ready": (frozenset({Phase.COMPUTING, Phase.ANNOUNCED}), Phase.READY),
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
        self.barred = ""  # why it is not granted any more, if it is not
        self.last_version: int | None = None  # of the model, once the training is over
        self.has_parted = False  # has the server heard that it leaves?
        self._turned = 0  # the newest iteration that has its turn
        self._cancelled = 0  # the newest iteration that was cancelled
        self._wants: dict[int, Any] = {}  # number → a Want without an answer
        self._given: dict[int, Any] = {}  # number → the answer, until it is taken
        self._soon: Any = None  # announced, and without a turn
        self._ready: Any = None  # told, and without the Grant that answers it
        # A Ready whose iteration is over may not have been heard, and then others wait for its samples. It is said
        # again on a new connection until something that was said after it has been answered.
        self._unconfirmed: dict[int, Any] = {}  # iteration → its Ready
        self._before_want: dict[int, frozenset[int]] = {}  # number of a Want → what was unconfirmed when it was said
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

    def announce(self, soon: Any) -> list[Any]:
        """A gradient is being computed, and can soon be pushed. What to send."""
        self._step("announce")
        self._soon = soon
        return [soon]

    def tell_ready(self, ready: Any) -> list[Any]:
        """The gradient is computed. What to send."""
        self._step("tell Ready")
        self._soon = None
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

    def want(self, want: Any) -> list[Any]:
        """Ask for samples. What to send."""
        self._wants[want.number] = want
        self._before_want[want.number] = frozenset(self._unconfirmed)
        return [want]

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

    # What the worker hears

    def heard(self, message: Any) -> None:
        """Take in a message of the coordinator. Those that end this incarnation are not for here."""
        match type(message).__name__:
            case "Granted":
                if self.newest is None or message.iteration > self.newest.iteration:
                    self.newest, self.barred = message, ""
                    if self._ready is not None:
                        self._put_by()
            case "Turned":
                self._turned = max(self._turned, message.iteration)
                self._soon = None
            case "Cancelled":
                self._cancelled = max(self._cancelled, message.iteration)
                if self._ready is not None and self._ready.iteration <= self._cancelled:
                    self._put_by()
            case "Given":
                if self._wants.pop(message.number, None) is not None:
                    self._given[message.number] = message
                    self._confirm(self._before_want.pop(message.number))
            case "Give":
                self.gives = True
            case "Barred":
                self.barred = message.why
            case "Finished":
                if self.phase is Phase.FINISHING:
                    self.phase, self._finish = Phase.FINISHED, None
                    self.last_version = message.version
            case "Beat":
                if self._before_beat:
                    self._confirm(self._before_beat.popleft())
            case "Leave":
                self.has_parted, self._leave = True, None
            case _:
                pass  # Resumed: what follows it says more

    def _confirm(self, iterations: frozenset[int]) -> None:
        for iteration in iterations:
            self._unconfirmed.pop(iteration, None)

    def reconnected(self) -> list[Any]:
        """The connection was lost, and there is a new one. What to say again, since it may not have been heard."""
        self._before_beat.clear()  # a Beat of the old connection is not answered on the new one
        again = [*self._unconfirmed.values(), *self._wants.values()]
        return again + [each for each in (self._soon, self._ready, self._finish, self._leave) if each is not None]
