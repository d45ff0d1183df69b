"""The parameter servers of a simulated cluster: when they carry out which decision, and which version they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.job import events
from paceline.policies import Apply, Discard, Keep
from paceline.simulate.clock import Clock
from paceline.simulate.simulated_model import SimulatedModel


class Servers:
    """Carry out the policy's decisions in order, each when the work before it is done.

    The model is spread evenly over the servers, so they are busy at the same times and one queue stands for all.
    Decisions change the model lazily: `catch_up` carries out all that are done by a time, before the model is used.
    """

    def __init__(
        self,
        clock: Clock,
        model: SimulatedModel | None,
        tell: Callable[[events.Event], None],
        stop: Callable[[], None],
    ) -> None:
        """`tell` passes an event to the job. `stop` ends the run."""
        self._clock, self._model = clock, model
        self._tell, self._stop = tell, stop
        self.version = 0  # as of the last catch_up
        self.busy_until = 0.0
        self._pending: deque[tuple[float, int, Apply | Keep | Discard]] = deque()  # (done at, version after, decision)

    @property
    def pending(self) -> int:
        """The number of decisions that are not carried out yet."""
        return len(self._pending)

    def work(self, seconds: float) -> float:
        """Keep the servers busy for `seconds`, after all earlier work. Return the time at which they are done."""
        now, busy = self._clock.now, self.busy_until
        self.busy_until = done = (busy if busy > now else now) + seconds
        return done

    def apply(self, done_at: float, version: int, decision: Apply) -> None:
        """Queue an Apply that makes this version of the model at `done_at`."""
        self._pending.append((done_at, version, decision))

    def keep_or_discard(self, decision: Keep | Discard) -> None:
        """Queue a Keep or a Discard behind the Applies before it: one of them may use the update that it replaces."""
        if self._pending:
            done_at, version, _ = self._pending[-1]
            self._pending.append((done_at, version, decision))
        elif self._model:
            self._carry_out(self._model, decision, self._clock.now)

    def catch_up(self, by: float) -> None:
        """Carry out the decisions that are done by this time."""
        pending = self._pending
        while pending and pending[0][0] <= by:
            done_at, self.version, decision = pending.popleft()
            if self._model:
                self._carry_out(self._model, decision, done_at)

    def _carry_out(self, model: SimulatedModel, decision: Apply | Keep | Discard, at: float) -> None:
        if isinstance(decision, Keep):
            model.keep(decision)
        elif isinstance(decision, Discard):
            model.discard(decision.update)
        else:
            cosines = model.apply(decision, at)
            if cosines:  # the job may be handling an event now, so this one follows it
                event = events.UpdatesCompared(decision.updates, tuple(cosines))
                self._clock.at(self._clock.now, self._tell, event)
            if model.over:
                self._stop()
