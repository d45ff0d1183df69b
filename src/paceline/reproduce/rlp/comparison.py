"""RLP against fixed policies: in the paper's regime (fig. 2), and on a hundred unseen instances of all regimes."""

from __future__ import annotations

from collections import Counter

from paceline.reproduce.rlp.clusters import paper_like
from paceline.reproduce.rlp.evaluation import (
    LETTER_SSP,
    NAMES,
    NO_MNIST,
    evaluated,
    extra_time_of_best_other,
    rlp_row,
    seeds_per_instance,
    speedup,
)
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine
from paceline.rlp.evaluate import FIXED, best_fixed, interval, ratios
from paceline.rlp.instance import unseen

#: Figure 2c: the number of stragglers, the paper's per cent, and what the row calls them.
STRAGGLERS = ((0, 2.0, "no straggler"), (1, 22.0, "one straggler"), (4, 51.0, "several stragglers"))


def fig2(request: Request) -> Figure:
    """Compare RLP with BSP, ASP and the best SSP in the paper's own regime."""
    if request.lacks("mnist"):
        return Figure("fig2", "Performance comparison", (), missing=(NO_MNIST,))
    count, some = (4, 2) if request.quick else (100, 20)
    instances = [
        *(paper_like(each) for each in range(count)),
        *(paper_like(10_000 * (slow + 1) + each, how_many=slow) for slow, *_ in STRAGGLERS for each in range(some)),
    ]
    every = evaluated(request, instances, seeds_per_instance(request), ("bsp", "asp", *LETTER_SSP, "rlp"))
    times = {spec: each.of(range(count)) for spec, each in every.items()}
    rows = [
        rlp_row("fig2", f"(a) RLP's speed-up over {name}", paper, speedup(times, prefix), "×", request)
        for name, paper, prefix in (("BSP", 1.56, "bsp"), ("ASP", 1.86, "asp"), ("the best SSP", 1.44, "ssp"))
    ]
    for hidden, paper in ((0, 48.0), (3, 43.0)):
        if deep := [at for at in range(count) if paper_like(at).hidden == hidden]:
            what = f"(b) DNN-{hidden}: extra time of the best other policy"
            rows.append(rlp_row("fig2", what, paper, extra_time_of_best_other(times, deep), "%", request))
    for at, (_, paper, name) in enumerate(STRAGGLERS):
        those = range(count + some * at, count + some * (at + 1))
        what = f"(c) {name}: extra time of the best other policy"
        rows.append(rlp_row("fig2", what, paper, extra_time_of_best_other(every, those), "%", request))
    return Figure("fig2", "Performance comparison in the paper's regime", tuple(rows))


def hundred_unseen(request: Request) -> Figure:
    """Compare every policy with the best fixed policy of each instance, on a hundred unseen instances."""
    if request.lacks("mnist"):
        return Figure("unseen", "A hundred unseen instances", (), missing=(NO_MNIST,))
    instances = unseen()[:6] if request.quick else unseen()
    times = evaluated(request, instances, seeds_per_instance(request), (*FIXED, "rlp"))
    ratio, best = ratios(times), Counter(best_fixed(times))
    rows = []
    for spec, each in ratio.items():
        reached = f"{times[spec].reached.mean():.0%} reached the target"
        note = f"± {interval(each):.2f}; maximum {float(each.max()):.2f}; {reached}."
        what = f"{NAMES[spec]}: time relative to the best fixed policy"
        rows.append(rlp_row("unseen", what, None, float(each.mean()), "×", request, note))
    for spec in FIXED:
        what = f"{NAMES[spec]}: instances where it is the best fixed policy"
        rows.append(rlp_row("unseen", what, None, float(best[spec]), "", request))
    least = min(float(ratio[spec].mean()) for spec in FIXED) / float(ratio["rlp"].mean())
    what = "mean of the best single fixed policy, relative to RLP's"
    rows.append(rlp_row("unseen", what, None, least, "×", request))
    names, means = tuple(NAMES[spec] for spec in ratio), tuple(float(each.mean()) for each in ratio.values())
    plot = Plot("Time relative to the best fixed policy", "", "×", (PlotLine("mean ratio", names, means),), "bars")
    return Figure("unseen", "A hundred unseen instances", tuple(rows), (plot,))
