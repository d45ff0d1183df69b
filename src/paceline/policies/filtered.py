"""A filter for outliers (FL-R²SP, ToN 2026, section IV-B): clients whose updates point away from the others'.

The driver measures the cosine of each update with the sum of the updates it was applied with (`compares`). A client
whose cosines stay low is blacklisted. The inner policy then sees it leave. The client gets no more Grants, and updates
that still arrive from it are discarded. If the client is taken back, the inner policy sees a new incarnation join.

The paper's rule (`relative=false,beta=0.5,strikes=3`) blacklists a client whose cosine with the mean is below β = 0.5
in three consecutive rounds. It judges every round, also one in which most clients are below β. But as training
proceeds, updates become noise, and the cosine of each of n updates falls to 1/√n. Where that is below β, the rule
blacklists honest clients too, until few are left: with β = 0.5, about four in each Apply.

So by default a cosine is judged relative to the others of the same Apply. Over its last `strikes` updates, a client
must be, on average, `SPREADS` spreads below the median, and below β times the median. This also finds a client whose
updates are small among noise: a client with data of one or two classes soon has nothing left to learn. Decision 0013
(docs/decisions) tells how this rule was chosen.

Under both rules, a client is judged by consecutive rounds of its own. A round without an update of the client, because
it was late, is not one of them. A round that cannot be judged ends the streak of its clients, and they are judged anew:
a round whose cosines were not reported and, under the relative rule, a round with fewer than `SMALLEST` updates or with
a median cosine of 0 or less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Annotated, Any, TypeAlias

from paceline.policies.contract import Add, Apply, Cancel, Decisions, Discard, Grant, Keep, Policy, Update, WorkerId
from paceline.policies.options import PolicyError, Range
from paceline.policies.registry import make

SMALLEST = 5  # updates in an Apply; among fewer, an outlier cannot be told from the median
SPREADS = 2.5  # how far below the median an outlier is
MIN_SPREAD = 0.06  # the least spread, in units of the median
NORMAL = 1.4826  # standard deviation of a normal distribution, in units of its median absolute deviation
AWAITED = 16  # the number of Applies whose cosines may still be reported

Cohort: TypeAlias = dict[Update, float | None]  # the updates of one Apply → their cosines, None until reported


@dataclass(frozen=True, slots=True)
class CosineSample:
    """The cosine of one update, with the median and the spread of the cosines of its Apply."""

    cosine: float
    median: float
    spread: float


class Filtered(Policy):
    summary = "`policy`, without clients whose updates keep pointing away from the others'"

    def __init__(
        self,
        policy: Annotated[Policy | str, "the policy for the clients that are not blacklisted"] = "bsp:weights=mean",
        beta: Annotated[float, Range(-1, 1), "β, the cosine below which a client is an outlier"] = 0.8,
        relative: Annotated[
            bool, "measure β in units of the median cosine of the updates applied together; false: the paper's rule"
        ] = True,
        strikes: Annotated[int, Range(1), "the number of a client's latest updates to judge"] = 5,
        retest: Annotated[
            int, Range(0), "model versions after which a blacklisted client is tried again; 0: never"
        ] = 0,
    ) -> None:
        self.policy = make(policy) if isinstance(policy, str) else policy
        self.beta, self.relative, self.strikes, self.retest = beta, relative, strikes, retest
        if self.policy.keeps:
            raise PolicyError(
                "filtered: a policy that keeps updates would still apply those of an outlier, so choose another one."
            )
        if self.policy.pipelined:
            raise PolicyError(
                "filtered: a pipelined policy returns slices before updates can be compared, so choose another one."
            )
        self.takes_turns, self.mixes = self.policy.takes_turns, self.policy.mixes
        self.queues_transfers = self.policy.queues_transfers
        self.version = 0
        self.granted: dict[WorkerId, int] = {}  # member → number of its Grants
        self.running: set[WorkerId] = set()  # members that hold an unanswered Grant
        self.compares = True
        self.hears_loss = self.policy.hears_loss
        self.seen: dict[WorkerId, list[CosineSample]] = {}  # member → its last `strikes` cosines
        #: Client → the cosines that it was blacklisted for. A client that leaves and rejoins stays blacklisted.
        self.blacklist: dict[WorkerId, tuple[float, ...]] = {}
        self.aside: set[WorkerId] = set()  # blacklisted members
        self.since: dict[WorkerId, int] = {}  # blacklisted client → the version at which it was, oldest first
        self.taken_back = 0  # how often a member was taken back
        #: Member that was taken back → its Grants before that, and its incarnation for the inner policy.
        self.skipped: dict[WorkerId, tuple[int, int]] = {}
        self.sent: dict[Update, Update] = {}  # update as the inner policy knows it → as it was sent, if they differ
        self.cohorts: deque[Cohort] = deque()  # Applies that are not judged yet, oldest first

    @property
    def least_workers(self) -> int:
        return self.policy.least_workers

    @property
    def hears_ready(self) -> bool:
        return self.policy.hears_ready

    def explain(self) -> list[str]:
        """Return a line for each blacklisted client."""
        return [
            f"client {client}: {', '.join(f'{cosine:.2f}' for cosine in cosines)}"
            for client, cosines in sorted(self.blacklist.items())
        ]

    def pardon(self, clients: list[WorkerId] | None, now: float) -> Decisions:
        """Take these clients back from the blacklist; None means all of them."""
        out: Decisions = []
        for client in list(self.blacklist) if clients is None else clients:
            if self.blacklist.pop(client, None) is not None:
                del self.since[client]
                if client in self.aside:
                    self.aside.remove(client)
                    self.taken_back += 1
                    # Drivers number incarnations from 1, so a negative number is unique.
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

    # Events

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.granted[worker] = 0
        if worker in self.blacklist:
            self.aside.add(worker)
            return self._ensure_a_member(now)
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
        return self._pass(self.policy.arrived(known, now)) + self._retest(now)

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if self.granted.pop(worker, None) is None:
            return []
        self.running.discard(worker)
        self.skipped.pop(worker, None)
        self.seen.pop(worker, None)
        if worker in self.aside:
            self.aside.remove(worker)
            return []
        return self._pass(self.policy.left(worker, now)) + self._ensure_a_member(now)

    def woke(self, now: float) -> Decisions:
        return self._pass(self.policy.woke(now))

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        if kind == "pardon" and isinstance(
            subject, tuple
        ):  # only the operator sends a tuple; a worker sends its own id
            return self.pardon([client for client in subject if isinstance(client, int)], now)
        if kind != "cosine" or not isinstance(subject, Update):
            return self._pass(self.policy.measured(kind, subject, value, now))
        cohort = next((each for each in self.cohorts if subject in each), None)
        if cohort is None:
            return []
        cohort[subject] = value
        return [] if None in cohort.values() else self._judge_up_to(cohort, now)

    # Outliers

    def _judge_up_to(self, last: Cohort, now: float) -> Decisions:
        """Judge the Applies up to this one, in their order. Cosines of earlier ones that are missing never come."""
        out: Decisions = []
        while True:
            cohort = self.cohorts.popleft()
            cosines = {update: cosine for update, cosine in cohort.items() if cosine is not None}
            if len(cosines) == len(cohort):
                out += self._judge(cosines, now)
            else:
                self._judge_anew(cohort)
            if cohort is last:
                return out

    def _judge_anew(self, updates: Iterable[Update]) -> None:
        """End the streaks of these updates' clients."""
        for update in updates:
            self.seen.pop(update.worker, None)

    def _judge(self, cosines: dict[Update, float], now: float) -> Decisions:
        """Blacklist the outliers among the clients of one Apply."""
        values = [cosine if cosine == cosine else -1.0 for cosine in cosines.values()]
        middle = median(values)
        spread = max(NORMAL * median(abs(value - middle) for value in values), MIN_SPREAD * middle)
        if self.relative and (len(values) < SMALLEST or middle <= 0):
            self._judge_anew(cosines)
            return []
        out: Decisions = []
        for update, value in zip(cosines, values, strict=True):
            worker = update.worker
            if worker in self.granted and worker not in self.aside:
                seen = self.seen.setdefault(worker, [])
                seen.append(CosineSample(value, middle, spread))
                del seen[: -self.strikes]
                if self._is_outlier(seen) and len(self.aside) + 1 < len(self.granted):
                    out += self._exclude(worker, now)
        return out

    def _is_outlier(self, seen: list[CosineSample]) -> bool:
        """Return whether these latest cosines of a client are those of an outlier."""
        if len(seen) < self.strikes:
            return False
        if not self.relative:
            return all(each.cosine < self.beta for each in seen)
        below = mean((each.median - each.cosine) / each.spread for each in seen)
        return below > SPREADS and mean(each.cosine for each in seen) < self.beta * mean(each.median for each in seen)

    def _exclude(self, worker: WorkerId, now: float) -> Decisions:
        """Blacklist a member."""
        self.blacklist[worker] = tuple(each.cosine for each in self.seen.pop(worker))
        self.since[worker] = self.version
        self.aside.add(worker)
        out: Decisions = [Cancel(worker)] if worker in self.running else []
        self.running.discard(worker)
        return out + self._pass(self.policy.left(worker, now))

    def _ensure_a_member(self, now: float) -> Decisions:
        """Take all members back if every one is blacklisted: a job with outliers is better than a job that stalls."""
        all_aside = bool(self.aside) and len(self.aside) == len(self.granted)
        return self.pardon(sorted(self.aside), now) if all_aside else []

    def _retest(self, now: float) -> Decisions:
        """Take back the clients that were blacklisted `retest` versions ago."""
        if not (self.retest and self.since):
            return []
        due = []
        for client, version in self.since.items():  # the oldest first
            if self.version - version < self.retest:
                break
            due.append(client)
        return self.pardon(due, now)

    def _await_cosines(self, updates: tuple[Update, ...]) -> None:
        """Take note of an Apply whose cosines will be reported. An update alone is the whole, so its cosine is 1."""
        if len(self.cohorts) == AWAITED:
            self._judge_anew(self.cohorts.popleft())
        self.cohorts.append(dict.fromkeys(updates, 1.0 if len(updates) == 1 else None))

    # Decisions of the inner policy

    def _pass(self, decisions: Decisions) -> Decisions:
        """Pass the inner policy's decisions on to the driver, with the updates as they were sent."""
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
                    if self.compares:
                        self._await_cosines(updates)
                case Keep():
                    raise AssertionError("A policy with keeps = False has kept an update.")
            out.append(decision)
        return out
