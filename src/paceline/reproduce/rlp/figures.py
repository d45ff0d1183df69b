"""RLP (ICLR 2020): where staleness costs anything, and what a learned policy makes of that."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np

from paceline.model.optimizer import OptimizerSpec
from paceline.observe.observer import Observer
from paceline.policies import Policy, Update, make
from paceline.policies.contract import Decisions
from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import TITLES, Figure, Plot, PlotLine, Row
from paceline.rlp.evaluate import FIXED, Times, best_fixed, interval, judged, ratios
from paceline.rlp.instance import Instance, drawn, unseen
from paceline.simulate.cluster_spec import ClusterSpec
from paceline.simulate.task import Goal, Task
from paceline.simulate.training import train
from paceline.workloads.data import Data, load

NAMES = {
    "bsp": "BSP",
    "asp": "ASP",
    "ssp:staleness=2": "SSP(2)",
    "ssp:staleness=5": "SSP(5)",
    "ssp:staleness=8": "SSP(8)",
    "dssp": "DSSP",
    "r2sp": "R²SP",
    "rlp": "RLP",
}
#: Table 1: the workers' step times, and what came of them.
STEPS = (9.17, 10.103, 4.37, 4.47, 4.57, 15.39, 22.189, 5.31, 4.97, 5.07)
TABLE_1: dict[str, tuple[tuple[int, ...], int, float, float]] = {
    "bsp": ((28,) * 10, 279, 54.24, 0.0),
    "asp": ((52, 47, 100, 93, 87, 31, 21, 91, 70, 67), 569, 0.0, 0.0),
    "ssp:staleness=2": ((26, 26, 26, 26, 26, 25, 19, 26, 26, 26), 252, 43.5, 0.0),
    "rlp": ((34, 28, 53, 51, 51, 19, 14, 54, 38, 38), 380, 8.1, 1.4),
}
RATES = (0.003, 0.01, 0.03, 0.1)
MOMENTA = (0.0, 0.5, 0.9)
MAPPED = ("bsp", "asp", "ssp:staleness=2", "dssp", "r2sp")
NO_MNIST = "It needs MNIST: give the folder where it lies with --data."


# Clusters


Sleeps = tuple[tuple[float, float, float], ...]


def stragglers(seed: int, workers: int = 10, how_many: int | None = None) -> tuple[tuple[float, ...], Sleeps]:
    """Steps and sleeps as the paper has them: each worker, with probability 0.3, sleeps for a normal time.

    How long, it does not say; table 1's stragglers take two to five times as long as the others.
    """
    chance = random.Random(f"stragglers {seed}")
    steps = tuple(chance.uniform(0.95, 1.05) for _ in range(workers))
    chosen = [chance.random() < 0.3 for _ in range(workers)]
    if how_many is not None:
        slow = set(chance.sample(range(workers), how_many))
        chosen = [worker in slow for worker in range(workers)]
    means = [chance.uniform(1.0, 3.5) for _ in range(workers)]
    sleeps = tuple((1.0, mu, mu / 4) if slow else (0.0, 0.0, 0.0) for slow, mu in zip(chosen, means, strict=True))
    return steps, sleeps


def paper_like(seed: int, workers: int = 10, hidden: int | None = None, how_many: int | None = None) -> Instance:
    """An instance as the paper describes it: learning rate 0.01, no momentum."""
    steps, sleeps = stragglers(seed, workers, how_many)
    depth = random.Random(f"depth {seed}").choice((0, 1, 2, 3)) if hidden is None else hidden
    return Instance(500_000 + seed, steps, sleeps, depth)


def severe(kind: str) -> tuple[tuple[float, ...], Sleeps]:
    """The clusters of the map, from the gentlest to the most severe."""
    calm = (1.0, 0.1, 0.05)
    steps = tuple(0.9 + 0.02 * worker for worker in range(10))
    sometimes = {"sleep 1 in 3 of 10 steps": 1.0, "sleep 4 in 3 of 10 steps": 4.0}
    if kind in sometimes:
        return steps, ((0.3, sometimes[kind], sometimes[kind] / 3),) * 10
    if kind == "table 1":
        return tuple(0.75 * step / 5 for step in STEPS), tuple((0.3, step / 6, step / 18) for step in STEPS)
    sleep = {"even": 0.1, "3 of 10 sleep 1": 1.0, "3 of 10 sleep 4": 4.0}[kind]
    return steps, tuple((1.0, sleep, sleep / 4) if worker in (2, 5, 8) else calm for worker in range(10))


SEVERITIES = (
    *("even", "sleep 1 in 3 of 10 steps", "3 of 10 sleep 1", "sleep 4 in 3 of 10 steps", "3 of 10 sleep 4", "table 1"),
)


# The figures


def regimes(ask: Request) -> Figure:
    """Updates and time to the target over learning rate, stragglers and momentum."""
    if ask.lacks("mnist"):
        return Figure("map", "Where staleness costs anything", (), missing=(NO_MNIST,))
    rates, momenta = (RATES[1:3], MOMENTA[::2]) if ask.quick else (RATES, MOMENTA)
    severities = ("even", "table 1") if ask.quick else SEVERITIES
    seeds = _seeds(ask)
    cases = [(m, kind, rate) for m in momenta for kind in severities for rate in rates]
    instances = [
        Instance(700_000 + at, *severe(kind), 1, rate=rate, momentum=m, budget=600 if ask.quick else 1500)
        for at, (m, kind, rate) in enumerate(cases)
    ]
    times = _judged(ask, instances, seeds, MAPPED)
    rows, plots = [], []
    for m in momenta:
        for kind in severities:
            of_case = {rate: cases.index((m, kind, rate)) for rate in rates}
            for spec in MAPPED:
                best = _own_best(times[spec], list(of_case.values()))
                what = f"momentum {m:g}, {kind}: {NAMES[spec]}"
                if best is None:
                    rows.append(_row("map", f"{what}, time at its own best rate", None, None, "steps", ask, NEVER))
                    continue
                note = f"Rate {cases[best][2]:g}; {times[spec].updates[best].mean():.0f} updates."
                seconds = float(times[spec].mean[best])
                rows.append(_row("map", f"{what}, time at its own best rate", None, seconds, "steps", ask, note))
        for what, of in (("updates", _updates), ("time, by the best policy's", _slower)):
            lines = []
            for spec in MAPPED:
                for kind in severities:
                    y = tuple(of(times, spec, cases.index((m, kind, rate))) for rate in rates)
                    lines.append(PlotLine(f"{NAMES[spec]}, {kind}", tuple(f"{rate:g}" for rate in rates), y))
            plots.append(Plot(f"Momentum {m:g}: {what}", "learning rate", "", tuple(lines), "cells"))
    rows += _like_table_1(ask, cases, times)
    return Figure("map", "Where staleness costs anything", tuple(rows), tuple(plots))


def _own_best(times: Times, cases: Sequence[int]) -> int | None:
    reached = [case for case in cases if times.reached[case].all()]
    return min(reached, key=lambda case: float(times.mean[case]), default=None)


def _updates(times: dict[str, Times], spec: str, case: int) -> float | None:
    return float(times[spec].updates[case].mean()) if times[spec].reached[case].mean() > 0.5 else None


def _slower(times: dict[str, Times], spec: str, case: int) -> float | None:
    if times[spec].reached[case].mean() <= 0.5:
        return None
    best = min(float(each.mean[case]) for each in times.values() if each.reached[case].mean() > 0.5)
    return float(times[spec].mean[case]) / best


def _like_table_1(ask: Request, cases: list[tuple[float, str, float]], times: dict[str, Times]) -> list[Row]:
    """Does ASP ever need twice BSP's updates, and BSP less time than ASP?"""
    both = [
        case for case in range(len(cases)) if all(times[spec].reached[case].mean() > 0.5 for spec in ("bsp", "asp"))
    ]
    if not both:
        return []
    more = {case: float(times["asp"].updates[case].mean() / times["bsp"].updates[case].mean()) for case in both}
    most = max(more, key=lambda case: more[case])
    there = f"Momentum {cases[most][0]:g}, {cases[most][1]}, rate {cases[most][2]:g}."
    table = [case for case in both if cases[case][1] == "table 1"]
    rows = [_row("map", "ASP's updates by BSP's, at most", 569 / 279, more[most], "×", ask, there)]
    if table:
        on_it = max(table, key=lambda case: more[case])
        where = f"Momentum {cases[on_it][0]:g}, rate {cases[on_it][2]:g}."
        rows.append(
            _row("map", "ASP's updates by BSP's on table 1's workers, at most", 569 / 279, more[on_it], "×", ask, where)
        )
    sooner = sum(float(times["bsp"].mean[case]) < float(times["asp"].mean[case]) for case in both)
    said = f"Of {len(both)} where both get there; in {len(cases) - len(both)} others one or both do not."
    rows.append(_row("map", "cases where BSP is sooner than ASP", None, float(sooner), "", ask, said))
    return rows


