"""Three plain sentences about a job: whether it is healthy, how fast it is, and what would help."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from paceline.observe.stall import LEAST_SECONDS, TIMES

Level = Literal["good", "warn", "bad", "idle"]

EARLY = 2  # rounds before which nothing is said about the speed
NEAR = 1.05  # times the floor that count as having reached it
MOST = 0.7  # the share of computing above which there is little to gain
SLOW = 1.5  # times the compute time of the others that make a worker slow
FULL = 0.9  # the use of a link that counts as full
RECENTLY = 60.0  # seconds during which a lost worker is news

#: Policies whose workers wait for each other.
BARRIERS = {"bsp": "at the barrier", "ksync": "at the barrier", "kbatch": "at the barrier"}
LIMITS = {"ssp": "for the slowest {noun}", "dssp": "for the slowest {noun}"}
TURNS = {"r2sp": "for their turn", "fl-r2sp": "for their group's turn", "groups": "for their group's turn"}


class Sentence(NamedTuple):
    """A sentence, and how good its news is."""

    level: Level
    text: str


@dataclass(frozen=True)
class Situation:
    """The figures that the sentences are about."""

    policy: str
    clients: bool = False  # call the workers clients
    state: str = "running"  # running, ended, lost (its server does not answer) or recorded
    problem: str = ""  # why the job cannot be watched
    members: int = 0
    joined_early: int = 0
    missing: int = 0
    updates: int = 0
    lost: int = 0
    lost_now: dict[Any, float] = field(default_factory=dict)  # worker → for how many seconds it is lost
    awaited: list[Any] = field(default_factory=list)  # workers that others wait for, in a stalled job
    quiet: float | None = None  # seconds since the last application
    gap: float | None = None  # the longest recent seconds between two applications
    loss: float | None = None
    iteration_seconds: float | None = None
    samples_per_second: float = 0.0
    floor: float | None = None
    shares: dict[str, float] = field(default_factory=dict)  # of the workers' time, by activity
    staleness: float | None = None
    links: dict[str, float] = field(default_factory=dict)  # the mean use of the links, by direction
    slowest: tuple[Any, float] | None = None  # a worker, and its compute time as a multiple of that of the others

    @property
    def scheme(self) -> str:
        """The policy's name without its options."""
        return self.policy.partition(":")[0]

    @property
    def is_early(self) -> bool:
        return not self.iteration_seconds or self.updates < EARLY * max(1, self.members)

    def people(self, count: int) -> str:
        """Return a number of workers in words."""
        return f"{count:,} {self.noun}{'' if count == 1 else 's'}"

    @property
    def noun(self) -> str:
        """The word for a worker of this job."""
        return "client" if self.clients else "worker"

    @property
    def who(self) -> str:
        return f"{self.noun.capitalize()}s"


def health(of: Situation) -> Sentence:
    """Say whether the job is healthy."""
    if of.problem:
        return Sentence("bad", of.problem)
    if of.state == "lost":
        return Sentence("bad", "The job's server does not answer; this is the last that was seen of it.")
    if of.loss is not None and not math.isfinite(of.loss):
        return Sentence("bad", "The loss is not a number any more: the training has diverged.")
    if of.state == "ended":
        return Sentence("idle", f"Done: {of.updates:,} updates.")
    if of.missing:
        here = of.members + of.joined_early
        more = of.people(of.missing).replace(" ", " more ", 1)
        if of.state == "recorded":
            return Sentence("idle", f"This run did not begin: {of.people(here)} joined, {more} did not.")
        return Sentence("idle", f"Waiting to begin: {of.people(here)} joined, {more} must join.")
    if not of.members:
        if of.updates:
            return Sentence("idle", f"All {of.who.lower()} have left, after {of.updates:,} updates.")
        if of.state == "recorded":
            return Sentence("idle", f"No {of.noun} has joined this run.")
        return Sentence("idle", f"Waiting for the first {of.noun} to join.")
    limit = max(LEAST_SECONDS, TIMES * (of.gap or 0.0))  # as in the terminal
    if of.state == "running" and of.quiet is not None and of.quiet > limit and of.updates:
        named = ", ".join(str(worker) for worker in of.awaited[:4])
        for_whom = f"; waiting for {of.noun} {named}" if named else ""
        return Sentence("bad", f"Stalled: no update was applied for {seconds(of.quiet)}{for_whom}.")
    fresh = {worker: ago for worker, ago in of.lost_now.items() if ago < RECENTLY or of.state == "recorded"}
    if len(fresh) == 1:
        worker, ago = next(iter(fresh.items()))
        text = f"{of.noun.capitalize()} {worker} was lost {seconds(ago)} ago; {of.people(of.members)} go on."
        return Sentence("warn", text)
    if fresh:
        return Sentence("warn", f"{of.people(len(fresh))} were lost; {of.people(of.members)} go on.")
    lost = "none was lost" if not of.lost else f"{of.lost:,} {'was' if of.lost == 1 else 'were'} lost on the way"
    return Sentence("good", f"Healthy: {of.people(of.members)} train{'s' if of.members == 1 else ''}, {lost}.")


