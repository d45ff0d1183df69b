"""Outliers are left out (FL-R²SP, ToN 2026, section IV-B): a client whose updates keep pointing elsewhere.

The driver measures each update's cosine with the mean of those that it was applied with (`compares`). A client whose
cosine stays below a threshold for `strikes` Applies in a row is blacklisted: as far as the policy inside knows, it has
left. It is not granted any more, and what still comes from it is dropped.

The paper's threshold is β = 0.5. But late in training honest updates are mostly noise, and the cosine of each with a
mean of 12 tends to 1/√12 ≈ 0.29. So by default the threshold is β times the median of the updates that were applied
together (`relative`). Either way no more than the lower half of them can be outliers: where most are below the
threshold, it is the threshold that is wrong, and nobody is suspected.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median
from typing import Annotated, TypeAlias

from paceline.policies.contract import Apply, Cancel, Decisions, Discard, Grant, Keep, Policy, Update, WorkerId
from paceline.policies.options import PolicyError, Range
from paceline.policies.registry import make

SMALLEST = 3  # updates applied together: with two there is no telling who is the outlier
AWAITED = 16  # Applies of which cosines may still come

Cohort: TypeAlias = dict[Update, float | None]  # applied together → their cosines, as far as they are known


class Filtered(Policy):
    summary = "`policy` without clients whose updates keep pointing elsewhere"
    compares = True

    def __init__(
        self,
        policy: Annotated[Policy | str, "the policy for the others"] = "bsp:weights=mean",
        beta: Annotated[float, Range(-1, 1), "β, the cosine below which an update is suspect"] = 0.5,
        relative: Annotated[bool, "β is in units of the median of those applied together"] = True,
        strikes: Annotated[int, Range(1), "how often in a row a client must be suspect"] = 3,
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
        self.suspect: dict[WorkerId, list[float]] = {}  # member → its cosines below the threshold, in a row
        #: Client → the cosines it was blacklisted for.
        self.blacklist: dict[WorkerId, tuple[float, ...]] = {}
        self.since: dict[WorkerId, int] = {}  # blacklisted → the version then, the oldest first
        self.skipped: dict[WorkerId, int] = {}  # member → its Grants before it was last taken back
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
                self.skipped[client] = self.granted[client]
                out += self._pass(self.policy.joined(client, now))
        return out

    # What happens

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.granted[worker] = 0
        return self._pass(self.policy.joined(worker, now))

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        return [] if worker in self.blacklist else self._pass(self.policy.ready(worker, batch_size, now))

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if update.iteration == self.granted.get(worker):
            self.running.discard(worker)
        skipped = self.skipped.get(worker, 0)
        if worker not in self.granted or worker in self.blacklist or update.iteration <= skipped:
            return [Discard(update)]
        known = update
        if skipped:
            known = replace(update, iteration=update.iteration - skipped)
            self.sent[known] = update
        return self._pass(self.policy.arrived(known, now)) + self._try_again(now)

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if self.granted.pop(worker, None) is None:
            return []
        self.running.discard(worker)
        self.skipped.pop(worker, None)
        self.suspect.pop(worker, None)
        if self.blacklist.pop(worker, None) is not None:
            del self.since[worker]
            return []
        out = self._pass(self.policy.left(worker, now))
        if self.blacklist and len(self.blacklist) == len(self.granted):  # better they than nobody
            out += self.pardon(None, now)
        return out

    def woke(self, now: float) -> Decisions:
        return self._pass(self.policy.woke(now))

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
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

    def _judge(self, cosines_of: dict[Update, float], now: float) -> Decisions:
        threshold = self.beta * median(cosines_of.values()) if self.relative else self.beta
        below = {update for update, cosine in cosines_of.items() if not cosine >= threshold}
        if 2 * len(below) > len(cosines_of):
            below = set()
        out: Decisions = []
        for update, cosine in cosines_of.items():
            worker = update.worker
            if update not in below:
                self.suspect.pop(worker, None)
            elif worker in self.granted and worker not in self.blacklist:
                cosines = self.suspect.setdefault(worker, [])
                cosines.append(cosine)
                if len(cosines) >= self.strikes and len(self.blacklist) + 1 < len(self.granted):
                    out += self._dismiss(worker, now)
        return out

    def _dismiss(self, worker: WorkerId, now: float) -> Decisions:
        self.blacklist[worker] = tuple(self.suspect.pop(worker))
        self.since[worker] = self.version
        out: Decisions = [Cancel(worker)] if worker in self.running else []
        self.running.discard(worker)
        return out + self._pass(self.policy.left(worker, now))

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
