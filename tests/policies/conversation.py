"""Tests that read like conversations: an event, and the decisions that answer it.

    talk = Conversation(SSP(staleness=1), workers="ab")
    talk.arrives("a", at=1.0).answers(applied("a"), granted("a"))

Workers are letters; `a` is worker 0. A `Conversation` keeps the records of a real driver: it numbers iterations and
versions, gives a worker that rejoins a new incarnation, and does not let time pass a WakeAt.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from paceline.policies import Add, Apply, Cancel, Decision, Discard, Grant, Keep, Policy, Stream, Turn, Update, WakeAt

LETTERS = string.ascii_lowercase


@dataclass(frozen=True)
class Expected:
    """A description of a decision, with the fields that a test checks."""

    text: str
    fits: Callable[[Any], bool]

    def __repr__(self) -> str:
        return self.text


def _expected(kind: type, text: str, fits: Callable[[Any], bool]) -> Expected:
    return Expected(text, lambda decision: isinstance(decision, kind) and fits(decision))


def _workers(updates: Iterable[Update]) -> str:
    return "".join(LETTERS[update.worker] for update in updates)


def _close(a: Iterable[float | None], b: Iterable[float | None]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x == y if x is None or y is None else math.isclose(x, y, abs_tol=1e-9) for x, y in pairs)


def applied(workers: str, weights: tuple[float, ...] | None = None, mix: float | None = None) -> Expected:
    """Expect an Apply of these workers' updates, in this order."""

    def fits(apply: Apply) -> bool:
        right = _workers(apply.updates) == workers and _close([apply.mix], [mix])
        return right and (weights is None or _close(apply.weights, weights))

    text = f"applied({workers!r}" + (f", {weights}" if weights else "") + (f", mix={mix:.4g})" if mix else ")")
    return _expected(Apply, text, fits)


def granted(worker: str, batch: int | None = None, staleness: int | None = None) -> Expected:
    def fits(grant: Grant) -> bool:
        right = LETTERS[grant.worker] == worker and grant.batch_size == batch
        return right and (staleness is None or grant.expected_staleness == staleness)

    return _expected(Grant, f"granted({worker!r}" + (f", batch={batch})" if batch else ")"), fits)


def discarded(worker: str) -> Expected:
    return _expected(Discard, f"discarded({worker!r})", lambda discard: _workers([discard.update]) == worker)


def kept(worker: str) -> Expected:
    return _expected(Keep, f"kept({worker!r})", lambda keep: _workers([keep.update]) == worker)


def cancelled(worker: str) -> Expected:
    return _expected(Cancel, f"cancelled({worker!r})", lambda cancel: LETTERS[cancel.worker] == worker)


def turn(worker: str) -> Expected:
    return _expected(Turn, f"turn({worker!r})", lambda turn: LETTERS[turn.worker] == worker)


def streams(
    workers: str, weights: tuple[float, ...] | None = None, in_order: bool = True, staleness: int | None = None
) -> Expected:
    """Expect a Stream of these workers' pushes."""

    def fits(stream: Stream) -> bool:
        right = "".join(LETTERS[worker] for worker in stream.workers) == workers and stream.in_order == in_order
        right = right and (staleness is None or stream.expected_staleness == staleness)
        return right and (weights is None or _close(stream.weights, weights))

    text = f"streams({workers!r}" + (f", {weights}" if weights else "") + ("" if in_order else ", in_order=False")
    return _expected(Stream, text + ")", fits)


def wake_at(time: float) -> Expected:
    return _expected(WakeAt, f"wake_at({time:.6g})", lambda wake: _close([wake.time], [time]))


def shown(decision: Decision) -> str:
    """Return a decision in the words of a test."""
    match decision:
        case Apply(updates, weights, mix):
            return repr(applied(_workers(updates), weights, mix))
        case Grant(worker, batch):
            return repr(granted(LETTERS[worker], batch))
        case Discard(update):
            return repr(discarded(_workers([update])))
        case Keep(update):
            return repr(kept(_workers([update])))
        case Cancel(worker):
            return repr(cancelled(LETTERS[worker]))
        case Turn(worker):
            return repr(turn(LETTERS[worker]))
        case Stream(workers, weights, in_order):
            return repr(streams("".join(LETTERS[worker] for worker in workers), weights, in_order))
        case WakeAt(time):
            return repr(wake_at(time))
        case Add(update):
            return f"added({_workers([update])!r})"