def speed(of: Situation) -> Sentence:
    """Say how fast the job is, beside the shortest possible time if that is known."""
    if of.is_early or not of.iteration_seconds:
        return Sentence("idle", "Too early to say: the first rounds are not over.")
    each = f"{seconds(of.iteration_seconds)} per iteration"
    if of.floor:
        ratio = of.iteration_seconds / of.floor
        shortest = f"the shortest that any policy allows here ({seconds(of.floor)})"
        if ratio <= NEAR:
            return Sentence("good", f"{each}: {shortest}.")
        return Sentence("warn", f"{each}: {ratio:.2f} × {shortest}.")
    full = [side for side in ("in", "out") if of.links.get(side, 0.0) >= FULL]
    links = f", and the servers' links {' and '.join(full)} are full" if full else ""
    shares = of.shares
    sharing = f"{_percent(shares['computing'])} computing, {_percent(_moving(of))} sending and receiving"
    waiting = f"{_percent(shares['waiting'])} waiting{links}"
    level: Level = "good" if shares["computing"] >= MOST else "idle"
    return Sentence(level, f"{each}: {sharing}, {waiting}.")


def advice(of: Situation) -> Sentence:
    """Say what would make the job faster."""
    if of.loss is not None and not math.isfinite(of.loss):
        return Sentence("warn", "Lower the learning rate, and continue from a checkpoint.")
    if of.is_early or not of.iteration_seconds:
        return Sentence("idle", "Come back after a few rounds.")
    if of.floor and of.iteration_seconds <= NEAR * of.floor:
        return Sentence("good", f"Nothing: only faster links, faster {of.noun}s or a smaller model would help.")
    slow = of.slowest if of.slowest and of.slowest[1] >= SLOW else None
    if slow and "tune_batches=true" not in of.policy and not of.clients:
        text = f"Worker {slow[0]} computes {slow[1]:.1f} × as long as the others: r2sp:tune_batches=true gives it less."
        return Sentence("warn", text)
    computing, waiting = of.shares["computing"], of.shares["waiting"]
    if computing >= MOST:
        return Sentence("good", f"Nothing stands out: {of.who.lower()} compute {_percent(computing)} of the time.")
    for schemes, other in ((BARRIERS, "r2sp"), (LIMITS, "r2sp")):
        if of.scheme not in schemes:
            continue
        other = "fl-r2sp" if of.clients else other
        if waiting >= _moving(of):
            why = schemes[of.scheme].format(noun=of.noun)
            text = f"{of.who} wait {_percent(waiting)} of the time {why}: try {other}."
        else:
            text = f"{of.who} compute only {_percent(computing)} of the time; all send at once: try {other}."
        return Sentence("warn", text)
    if of.scheme in TURNS:
        full = any(use >= FULL for use in of.links.values())
        why = f"{of.who} wait {_percent(waiting)} of the time {TURNS[of.scheme]}"
        if _moving(of) > waiting:
            why = f"Sending and receiving take {_percent(_moving(of))} of the time"
        if full:
            return Sentence("idle", f"{why}, and the links are full: faster links or more servers would help.")
        if of.clients:  # `paceline advise` knows no federations
            return Sentence("idle", f"{why}.")
        return Sentence("idle", f"{why}: `paceline advise` measures whether the links or the workers are the limit.")
    if of.staleness is not None and of.staleness > max(2.0, of.members / 2):
        other = "fl-r2sp" if of.clients else "r2sp"
        text = f"Updates are {of.staleness:.1f} versions old when they are applied: {other} bounds that."
        return Sentence("idle", text)
    if of.clients:
        return Sentence("idle", "Nothing stands out.")
    return Sentence("idle", "Nothing stands out: `paceline advise` compares this policy with the others.")


def seconds(value: float) -> str:
    """Return a time in words, in a suitable unit."""
    if value < 0.0995:
        return f"{1000 * value:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"


def _moving(of: Situation) -> float:
    return of.shares["pushing"] + of.shares["pulling"]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