def fig2(ask: Request) -> Figure:
    """RLP beside BSP, ASP and the best SSP, in the paper's own regime."""
    if ask.lacks("mnist"):
        return Figure("fig2", "Performance comparison", (), missing=(NO_MNIST,))
    count, some = (4, 2) if ask.quick else (100, 20)
    stragglers_in = ((0, 2.0, "no straggler"), (1, 22.0, "one straggler"), (4, 51.0, "several stragglers"))
    instances = [
        *(paper_like(each) for each in range(count)),
        *(paper_like(10_000 * (slow + 1) + each, how_many=slow) for slow, *_ in stragglers_in for each in range(some)),
    ]
    every = _judged(ask, instances, _seeds(ask), (*FIXED[:5], "rlp"))
    times = {spec: each.of(range(count)) for spec, each in every.items()}
    rows = [
        _row("fig2", f"(a) RLP, times as fast as {name}", paper, _faster(times, which), "×", ask)
        for name, paper, which in (("BSP", 1.56, "bsp"), ("ASP", 1.86, "asp"), ("the best SSP", 1.44, "ssp"))
    ]
    for hidden, paper in ((0, 48.0), (3, 43.0)):
        deep = [at for at in range(count) if paper_like(at).hidden == hidden]
        if deep:
            rows.append(
                _row("fig2", f"(b) DNN-{hidden}: less time than the best other", paper, _less(times, deep), "%", ask)
            )
    for at, (_, paper, name) in enumerate(stragglers_in):
        those = range(count + some * at, count + some * (at + 1))
        rows.append(_row("fig2", f"(c) {name}: less time than the best other", paper, _less(every, those), "%", ask))
    return Figure("fig2", "Performance comparison in the paper's regime", tuple(rows))


