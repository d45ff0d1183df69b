"""A tiny cluster without a network: each worker has an iteration time, and the policy does the rest."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.policies import Apply, Cancel, Decision, Discard, Grant, Policy, Turn, Update, WakeAt

Seconds = Callable[[int], float]  # batch size → seconds


@dataclass
class Story:
    """The outcome of a run."""

    applied: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)  # time and workers of each Apply
    weights: list[tuple[float, ...]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)  # the progress gap at each Grant
    batches: dict[int, list[int]] = field(default_factory=dict)  # worker → the batch sizes of its Grants
    waited: Counter[int] = field(
        default_factory=Counter
    )  # worker → seconds between its updates and the Grants that follow
    discarded: int = 0
    events: int = 0
    decisions: int = 0


def run(
    policy: Policy,
    seconds: Mapping[int, Seconds],
    updates: int,
    batch: int = 32,
    computing: Mapping[int, Seconds] | None = None,
    tell: Callable[..., list[Decision]] = lambda method, *arguments: method(*arguments),
) -> Story:
    """Run a policy until `updates` updates have arrived.

    computing: the compute_seconds that workers report; by default the whole iteration time.
    tell: calls the policy's methods.

    If the policy hears `ready`, a worker asks for its Turn after its iteration time, and its push takes no time.
    """
    story = Story(batches={worker: [] for worker in seconds})
    now, version, number, wake = 0.0, 0, 0, float("inf")
    done = dict.fromkeys(seconds, 0)
    slowest, arrived, level = 0, 0, Counter({0: len(done)})  # level: how many workers have done so many updates
    iterations = dict.fromkeys(seconds, 0)
    running: dict[int, tuple[int, int]] = {}  # worker → iteration and base version of its Grant
    asking: set[int] = set()  # workers that must ask before they push
    arrived_at: dict[int, float] = {}
    heap: list[tuple[float, int, int, int]] = []  # time, number, worker, iteration

    def carry_out(decisions: list[Decision]) -> None:
        nonlocal version, number, wake
        story.events += 1
        story.decisions += len(decisions)
        for decision in decisions:
            match decision:
                case Grant(worker, granted_batch):
                    assert worker not in running
                    iterations[worker] += 1
                    if policy.hears_ready:
                        asking.add(worker)
                    running[worker] = (iterations[worker], version)
                    story.batches[worker].append(granted_batch or batch)
                    story.gaps.append(done[worker] - slowest)
                    story.waited[worker] += now - arrived_at.pop(worker, now)  # type: ignore[assignment]
                    number += 1
                    due = now + seconds[worker](granted_batch or batch)
                    heapq.heappush(heap, (due, number, worker, iterations[worker]))
                case Cancel(worker):
                    del running[worker]
                case Apply(applied, weights):
                    story.applied.append((now, tuple(update.worker for update in applied)))
                    story.weights.append(weights)
                    story.staleness += [version - update.base_version for update in applied]
                    version += 1
                case Discard():
                    story.discarded += 1
                case WakeAt(time):
                    wake = time
                case Turn(worker):
                    number += 1
                    heapq.heappush(heap, (now, number, worker, iterations[worker]))
                    asking.discard(worker)

    for worker in seconds:
        carry_out(tell(policy.joined, worker, 0.0))
    while arrived < updates:
        if wake <= (heap[0][0] if heap else float("inf")):
            now, wake = wake, float("inf")
            carry_out(tell(policy.woke, now))
            continue
        now, _, worker, iteration = heapq.heappop(heap)
        if running.get(worker, (0, 0))[0] != iteration:
            continue  # it was cancelled
        if worker in asking:
            arrived_at[worker] = now
            carry_out(tell(policy.ready, worker, story.batches[worker][-1], now))
            continue
        _, base_version = running.pop(worker)
        level[done[worker]] -= 1
        done[worker] += 1
        level[done[worker]] += 1
        slowest += not level[slowest]
        arrived += 1
        arrived_at.setdefault(worker, now)
        granted = story.batches[worker][-1]
        busy = (computing or seconds)[worker](granted)
        update = Update(worker, iteration, base_version, granted, busy)
        carry_out(tell(policy.arrived, update, now))
    return story


def steady(seconds: float) -> Seconds:
    """Return an iteration time that does not depend on the batch size."""
    return lambda batch: seconds
