"""Which scheme a cluster wants: candidates, what each is expected to come to, the one to take, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.model.correction import chosen as correction
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.observe.observer import Observer
from paceline.policies import make
from paceline.simulate import Cluster, ClusterSpec, limit_seconds
from paceline.simulate.cluster_spec import chance_of

DDP = "ddp"  # all-reduce among the workers: what PyTorch's DistributedDataParallel does
NEAR = 0.03  # who is within this of the fastest is as good as the fastest, and may be chosen for less staleness
BUCKET = 25 * 2**20  # bytes that DistributedDataParallel reduces at a time, if nobody says otherwise
BACKWARD = 2 / 3  # of computing: the part in which gradients come out
LITTLE = 0.1  # where no more than this can be gained, that is the first thing to know
FEW = 4  # up to this staleness, as few groups have it, hardly any optimizer minds
UNEQUAL = 1.1  # times: workers whose compute times differ by more are not alike

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Candidate:
    """A way to train."""

    policy: str
    streamed: bool = False
    colocated: bool = False

    @property
    def name(self) -> str:
        """In words."""
        if self.policy == DDP:
            return DDP
        said = self.policy + (" streamed" if self.streamed else "")
        return said + (", a server beside each worker" if self.colocated else "")


@dataclass(frozen=True)
class Estimate:
    """What a candidate comes to."""

    candidate: Candidate
    iteration_seconds: float
    samples_per_second: float
    mean_staleness: float = 0.0
    max_staleness: int = 0
    busy: tuple[float, float] | None = None  # the servers' links, in and out: the part of the time that they are full
    floor_seconds: float = 0.0
    price: float = 1.0  # times the samples that it needs without staleness

    @property
    def worth(self) -> float:
        """Samples a second, by what they bring."""
        return self.samples_per_second / self.price


@dataclass(frozen=True)
class Advice:
    """What is said of a cluster."""

    spec: ClusterSpec
    now: Estimate
    ranked: tuple[Estimate, ...]  # those that learn fastest first
    chosen: Estimate
    reasons: tuple[str, ...]
    steps: tuple[str, ...] = ()  # what else would help, and how much


def differ(spec: ClusterSpec) -> bool:
    """Do the workers take unequally long?"""
    times = [worker.compute_seconds() for worker in spec.workers]
    return max(times) > UNEQUAL * min(times)


def candidates(spec: ClusterSpec) -> list[Candidate]:
    """What is compared. Of two that are as good as each other, the first is taken: it asks for less."""
    found = [
        Candidate(DDP),
        Candidate("bsp", colocated=True),
        Candidate("bsp"),
        Candidate("bsp:pipeline=true"),
        Candidate("r2sp:groups=auto"),
        Candidate("r2sp", streamed=True, colocated=True),
        Candidate("r2sp", streamed=True),
        Candidate("r2sp"),
        Candidate("ssp"),
        Candidate("dssp"),
        Candidate("asp"),
        Candidate("asp", colocated=True),
    ]
    if differ(spec):
        found += [
            Candidate("bsp:tune_batches=true", colocated=True),
            Candidate("bsp:tune_batches=true"),
            Candidate("r2sp:tune_batches=true", streamed=True, colocated=True),
            Candidate("r2sp:tune_batches=true", streamed=True),
            Candidate("r2sp:tune_batches=true"),
        ]
    if len(spec.workers) == 1:
        found = [each for each in found if not each.colocated and each.policy != DDP]
    return [each for each in found if each.policy == DDP or make(each.policy).least_workers <= len(spec.workers)]


def price(policy: str, staleness: float, optimizer: OptimizerSpec | None) -> float:
    """How many times the samples a scheme needs for its staleness.

    In round figures, as measured on AlexNet and VGG16 with CIFAR-10 and 16 workers, each scheme at its own best
    learning rate (docs/learning.md). Turns have a staleness that is known in advance and corrected for where there is
    momentum; without that, sixteen versions of it keep a model from learning at all.
    """
    if staleness < 0.05:
        return 1.0
    momentum = optimizer is not None and correction("auto", optimizer) == "full"
    if policy.startswith("r2sp"):
        adam = momentum and optimizer is not None and optimizer.name != "SGD"
        return 1.2 if adam and staleness > FEW else 1.05
    return 2.0 if momentum else 1.15


def expected(
    spec: ClusterSpec,
    candidate: Candidate,
    iterations: int,
    seed: int = 0,
    progress: Progress | None = None,
    optimizer: OptimizerSpec | None = None,
) -> Estimate:
    """What a candidate comes to on a cluster: simulated, or, for all-reduce, reckoned."""
    if candidate.policy == DDP:
        return _all_reduce(spec, iterations, seed)
    described = spec.colocated() if candidate.colocated else spec
    busy = _Busy()
    watch = None if candidate.colocated else busy
    policy = make(candidate.policy)
    result = Cluster(described, policy, iterations, seed, candidate.streamed, watch).run(progress)
    report = result.report
    return Estimate(
        candidate,
        report.mean_iteration_seconds,
        report.samples_per_second,
        report.mean_staleness,
        report.max_staleness,
        None if candidate.colocated else busy.parts(result.simulated_seconds),
        limit_seconds(described, candidate.streamed or policy.pipelined),
        price(candidate.policy, report.mean_staleness, optimizer),
    )


def advise(
    spec: ClusterSpec,
    now: Candidate,
    iterations: int,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
    optimizer: OptimizerSpec | None = None,
) -> Advice:
    """Compare the candidates and what there is now, and choose. optimizer: the script's; None: one without momentum."""
    wanted = candidates(spec)
    found = [
        expected(spec, candidate, iterations, seed, _hears(progress, candidate.name), optimizer)
        for candidate in (wanted if now in wanted else [now, *wanted])
    ]
    current = next(each for each in found if each.candidate == now)
    ranked = sorted(found, key=lambda each: -each.worth)
    chosen = choose(ranked, wanted)
    steps = tuple(what_else(spec, chosen, iterations, seed, progress))
    return Advice(spec, current, tuple(ranked), chosen, tuple(reasons(spec, current, ranked, chosen)), steps)


