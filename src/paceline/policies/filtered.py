"""Outliers are left out (FL-R²SP, ToN 2026, section IV-B): a client whose updates keep pointing elsewhere.

The driver measures the cosine of each update with those that it was applied with (`compares`). A client whose cosines
stay low is blacklisted: as far as the policy inside knows, it has left. It is not granted any more, and what still
comes from it is dropped. If it is taken back, the policy inside is told that a new incarnation has joined.

The paper's rule (`relative=false,beta=0.5,strikes=3`): the cosine with the mean is below β = 0.5 three times in a row.
But as training goes on updates become noise, and the cosine of any of n falls to 1/√n, below any fixed β.

So by default what counts is where a cosine lies among those of the same Apply: over the last `strikes` of them a client
must be, on average, `SPREADS` spreads below the median, and below β times the median. That finds also who is small
among noise: of one or two classes there is soon nothing left to learn. (How this was chosen: docs/decisions/0013.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Annotated, Any, TypeAlias

from paceline.policies.contract import Add, Apply, Cancel, Decisions, Discard, Grant, Keep, Policy, Update, WorkerId
from paceline.policies.options import PolicyError, Range
from paceline.policies.registry import make

SMALLEST = 5  # updates applied together: with fewer there is no telling who is the outlier
SPREADS = 2.5  # by how many a client must be below the median
MIN_SPREAD = 0.06  # of the median: less is not worth a word
NORMAL = 1.4826  # a normal distribution's deviation, in units of its median distance from the median
AWAITED = 16  # Applies of which cosines may still come

Cohort: TypeAlias = dict[Update, float | None]  # applied together → their cosines, as far as they are known


@dataclass(frozen=True, slots=True)
class CosineSample:
    """A client's cosine, and what was usual among those it was applied with."""

    cosine: float
    usual: float
    spread: float