def streamed(policy: Policy) -> Policy:
    """Return the policy, set up for a driver that applies slices as they arrive."""
    assert policy.streamable
    policy.streamed = True
    return policy


class Conversation:
    """A driver for tests: its methods are events, and `answers` checks the decisions."""

    def __init__(self, policy: Policy, workers: str = "", batch: int = 32) -> None:
        self.policy = policy
        self.batch = batch
        self.now = 0.0
        self.version = 0
        self.wake = math.inf
        self.grants: dict[str, list[tuple[int, int, float]]] = {}  # worker → base version, batch and time of each Grant
        self.incarnations: Counter[str] = Counter()  # worker → how often it has joined
        self.open: set[str] = set()  # workers that hold a Grant
        self.last: list[Decision] = []  # the decisions on the last event
        self.staleness: list[int] = []  # of every applied update
        for worker in workers:
            self.joins(worker)

    # Events

    def joins(self, worker: str, at: float | None = None) -> Conversation:
        self._pass_time(at)
        self.incarnations[worker] += 1
        self.grants[worker] = []
        self.open.discard(worker)
        return self._record(self.policy.joined(LETTERS.index(worker), self.now))

    def leaves(self, worker: str, at: float | None = None) -> Conversation:
        self._pass_time(at)
        self.open.discard(worker)
        return self._record(self.policy.left(LETTERS.index(worker), self.now))

    def is_ready(self, worker: str, at: float | None = None) -> Conversation:
        self._pass_time(at)
        assert worker in self.open, f"{worker} has no Grant, so it cannot be ready"
        _, batch, _ = self.grants[worker][-1]
        return self._record(self.policy.ready(LETTERS.index(worker), batch, self.now))

    def arrives(
        self, worker: str, at: float | None = None, iteration: int | None = None, compute: float | None = None
    ) -> Conversation:
        """The update for the worker's Grant arrives; `iteration` names an older, cancelled Grant."""
        self._pass_time(at)
        if iteration is None:
            assert worker in self.open, f"{worker} has no Grant to answer"
            self.open.discard(worker)
            iteration = len(self.grants[worker])
        base_version, batch, granted_at = self.grants[worker][iteration - 1]
        busy = self.now - granted_at if compute is None else compute
        update = Update(
            LETTERS.index(worker), iteration, base_version, batch, busy, incarnation=self.incarnations[worker]
        )
        return self._record(self.policy.arrived(update, self.now))

    def is_held(self, worker: str, at: float | None = None) -> Conversation:
        """The servers hold all of a worker's update, and wait for others of its Stream."""
        self._pass_time(at)
        return self._record(self.policy.measured("held", LETTERS.index(worker), 1.0, self.now))

    def wakes(self, at: float | None = None) -> Conversation:
        """The WakeAt comes due. With `at`, the policy is woken then, too early."""
        if at is None:
            assert self.wake < math.inf, "no WakeAt is set"
            at, self.wake = max(self.wake, self.now), math.inf
        self._pass_time(at)
        return self._record(self.policy.woke(self.now))

    # Decisions

    def answers(self, *expected: Expected) -> Conversation:
        """Check that the decisions are exactly these, in this order. Ignore a WakeAt if no `wake_at` is expected."""
        wakes = any(each.text.startswith("wake_at") for each in expected)
        actual = [decision for decision in self.last if wakes or not isinstance(decision, WakeAt)]
        right = len(actual) == len(expected) and all(e.fits(d) for e, d in zip(expected, actual, strict=True))
        assert right, f"answered {', '.join(map(shown, actual)) or 'nothing'}; expected {list(expected) or 'nothing'}"
        return self

    # Records

    def _pass_time(self, at: float | None) -> None:
        if at is None:
            return
        assert at >= self.now, f"it is already {self.now}"
        assert at <= self.wake, f"the policy must be woken at {self.wake} first"
        self.now = at

    def _record(self, decisions: list[Decision]) -> Conversation:
        self.last = decisions
        for decision in decisions:
            match decision:
                case Grant(worker, batch):
                    letter = LETTERS[worker]
                    assert letter not in self.open, f"{letter} already has a Grant"
                    self.grants[letter].append((self.version, batch or self.batch, self.now))
                    self.open.add(letter)
                case Cancel(worker):
                    self.open.remove(LETTERS[worker])
                case Apply(updates):
                    self.staleness += [self.version - update.base_version for update in updates]
                    self.version += 1
                case WakeAt(time):
                    self.wake = time
        return self
