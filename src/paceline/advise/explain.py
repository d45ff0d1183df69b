"""The advice for a cluster: which candidate to use, why, and which faster hardware would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.advise.candidates import DDP, DILOCO, RINGS, Candidate, candidates, has_unequal_workers
from paceline.advise.evaluate import Estimate, estimate, slowest_compute
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.observe.table import duration
from paceline.simulate import ClusterSpec

NEAR = 0.03  # a candidate within this share of the best counts as equally good, and staleness decides between them
LITTLE = 0.1  # if no policy can gain more than this share, the first reason says so

#: What the estimates with local steps leave out.
TIME_ALONE = (
    "This compares time per sample alone. With local steps, accuracy after the same samples also depends on their "
    "number, on the codec, and on whether workers exchange together, by turns or while they compute: see "
    "docs/advise.md."
)

OVERLAPPED = (
    "Workers compute their next round during the exchange, so it costs time only if it takes longer than a round."
)

CHANCES = 200  # iterations over which the cost of jitter is averaged

#: How a policy works, by the part of its name that says so. The first that fits is given.
HOW = {
    "pipeline=true": "A pipelined barrier returns each piece of the model as soon as all workers have pushed it, so "
    "pushes and pulls overlap. It has no staleness.",
    "r2sp": "Workers take turns on the links: while one sends, the others compute, and no two transfers collide.",
    "bsp": "A barrier has no staleness: it learns like one process with the batches of all workers.",
    "ssp": "No worker waits, unless it is too far ahead of the slowest.",
    "asp": "No worker waits for another.",
}

Progress = Callable[[str, float], None]  # the name of a simulation, and its progress from 0 to 1


@dataclass(frozen=True)
class Advice:
    """The estimates for a cluster, the chosen candidate, and the reasons for it."""

    spec: ClusterSpec
    now: Estimate
    ranked: tuple[Estimate, ...]  # by effective rate, best first
    chosen: Estimate
    reasons: tuple[str, ...]
    upgrades: tuple[str, ...] = ()  # what faster hardware would gain


def advise(
    spec: ClusterSpec,
    now: Candidate,
    iterations: int,
    seed: int = 0,
    progress: Progress | None = None,
    optimizer: OptimizerSpec | None = None,
    local_steps: Sequence[int] = (1,),
    updates: str = "",
) -> Advice:
    """Evaluate the candidates for a cluster and the present set-up, and choose among them.

    optimizer: the script's; None stands for one without momentum. local_steps, updates: of the candidates.
    """
    order = candidates(spec, local_steps, updates)
    found = [
        estimate(spec, candidate, iterations, seed, _progress_of(progress, candidate.name), optimizer)
        for candidate in (order if now in order else [now, *order])
    ]
    if max(local_steps) > 1:  # no price is known for local steps, so no candidate has one
        found = [replace(each, price=1.0) for each in found]
    current = next(each for each in found if each.candidate == now)
    ranked = sorted(found, key=lambda each: -each.effective_rate)
    chosen = choose(ranked, order)
    gains = tuple(upgrades(spec, chosen, iterations, seed, progress))
    why = tuple(reasons(spec, current, ranked, chosen, optimizer))
    return Advice(spec, current, tuple(ranked), chosen, why, gains)


def choose(ranked: Sequence[Estimate], order: Sequence[Candidate]) -> Estimate:
    """Return the estimate to advise.

    Of the candidates that learn about as fast as the fastest, the one with the least staleness is chosen; of those,
    the first in order. A small gain in speed does not justify more staleness.
    """
    near = [each for each in ranked if each.effective_rate >= ranked[0].effective_rate / (1 + NEAR)]
    place = {candidate: number for number, candidate in enumerate(order)}
    return min(near, key=lambda each: (round(each.mean_staleness, 1), place.get(each.candidate, len(place))))


def reasons(
    spec: ClusterSpec,
    now: Estimate,
    ranked: Sequence[Estimate],
    chosen: Estimate,
    optimizer: OptimizerSpec | None = None,
) -> list[str]:
    """Return the reasons for a choice, as sentences with the figures of this cluster."""
    found = [_compute_share(spec, now)]
    if has_unequal_workers(spec):
        found.append(_cost_of_barriers(spec))
    elif wait := _cost_of_jitter(chosen.candidate.on(spec)):
        found.append(wait)
    found += _merits(spec, ranked, chosen)
    quickest = max(ranked, key=lambda each: each.samples_per_second)
    more = quickest.samples_per_second / chosen.samples_per_second - 1
    if quickest.price > chosen.price and more > NEAR:
        found.append(
            f"{quickest.candidate.name} would process {more:.0%} more samples a second, but because of its staleness "
            f"of {quickest.mean_staleness:.1f} it needs about {quickest.price / chosen.price - 1:.0%} more of them."
        )
    if ranked[0] is not chosen:
        found.append(_why_not_the_fastest(ranked[0], chosen))
    elif len(ranked) > 1:
        behind = 1 - ranked[1].effective_rate / chosen.effective_rate
        slower = "about as fast" if behind < 0.005 else f"{behind:.0%} slower"
        verb = "be" if chosen.candidate.local_steps > 1 else "learn"
        found.append(f"The next best is {ranked[1].candidate.name}: it would {verb} {slower}.")
    if chosen.candidate.policy == DILOCO:
        found.append(_in_paceline(ranked, chosen))
    elif chosen.candidate.local_steps > 1:
        found.append(_own_optimizers(chosen.candidate))
    elif chosen.candidate.policy != DDP:
        found.append(_learning_rate(chosen.candidate, optimizer))
    if any(each.candidate.local_steps > 1 for each in ranked):
        found.append(TIME_ALONE)
    return found


def _compute_share(spec: ClusterSpec, now: Estimate) -> str:
    capacity = _capacity(spec)
    share = min(1.0, now.samples_per_second / capacity)
    most = capacity / now.samples_per_second - 1
    computing = f"Computing takes {share:.0%} of the time under {now.candidate.name}"
    if most < LITTLE:
        return f"{computing}: no policy gains more than {max(0.0, most):.0%}."
    return f"{computing}; network transfers and waiting take the rest."


def _cost_of_barriers(spec: ClusterSpec) -> str:
    times = [worker.compute_seconds() for worker in spec.workers]
    at_a_barrier = sum(worker.batch for worker in spec.workers) / max(times)
    return (
        f"The slowest worker computes {max(times) / min(times):.1f} times as long as the fastest, and at a barrier all "
        "workers wait for it. Even with an infinitely fast network, a barrier would use "
        f"{at_a_barrier / _capacity(spec):.0%} of what the workers can compute."
    )


def _cost_of_jitter(spec: ClusterSpec) -> str | None:
    """Return what chance costs at a barrier of equal workers. None if it is little."""
    alone = spec.round_seconds(spec.workers[0])
    slowest = slowest_compute(spec, CHANCES)
    if slowest < (1 + LITTLE) * alone:
        return None
    return (
        f"Compute times vary, so at a barrier or in all-reduce the slowest of {len(spec.workers)} workers sets the "
        f"pace: {duration(slowest)} of computing in an iteration instead of {duration(alone)}."
    )


def _merits(spec: ClusterSpec, ranked: Sequence[Estimate], chosen: Estimate) -> list[str]:
    """Return how the chosen candidate works, and what it does better than others."""
    N, K, candidate = len(spec.workers), spec.servers, chosen.candidate
    if candidate.policy == DDP:
        servers = "one server" if K == 1 else f"{K} servers"
        return [
            f"All-reduce sends {2 * (N - 1) / N:.2g} times the model over each link in an iteration, without staleness "
            f"and without a server. Through {servers} it would be {N / K:.2g} times the model in each direction."
        ]
    if candidate.policy == DILOCO:
        return [_merit_of_diloco(spec, candidate)]
    what = "an update" if candidate.updates else "the model"
    found = [sentence for key, sentence in HOW.items() if key in candidate.policy][:1]
    if candidate.local_steps > 1 and found == [HOW["bsp"]]:
        begin = "" if "/" in candidate.updates else ": all workers begin a round with the same model"
        found = [f"A barrier has no staleness{begin}."]
    if "tune_batches=true" in candidate.policy:
        found.append("With tuned batches, a fast worker computes more samples in an iteration instead of waiting.")
    if candidate.colocated:
        found.append(
            f"A server beside each worker spreads the traffic over {N} links instead of {K}: each carries "
            f"{2 * (N - 1) / N:.2g} times {what} in an iteration and direction. The link of a separate server would "
            f"carry {N / K:.2g} times {what}."
        )
    if candidate.streamed:
        found.append(
            "When updates are streamed, the first pieces come back while the last are still being pushed, so an "
            "iteration waits for the network once instead of twice."
        )
    if K > 1 and not candidate.colocated:
        found.append(
            f"This assumes {K} servers with a link each. `paceline run --servers {K}` starts all of them on one "
            "machine, where they share its link."
        )
    if candidate.overlap:
        found.append(OVERLAPPED)
    if candidate.local_steps > 1 or candidate.updates:
        found.append(_bytes_sent(candidate.on(spec)))
    plain = replace(candidate, policy="bsp", streamed=False, colocated=False)
    bsp = next((each for each in ranked if each.candidate == plain), None)
    if bsp and bsp.busy and chosen.busy and min(chosen.busy) > (1 + LITTLE) * min(bsp.busy) and max(bsp.busy) > LITTLE:
        found.append(
            f"Under {plain.name}, all workers push and then all pull, so the servers' links are used "
            f"{bsp.busy[0]:.0%} inwards and {bsp.busy[1]:.0%} outwards; under {candidate.name} they are used "
            f"{chosen.busy[0]:.0%} and {chosen.busy[1]:.0%}."
        )
    if chosen.floor_seconds:
        found.append(
            f"Its iteration takes {chosen.iteration_seconds / chosen.floor_seconds:.2f} times the least that these "
            "links and workers allow under any policy."
        )
    return found


def _merit_of_diloco(spec: ClusterSpec, candidate: Candidate) -> str:
    N = len(spec.workers)
    sent = (
        f"All-reduce once in {candidate.local_steps} steps sends {2 * (N - 1) / N:.2g} times the model over each link "
        "then, in float32 and without a server."
    )
    return f"{sent} {OVERLAPPED}" if candidate.overlap else sent


def _bytes_sent(spec: ClusterSpec) -> str:
    """Return what workers send with these local steps and updates, in relation to gradients of every step."""
    fewer = spec.local_steps * spec.model_bytes / spec.update_bytes
    sent = f"in {spec.updates}" if spec.updates else "in float32"
    steps = f"{spec.local_steps} steps" if spec.local_steps > 1 else "every step"
    return (
        f"An exchange after {steps}, {sent}, is {spec.update_bytes / 1e6:,.3g} MB in each direction: 1/{fewer:,.0f} "
        "of a float32 gradient and model in every step."
    )


def _in_paceline(ranked: Sequence[Estimate], chosen: Estimate) -> str:
    """Return which of paceline's own candidates is the fastest, if DiLoCo over a ring is chosen."""
    own = next(each for each in ranked if each.candidate.policy not in RINGS)
    ratio = own.effective_rate / chosen.effective_rate - 1
    compared = "as fast" if abs(ratio) < 0.005 else f"{abs(ratio):.1%} {'faster' if ratio > 0 else 'slower'}"
    return (
        "DiLoCo over a ring is a rival that paceline does not run; torchft does. Of paceline's own schemes, "
        f"{own.candidate.name} is the fastest: it is {compared}."
    )