def fig3(ask: Request) -> Figure:
    """Unseen numbers of workers, a deeper network, another data set, and both together."""
    if ask.lacks("mnist"):
        return Figure("fig3", "Generalization", (), missing=(NO_MNIST,))
    missing = [] if not ask.lacks_cifar else ["CIFAR-10 is not there: its rows are left out."]
    count = 2 if ask.quick else 20
    cases: list[tuple[str, float | None, int, int, str]] = [
        *((f"{workers} workers", None, workers, 1, "mnist") for workers in (2, 5, 8, 20)),
        ("6 hidden layers", 33.0, 10, 6, "mnist"),
    ]
    if not missing:
        papers = {2: 69.0, 5: 19.0, 8: 20.0}
        cases.append(("CIFAR-10", 22.0, 10, 1, "cifar10"))
        cases += [
            (f"{workers} workers, 6 hidden layers, CIFAR-10", papers.get(workers), workers, 6, "cifar10")
            for workers in ((2,) if ask.quick else (2, 5, 8, 20))
        ]
    elsewhere = [
        _elsewhere(800_000 + 1000 * at + each, workers, hidden, dataset)
        for at, (_, _, workers, hidden, dataset) in enumerate(cases)
        for each in range(count)
    ]
    seeds = min(8, _seeds(ask))  # instances differ more than chances do, and six layers take long
    found = _judged(ask, elsewhere, seeds, (*FIXED, "rlp"))
    rows, worst = [], 0.0
    for at, (what, paper, *_) in enumerate(cases):
        times = {spec: each.of(range(count * at, count * (at + 1))) for spec, each in found.items()}
        ratio = ratios(times)["rlp"]
        worst = max(worst, float(ratio.max()))
        said = f"± {interval(ratio):.2f}; {float(ratio.max()):.2f} at most."
        rows.append(
            _row("fig3", f"{what}: RLP's time by the best fixed policy's", None, float(ratio.mean()), "×", ask, said)
        )
        rows.append(_row("fig3", f"{what}: less time than the best other", paper, _less(times), "%", ask))
    rows.append(_row("fig3", "RLP's time by the best fixed policy's, at most", None, worst, "×", ask))
    return Figure("fig3", "Generalization", tuple(rows), missing=tuple(missing))