class Filtered(Policy):
    summary = "`policy` without clients whose updates keep pointing elsewhere"

    def __init__(
        self,
        policy: Annotated[Policy | str, "the policy for the others"] = "bsp:weights=mean",
        beta: Annotated[float, Range(-1, 1), "β, the cosine below which a client is an outlier"] = 0.8,
        relative: Annotated[bool, "β is in units of what is usual among those applied together"] = True,
        strikes: Annotated[int, Range(1), "over how many of its updates"] = 5,
        retest: Annotated[int, Range(0), "model versions after which a blacklisted one is tried again; 0: never"] = 0,
    ) -> None:
        self.policy = make(policy) if isinstance(policy, str) else policy
        self.beta, self.relative, self.strikes, self.retest = beta, relative, strikes, retest
        if self.policy.keeps:
            raise PolicyError("filtered: a policy that keeps updates would go on with an outlier's; use another.")
        if self.policy.pipelined:
            raise PolicyError("filtered: a pipelined policy has answered before updates can be compared; use another.")
        self.takes_turns, self.mixes = self.policy.takes_turns, self.policy.mixes
        self.version = 0
        self.granted: dict[WorkerId, int] = {}  # member → Grants it was given
        self.running: set[WorkerId] = set()  # members with a Grant not yet answered
        self.compares = True
        self.hears_loss = self.policy.hears_loss
        self.seen: dict[WorkerId, list[CosineSample]] = {}  # of a member, the last `strikes`
        #: Client → the cosines it was blacklisted for. Who leaves and comes back is still on it.
        self.blacklist: dict[WorkerId, tuple[float, ...]] = {}
        self.aside: set[WorkerId] = set()  # members who are on it
        self.since: dict[WorkerId, int] = {}  # blacklisted → the version then, the oldest first
        self.taken_back = 0  # how often a member was
        #: Member that was taken back → its Grants before that, and its incarnation as the policy inside knows it.
        self.skipped: dict[WorkerId, tuple[int, int]] = {}
        self.sent: dict[Update, Update] = {}  # as the policy inside knows it → as it was sent, where those differ
        self.cohorts: deque[Cohort] = deque(maxlen=AWAITED)  # applied, and not yet compared

    @property
    def least_workers(self) -> int:
        return self.policy.least_workers

    @property
    def hears_ready(self) -> bool:
        return self.policy.hears_ready

    def explain(self) -> list[str]:
        """A line for each blacklisted client."""
        return [
            f"client {client}: {', '.join(f'{cosine:.2f}' for cosine in cosines)}"
            for client, cosines in sorted(self.blacklist.items())
        ]

    def pardon(self, clients: list[WorkerId] | None, now: float) -> Decisions:
        """Take these back; all of them if None."""
        out: Decisions = []
        for client in list(self.blacklist) if clients is None else clients:
            if self.blacklist.pop(client, None) is not None:
                del self.since[client]
                if client in self.aside:
                    self.aside.remove(client)
                    self.taken_back += 1
                    # Drivers count incarnations from 1 up, so a negative number is no other incarnation's.
                    self.skipped[client] = (self.granted[client], -self.taken_back)
                    out += self._pass(self.policy.joined(client, now))
        return out

    def exclusion(self, worker: WorkerId) -> str:
        if worker not in self.aside:
            return self.policy.exclusion(worker)
        cosines = ", ".join(f"{cosine:.2f}" for cosine in self.blacklist[worker])
        return f"its updates have little in common with those of the others (cosines {cosines})"

    def memory(self) -> dict[str, Any]:
        return self.policy.memory() | {"blacklist": {str(client): list(of) for client, of in self.blacklist.items()}}

    def recall(self, memory: Mapping[str, Any]) -> None:
        self.policy.recall(memory)
        blacklist = memory.get("blacklist")
        for client, cosines in blacklist.items() if isinstance(blacklist, dict) else ():
            self.blacklist[int(client)] = tuple(float(cosine) for cosine in cosines)
            self.since[int(client)] = self.version

    # What happens

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.granted[worker] = 0
        if worker in self.blacklist:
            self.aside.add(worker)
            return self._have_somebody(now)
        return self._pass(self.policy.joined(worker, now))

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        return [] if worker in self.aside else self._pass(self.policy.ready(worker, batch_size, now))

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if update.iteration == self.granted.get(worker):
            self.running.discard(worker)
        skipped, incarnation = self.skipped.get(worker, (0, 0))
        if worker not in self.granted or worker in self.aside or update.iteration <= skipped:
            return [Discard(update)]
        known = update
        if skipped:
            known = replace(update, iteration=update.iteration - skipped, incarnation=incarnation)
            self.sent[known] = update
        return self._pass(self.policy.arrived(known, now)) + self._try_again(now)

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if self.granted.pop(worker, None) is None:
            return []
        self.running.discard(worker)
        self.skipped.pop(worker, None)
        self.seen.pop(worker, None)
        if worker in self.aside:
            self.aside.remove(worker)
            return []
        return self._pass(self.policy.left(worker, now)) + self._have_somebody(now)

    def woke(self, now: float) -> Decisions:
        return self._pass(self.policy.woke(now))

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        if kind == "pardon" and isinstance(subject, tuple):  # a worker speaks of itself alone
            return self.pardon([client for client in subject if isinstance(client, int)], now)
        if kind != "cosine" or not isinstance(subject, Update):
            return self._pass(self.policy.measured(kind, subject, value, now))
        cohort = next((each for each in self.cohorts if subject in each), None)
        if cohort is None:
            return []
        cohort[subject] = value
        cosines = {update: cosine for update, cosine in cohort.items() if cosine is not None}
        if len(cosines) < len(cohort):
            return []
        self.cohorts.remove(cohort)
        return self._judge(cosines, now)

    # Who is an outlier

    def _judge(self, cosines: dict[Update, float], now: float) -> Decisions:
        values = [cosine if cosine == cosine else -1.0 for cosine in cosines.values()]
        usual = median(values)
        spread = max(NORMAL * median(abs(value - usual) for value in values), MIN_SPREAD * usual)
        if usual <= 0 or (usual < self.beta and not self.relative):
            return []  # most are below it: then it is not they who are odd
        out: Decisions = []
        for update, value in zip(cosines, values, strict=True):
            worker = update.worker
            if worker in self.granted and worker not in self.aside:
                seen = self.seen.setdefault(worker, [])
                seen.append(CosineSample(value, usual, spread))
                del seen[: -self.strikes]
                if self._is_odd(seen) and len(self.aside) + 1 < len(self.granted):
                    out += self._dismiss(worker, now)
        return out

    def _is_odd(self, seen: list[CosineSample]) -> bool:
        if len(seen) < self.strikes:
            return False
        if not self.relative:
            return all(each.cosine < self.beta for each in seen)
        below = mean((each.usual - each.cosine) / each.spread for each in seen)
        return below > SPREADS and mean(each.cosine for each in seen) < self.beta * mean(each.usual for each in seen)

    def _dismiss(self, worker: WorkerId, now: float) -> Decisions:
        self.blacklist[worker] = tuple(each.cosine for each in self.seen.pop(worker))
        self.since[worker] = self.version
        self.aside.add(worker)
        out: Decisions = [Cancel(worker)] if worker in self.running else []
        self.running.discard(worker)
        return out + self._pass(self.policy.left(worker, now))

    def _have_somebody(self, now: float) -> Decisions:
        """Where all who are there are blacklisted, they are better than nobody."""
        everyone = bool(self.aside) and len(self.aside) == len(self.granted)
        return self.pardon(sorted(self.aside), now) if everyone else []

    def _try_again(self, now: float) -> Decisions:
        if not (self.retest and self.since):
            return []
        due = []
        for client, version in self.since.items():  # the oldest first
            if self.version - version < self.retest:
                break
            due.append(client)
        return self.pardon(due, now)

    # Decisions of the policy inside

    def _pass(self, decisions: Decisions) -> Decisions:
        out: Decisions = []
        for decision in decisions:
            match decision:
                case Grant(worker):
                    self.granted[worker] += 1
                    self.running.add(worker)
                case Cancel(worker):
                    self.running.discard(worker)
                case Discard(update):
                    decision = Discard(self.sent.pop(update, update))
                case Add(update):
                    decision = replace(decision, update=self.sent.get(update, update))
                case Apply(updates):
                    self.version += 1
                    if self.sent:
                        updates = tuple(self.sent.pop(update, update) for update in updates)
                        decision = replace(decision, updates=updates)
                    if self.compares and len(updates) >= SMALLEST:
                        self.cohorts.append(dict.fromkeys(updates))
                case Keep():
                    raise AssertionError("a policy that keeps nothing has kept an update")
            out.append(decision)
        return out