def _own_optimizers(chosen: Candidate) -> str:
    """Return what local steps change in the script."""
    arguments = f"local_steps={chosen.local_steps}" + (", overlap=True" if chosen.overlap else "")
    return (
        f"Pass {arguments} to paceline.join in the script. Each worker keeps its optimizer and its learning rate, and "
        "the server averages the differences."
    )


def _learning_rate(chosen: Candidate, optimizer: OptimizerSpec | None) -> str:
    """Return what becomes of the learning rate under a policy, in a real job and thus with weights=mean."""
    if "bsp" in chosen.policy or optimizer is None or optimizer.name == "SGD":
        return "Your learning rate can stay: one round of updates moves the model as far as one step of ddp."
    return (
        f"{optimizer.name} makes a step of full length for each update, so begin with a learning rate that is divided "
        "by the number of workers, or of groups."
    )


def _why_not_the_fastest(fastest: Estimate, chosen: Estimate) -> str:
    ahead = fastest.effective_rate / chosen.effective_rate - 1
    if round(fastest.mean_staleness, 1) > round(chosen.mean_staleness, 1):
        drawback = f"with a staleness of {fastest.mean_staleness:.1f} instead of {chosen.mean_staleness:.1f}"
    elif fastest.max_staleness > chosen.max_staleness:
        drawback = f"with a staleness of up to {fastest.max_staleness} instead of {chosen.max_staleness}"
    elif fastest.candidate.local_steps > chosen.candidate.local_steps:
        drawback = f"with {fastest.candidate.local_steps} local steps instead of {chosen.candidate.local_steps}"
    else:
        drawback = "with a less simple set-up"
    return (
        f"{fastest.candidate.name} would be {ahead:.1%} faster, {drawback}. A gain of less than {NEAR:.0%} is not "
        "worth it."
    )