def _elsewhere(seed: int, workers: int, hidden: int, dataset: str) -> Instance:
    """An instance of any regime, elsewhere than where was learned."""
    made = drawn(seed, workers, hidden, dataset)
    if dataset == "cifar10":  # what such a network reaches there; its inputs are four times as many
        made = replace(made, target=0.33, rate=made.rate / 4)
    return replace(made, rate=made.rate / 2) if hidden > 3 else made


def hundred(ask: Request) -> Figure:
    """The hundred unseen instances, over all regimes."""
    if ask.lacks("mnist"):
        return Figure("unseen", "A hundred unseen instances", (), missing=(NO_MNIST,))
    times = _judged(ask, unseen()[:6] if ask.quick else unseen(), _seeds(ask), (*FIXED, "rlp"))
    ratio, best = ratios(times), Counter(best_fixed(times))
    rows = [
        _row(
            "unseen",
            f"{NAMES[spec]}: time by the best fixed policy's",
            None,
            float(each.mean()),
            "×",
            ask,
            f"± {interval(each):.2f}; {float(each.max()):.2f} at most; {times[spec].reached.mean():.0%} got there.",
        )
        for spec, each in ratio.items()
    ]
    rows += [
        _row("unseen", f"{NAMES[spec]}: the best fixed policy of so many", None, float(best[spec]), "", ask)
        for spec in FIXED
    ]
    least = min(float(ratio[spec].mean()) for spec in FIXED) / float(ratio["rlp"].mean())
    rows.append(_row("unseen", "the best single fixed policy's mean by RLP's", None, least, "×", ask))
    line = PlotLine(
        "mean ratio", tuple(NAMES[spec] for spec in ratio), tuple(float(each.mean()) for each in ratio.values())
    )
    plot = Plot("Time by that of the best fixed policy for each instance", "", "×", (line,), "bars")
    return Figure("unseen", "A hundred unseen instances", tuple(rows), (plot,))


def table1(ask: Request) -> Figure:
    """Iterations of each worker, idle time, and what deciding costs."""
    data, missing = _any_data(ask)
    rows: list[Row] = []
    for spec, (each, total, idle, inference) in TABLE_1.items():
        run = _executed(spec, data, ask.quick)
        name = NAMES[spec]
        steps = [run.steps.get(worker, 0) for worker in range(10)]
        rows.append(_row("table1", f"{name}: iterations", total, float(run.updates), "", ask, run.note))
        rows.append(_row("table1", f"{name}: idle time", idle, 100 * run.idle, "%", ask))
        rows.append(_row("table1", f"{name}: of each worker", _listed(each), _listed(steps), "", ask))
        rows.append(_row("table1", f"{name}: inference time", inference, 100 * run.deciding, "%", ask))
    return Figure("table1", "What each policy did", tuple(rows), missing=missing)


def fig4(ask: Request) -> Figure:
    """When each worker computed."""
    data, missing = _any_data(ask)
    plots, rows = [], []
    for spec in TABLE_1:
        run = _executed(spec, data, ask.quick)
        shown = [span for span in run.spans if span[1] < 120]
        lines = tuple(
            PlotLine(
                f"W{worker + 1}",
                tuple(edge for who, began, ended in shown if who == worker for edge in (began, ended)),
                tuple(float(worker + 1) for who, *_ in shown if who == worker for _ in range(2)),
            )
            for worker in range(10)
        )
        plots.append(Plot(f"{NAMES[spec]}: who computes when", "time", "worker", lines, "spans"))
        rows.append(_row("fig4", f"{NAMES[spec]}: time to {run.goal}", None, run.seconds, "", ask, run.note))
    return Figure("fig4", "The execution of each policy", tuple(rows), tuple(plots), missing)


# What they are made of


class _WatchedTraining(Observer):
    """Watches one training."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, float, float]] = []
        self.steps: dict[int, int] = {}
        self.updates, self.seconds, self.deciding = 0, 0.0, 0.0
        self.note = self.goal = ""
        self._since: dict[int, float] = {}

    def pulled(self, time: float, worker: int, version: int) -> None:
        self._since[worker] = time

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        self.spans.append((worker, self._since.pop(worker), time))
        self.steps[worker] = self.steps.get(worker, 0) + 1
        self.updates, self.seconds = self.updates + 1, time

    @property
    def idle(self) -> float:
        """Share of the workers' time; until the end, whoever computes then."""
        busy = sum(ended - began for _, began, ended in self.spans)
        busy += sum(self.seconds - began for began in self._since.values())
        return 1 - busy / (10 * self.seconds)