def choose(ranked: Sequence[Estimate], order: Sequence[Candidate]) -> Estimate:
    """Of those that learn about as fast as the fastest, the one with the least staleness; of those, the first in order.

    A time won at the price of staleness must be worth it.
    """
    near = [each for each in ranked if each.worth >= ranked[0].worth / (1 + NEAR)]
    place = {candidate: number for number, candidate in enumerate(order)}
    return min(near, key=lambda each: (round(each.mean_staleness, 1), place.get(each.candidate, len(place))))


def reasons(spec: ClusterSpec, now: Estimate, ranked: Sequence[Estimate], chosen: Estimate) -> list[str]:
    """Why, in sentences whose figures are those of the run."""
    said = []
    ideal = sum(worker.batch / worker.compute_seconds() for worker in spec.workers)
    part = min(1.0, now.samples_per_second / ideal)
    if ideal / now.samples_per_second - 1 < 0.1:
        most = max(0.0, ideal / now.samples_per_second - 1)
        said.append(
            f"Computing takes {part:.0%} of the time under {now.candidate.name}: no policy gains more than {most:.0%}."
        )
    else:
        said.append(
            f"Computing takes {part:.0%} of the time under {now.candidate.name}; the rest is the network, and waiting."
        )
    if differ(spec):
        times = sorted(worker.compute_seconds() for worker in spec.workers)
        said.append(
            f"The slowest worker computes {times[-1] / times[0]:.1f} times as long as the fastest, and at a barrier "
            f"all wait for it: even without a network a barrier would reach {_barrier(spec) / ideal:.0%} of what the "
            "workers can compute."
        )
    said += _why_chosen(spec, ranked, chosen)
    quickest = max(ranked, key=lambda each: each.samples_per_second)
    more = quickest.samples_per_second / chosen.samples_per_second - 1
    if quickest.price > chosen.price and more > NEAR:
        said.append(
            f"{quickest.candidate.name} would take in {more:.0%} more samples a second, but for its staleness of "
            f"{quickest.mean_staleness:.1f} it needs about {quickest.price / chosen.price - 1:.0%} more of them."
        )
    fastest = ranked[0]
    if fastest is not chosen:
        ahead = fastest.worth / chosen.worth - 1
        if round(fastest.mean_staleness, 1) > round(chosen.mean_staleness, 1):
            price = f"with a staleness of {fastest.mean_staleness:.1f} instead of {chosen.mean_staleness:.1f}"
        elif fastest.max_staleness > chosen.max_staleness:
            price = f"with a staleness of up to {fastest.max_staleness} instead of {chosen.max_staleness}"
        else:
            price = "and asks for more"
        said.append(
            f"{fastest.candidate.name} would be {ahead:.1%} faster, {price}; less than {NEAR:.0%} is not worth it."
        )
    return said