def _capacity(spec: ClusterSpec) -> float:
    """Return the samples per second that the workers can compute."""
    return sum(worker.batch / worker.compute_seconds() for worker in spec.workers)


def upgrades(
    spec: ClusterSpec, chosen: Estimate, iterations: int, seed: int, progress: Progress | None = None
) -> list[str]:
    """Return what faster hardware would gain under the chosen candidate, as sentences."""
    changes = {
        "Links twice as fast": replace(
            spec,
            server_link=2 * spec.server_link,
            workers=tuple(replace(worker, link=2 * worker.link) for worker in spec.workers),
        ),
        "Machines that compute twice as fast": replace(
            spec,
            workers=tuple(
                replace(worker, overhead=worker.overhead / 2, samples_per_second=2 * worker.samples_per_second)
                for worker in spec.workers
            ),
        ),
    }
    if not chosen.candidate.colocated and chosen.candidate.policy not in RINGS:
        changes["Twice as many servers"] = replace(spec, servers=2 * spec.servers)
    found = []
    for change, better in changes.items():
        then = estimate(better, chosen.candidate, iterations, seed, _progress_of(progress, change))
        gain = then.samples_per_second / chosen.samples_per_second - 1
        found.append(f"{change} would gain {max(0.0, gain):.0%}.")
    return found


def _progress_of(progress: Progress | None, name: str) -> Callable[[float], None] | None:
    return None if progress is None else lambda part: progress(name, part)