def _timed(policy: Policy) -> list[float]:
    """How long each of its decisions takes, from now on."""
    spent: list[float] = []
    decide = policy.arrived

    def arrived(update: Update, now: float) -> Decisions:
        began = time.perf_counter()
        decisions = decide(update, now)
        spent.append(time.perf_counter() - began)
        return decisions

    policy.arrived = arrived  # type: ignore[method-assign]
    return spent


@cache
def _executed(spec: str, data: Data, quick: bool) -> _WatchedTraining:
    """Train on table 1's workers until the target."""
    _, sleeps = severe("table 1")
    instance = Instance(1, tuple(0.75 * step for step in STEPS), tuple((p, 5 * mu, 5 * d) for p, mu, d in sleeps), 1)
    watch, policy = _WatchedTraining(), make(spec)
    spent = _timed(policy)
    goal = Goal("accuracy", 0.88, every=1)
    task = Task("dnn1", data, OptimizerSpec("SGD", ({"lr": instance.rate},)), 1)
    spec_of: ClusterSpec = instance.cluster()
    began = time.perf_counter()
    outcome = train(spec_of, policy, task, goal, rounds=20 if quick else 150, observer=watch)
    watch.deciding = sum(spent) / (time.perf_counter() - began) if spec == "rlp" else 0.0
    watch.goal = f"accuracy {goal.value:g}"
    watch.note = (
        f"On {data.name}." if outcome.reached else f"On {data.name}; not reached, {outcome.best or 0:.2f} at best."
    )
    return watch


def _any_data(ask: Request) -> tuple[Data, tuple[str, ...]]:
    if ask.lacks("mnist"):
        return load("digits"), ("MNIST is not there: digits take its place.",)
    return load("mnist", ask.folder), ()


def _judged(ask: Request, instances: Sequence[Instance], seeds: int, specs: Sequence[str]) -> dict[str, Times]:
    if ask.quick:
        instances = [replace(each, budget=min(each.budget, 400)) for each in instances]
    jobs = 1 if ask.quick else ask.runs.jobs
    return judged(instances, seeds, specs, lambda name: _loaded(name, ask), ask.device, ask.runs.said, jobs)


def _seeds(ask: Request) -> int:
    """Of each instance: chance changes a time by 15%, and on a CPU a hundred instances take hours as it is."""
    return 1 if ask.quick else 20 if ask.where == "gpu" else 5


def _loaded(name: str, ask: Request) -> Data:
    return _cached(name, str(ask.folder) if ask.folder else "")


@cache
def _cached(name: str, folder: str) -> Data:
    return load(name, Path(folder) if folder else None)


def _faster(times: dict[str, Times], which: str) -> float:
    """How many times as long the others take as RLP, on average; of several, the best for each instance."""
    others = np.min([times[spec].mean for spec in times if spec.startswith(which)], axis=0)
    return float((others / times["rlp"].mean).mean())


def _less(times: dict[str, Times], some: Sequence[int] | None = None) -> float:
    """How much less time than the best other policy on average, as the paper has it: that takes so much longer."""
    at = list(range(len(times["rlp"].mean))) if some is None else list(some)
    others = [mean(times[spec].mean[at].tolist()) for spec in times if spec != "rlp"]
    return 100 * (float(min(others)) / float(mean(times["rlp"].mean[at].tolist())) - 1)


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{each:g}" for each in values)


def _row(
    id: str, what: str, paper: float | str | None, ours: float | str | None, unit: str, ask: Request, note: str = ""
) -> Row:
    short = float(f"{ours:.4g}") if isinstance(ours, float) else ours
    return Row(id, what, round(paper, 2) if isinstance(paper, float) else paper, short, unit, ask.where, note)


NEVER = "Not reached at any rate."
PAPER = Paper(
    "rlp",
    TITLES["rlp"],
    (
        PaperFigure("map", "Where staleness costs anything", regimes),
        PaperFigure("unseen", "A hundred unseen instances", hundred),
        PaperFigure("fig2", "Performance comparison in the paper's regime", fig2),
        PaperFigure("fig3", "Generalization", fig3),
        PaperFigure("fig4", "The execution of each policy", fig4),
        PaperFigure("table1", "What each policy did", table1),
    ),
)