def _why_chosen(spec: ClusterSpec, ranked: Sequence[Estimate], chosen: Estimate) -> list[str]:
    N, K, candidate = len(spec.workers), spec.servers, chosen.candidate
    said = []
    plain = next((each for each in ranked if each.candidate == Candidate("bsp")), None)
    if candidate.policy == DDP:
        said.append(
            f"All-reduce sends {2 * (N - 1) / N:.2g} times the model over each link in an iteration, without staleness "
            f"and without a server; through {_servers(K)} it would be {N / K:.2g} times, each way."
        )
    elif candidate.colocated:
        said.append(
            f"A server beside each worker spreads the traffic over {N} links instead of {K}: each carries "
            f"{2 * (N - 1) / N:.2g} times the model an iteration, where a server's, apart, would carry "
            f"{N / K:.2g} times, each way."
        )
        if candidate.streamed:
            said.append(
                "Streamed, what is pushed comes back while the rest is still on its way, so an iteration waits for the "
                "network once and not twice."
            )
    elif plain is not None and plain.busy and chosen.busy and candidate.policy != "bsp":
        said.append(
            f"The servers' links are full {plain.busy[0]:.0%} of the time inwards and {plain.busy[1]:.0%} outwards "
            f"under bsp, where all push and then all pull; under {candidate.name} it is {chosen.busy[0]:.0%} and "
            f"{chosen.busy[1]:.0%}."
        )
    if chosen.floor_seconds:
        said.append(
            f"It takes {chosen.iteration_seconds / chosen.floor_seconds:.2f} times the floor that this cluster sets to "
            "schemes that serve all workers alike."
        )
    return said


def what_else(
    spec: ClusterSpec, chosen: Estimate, iterations: int, seed: int, progress: Callable[[str, float], None] | None
) -> list[str]:
    """What better machines would gain under the chosen scheme."""
    twice = tuple(replace(worker, link=2 * worker.link) for worker in spec.workers)
    changes = {
        "Links twice as fast": replace(spec, server_link=2 * spec.server_link, workers=twice),
        "Machines that compute twice as fast": replace(
            spec,
            workers=tuple(
                replace(worker, overhead=worker.overhead / 2, samples_per_second=2 * worker.samples_per_second)
                for worker in spec.workers
            ),
        ),
    }
    if not chosen.candidate.colocated and chosen.candidate.policy != DDP:
        changes["Twice as many servers"] = replace(spec, servers=2 * spec.servers)
    said = []
    for change, better in changes.items():
        then = expected(better, chosen.candidate, iterations, seed, _hears(progress, change))
        gain = then.samples_per_second / chosen.samples_per_second - 1
        said.append(f"{change} would gain {max(0.0, gain):.0%}.")
    return said


class _Busy(Observer):
    """How full the servers' links are, over time."""

    def __init__(self) -> None:
        self._full = {"in": 0.0, "out": 0.0}
        self._fraction = {"in": 0.0, "out": 0.0}
        self._since = {"in": 0.0, "out": 0.0}

    def used(self, time: float, direction: str, fraction: float) -> None:
        self._full[direction] += self._fraction[direction] * (time - self._since[direction])
        self._fraction[direction], self._since[direction] = fraction, time

    def parts(self, seconds: float) -> tuple[float, float]:
        if seconds <= 0:
            return 0.0, 0.0
        return min(1.0, self._full["in"] / seconds), min(1.0, self._full["out"] / seconds)


def _all_reduce(spec: ClusterSpec, iterations: int, seed: int) -> Estimate:
    """A ring over the workers: each link carries 2(N−1)/N of the model, and all wait for the slowest at each step.

    A bucket is reduced as soon as the backward pass has filled it. So a model of one bucket is sent when all is
    computed, and of many, all but the first and the last are sent while the rest is computed.
    """
    N = len(spec.workers)
    buckets = max(1, math.ceil(spec.model_bytes / BUCKET))
    compute = _slowest(spec, iterations, seed)
    network = 2 * (N - 1) / N * spec.model_bytes / min(worker.link for worker in spec.workers)
    backward = BACKWARD * compute
    seconds = compute - backward + max(backward + network / buckets, backward / buckets + network)
    seconds += 2 * (N - 1) * spec.latency
    return Estimate(Candidate(DDP), seconds, sum(worker.batch for worker in spec.workers) / seconds)


def _slowest(spec: ClusterSpec, iterations: int, seed: int) -> float:
    """The mean, over iterations, of the longest time that a worker computes."""
    chances = [chance_of(number, seed) for number in range(len(spec.workers))]
    total = sum(
        max(worker.draw(worker.batch, chance) for worker, chance in zip(spec.workers, chances, strict=True))
        for _ in range(iterations)
    )
    return total / iterations


def _barrier(spec: ClusterSpec) -> float:
    """Samples per second at a barrier, without a network."""
    return sum(worker.batch for worker in spec.workers) / max(worker.compute_seconds() for worker in spec.workers)


def _servers(count: int) -> str:
    return "one server" if count == 1 else f"{count} servers"


def _hears(progress: Callable[[str, float], None] | None, name: str) -> Progress | None:
    return None if progress is None else lambda part: progress(name, part)
