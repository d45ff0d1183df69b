"""BERT and T5-small with four of eight workers delayed (R²SP, journal version, fig. 14)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paceline.reproduce.shared.compare import Scheme, SchemeResult, at_own_best
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row
from paceline.reproduce.shared.runs import Run
from paceline.simulate.task import Goal

#: Adam has momentum, so R²SP runs with staleness correction, as it does by default.
TUNED = Scheme("r2sp:tune_batches=true", "full")
SCHEMES = (*map(Scheme, ("bsp", "asp", "ssp:staleness=5", "safa")), Scheme("r2sp", "full"), TUNED)
ROUNDS = 100
SYNTHETIC = (
    "QNLI and wmt16 are not available. BERT learns to classify synthetic sequences and T5 to rewrite them, both from "
    "random weights."
)


@dataclass(frozen=True)
class LanguageCase:
    """A language model on its cluster."""

    name: str
    cluster: str
    network: str
    data: str
    rates: tuple[float, ...]
    target: float  # loss
    paper: float  # per cent of time saved over the second best scheme

    def template(self, request: Request) -> Run:
        """Return the runs' settings, except the scheme and the rate."""
        stop = Goal("loss", 0.9 * self.target)
        network = self.network if request.where == "gpu" else f"{self.network.split('-')[0]}-tiny"
        rate, precision = self.rates[0], request.precision
        return Run(
            self.cluster, "bsp", network, self.data, rate, ROUNDS, optimizer="Adam", goal=stop, precision=precision
        )


CASES = (
    LanguageCase("BERT", "r2sp-nlp-bert", "bert", "tokens", (3e-5, 1e-5, 3e-6), 0.5, 16.9),
    LanguageCase("T5-small", "r2sp-nlp-t5", "t5-small", "translation", (3e-4, 1e-4, 3e-5), 2.0, 18.8),
)


def fig14(request: Request) -> Figure:
    """Compare hardware, statistical and overall efficiency, each scheme at its own best rate for Adam."""
    rows: list[Row] = []
    plots: list[Plot] = []
    missing: list[str] = []
    for case in CASES:
        rows += _iterations(case, case.template(request))
    if request.quick:
        missing.append("BERT and T5 were not trained (--quick). Only their iteration times were simulated.")
    elif importlib.util.find_spec("transformers") is None:
        missing.append("BERT and T5 were not trained. They need transformers: pip install 'paceline[transformers]'.")
    else:
        missing.append(SYNTHETIC)
        if request.where != "gpu":
            missing.append("Without --device cuda, tiny versions of BERT and T5-small are trained.")
        for case in CASES:
            template, goal = case.template(request), Goal("loss", case.target)
            table = at_own_best(request.runs, template, SCHEMES, case.rates, request.seeds[:1], goal)
            if left_out := [scheme.name for scheme in SCHEMES if scheme not in [each.scheme for each in table]]:
                missing.append(f"{case.name}: left out, because not trained at all rates: {'; '.join(left_out)}.")
            rows += _trained(case, template.network, table, request)
            bars = PlotLine("", tuple(each.scheme.name for each in table), tuple(each.seconds for each in table))
            plots.append(
                Plot(f"{case.name} ({template.network}): s to loss {case.target:g}", "", "", (bars,), kind="bars")
            )
    title = "Transformers: BERT and T5-small, four of eight workers delayed"
    return Figure("fig14", title, tuple(rows), tuple(plots), tuple(missing))


def _iterations(case: LanguageCase, template: Run) -> list[Row]:
    runs = [msgspec.structs.replace(template, policy=scheme.policy) for scheme in SCHEMES]
    seconds = [run.schedule().report.mean_iteration_seconds for run in runs]
    return [
        Row(
            "fig14",
            f"{case.name}: {scheme.name}, iteration time",
            None,
            round(each / seconds[0], 3),
            "× BSP",
            "simulated",
        )
        for scheme, each in zip(SCHEMES, seconds, strict=True)
    ]


def _trained(case: LanguageCase, network: str, table: Sequence[SchemeResult], request: Request) -> list[Row]:
    rows = []
    base = next((each for each in table if each.scheme == SCHEMES[0]), None)
    for each in table:
        what = f"{case.name} ({network}): {each.scheme.name}"
        pairs = (
            ("rounds", each.rounds, base.rounds if base else None),
            ("time", each.seconds, base.seconds if base else None),
        )
        for part, ours, theirs in pairs:
            value = None if ours is None or theirs is None else round(ours / theirs, 3)
            missed = f"loss {case.target:g} not reached; the best was {each.best:.3g}"
            note = missed if ours is None else f"rate {each.rate:g}"
            to = f"{what}, {part} to loss {case.target:g}"
            rows.append(Row("fig14", to, None, value, "× BSP", request.where, note))
    tuned = next((each for each in table if each.scheme == TUNED), None)
    if tuned is None:
        return rows
    others = [each.seconds for each in table if each.seconds is not None and not each.scheme.policy.startswith("r2sp")]
    value = None if tuned.seconds is None or not others else round(100 * (1 - tuned.seconds / min(others)), 1)
    what = f"{case.name} ({network}): R²SP with tuning, time saved over the second best"
    return [*rows, Row("fig14", what, case.paper, value, "%", request.where)]
