"""BERT and T5-small with four of eight workers held up (R²SP, journal version, fig. 14)."""

from __future__ import annotations

import importlib.util

from paceline.reproduce.ask import Ask
from paceline.reproduce.compare import Measured, Scheme, at_own_best
from paceline.reproduce.rows import Figure, Line, Plot, Row
from paceline.reproduce.runs import Run
from paceline.simulate.task import Goal

#: Adam has momentum, so R²SP's staleness is corrected for, as it is by default.
TUNED = Scheme("r2sp:tune_batches=true", "full")
SCHEMES = (*map(Scheme, ("bsp", "asp", "ssp:staleness=5", "safa")), Scheme("r2sp", "full"), TUNED)
SYNTHETIC = (
    "QNLI and wmt16 are not to be had: BERT learns to classify made-up sequences, T5 to rewrite them, "
    "both from random weights."
)
RATES = (3e-4, 1e-3, 1e-4)


def fig14(ask: Ask) -> Figure:
    """Hardware, statistical and overall efficiency, normalized by BSP, each scheme at its own best rate (Adam)."""
    title = "Transformers: BERT and T5-small, four of eight workers held up"
    if importlib.util.find_spec("transformers") is None:
        why = "BERT and T5 were not trained: install them with pip install 'paceline[transformers]'."
        return Figure("fig14", title, (), (), (why,))
    tiny = not ask.device.startswith("cuda")
    rows: list[Row] = []
    plots: list[Plot] = []
    missing = [SYNTHETIC]
    if tiny:
        missing.append("Without --device cuda BERT and T5-small are trained in tiny versions.")
    for name, cluster, network, data, target, paper in (
        ("BERT", "r2sp-nlp-bert", "bert", "tokens", 0.5, 16.9),
        ("T5-small", "r2sp-nlp-t5", "t5-small", "translation", 2.0, 18.8),
    ):
        which = f"{network.split('-')[0]}-tiny" if tiny else network
        like = Run(
            cluster,
            "bsp",
            which,
            data,
            0.0,
            40 if ask.quick else 120,
            goal=Goal("loss", 0.9 * target),
            optimizer="Adam",
        )
        table = at_own_best(
            ask.runs, like, SCHEMES, RATES[: 1 if ask.quick else None], ask.seeds[:1], Goal("loss", target)
        )
        if len(table) < len(SCHEMES):
            missing.append(f"{name}: not all trainings were done.")
            continue
        base = table[0]
        for each in table:
            what = f"{name} ({which}): {each.scheme.policy}"
            iteration = each.iteration_seconds / base.iteration_seconds
            rows.append(Row("fig14", f"{what}, iteration time", None, round(iteration, 3), "× BSP's", ask.where))
            for part, ours, theirs in (("rounds", each.rounds, base.rounds), ("time", each.seconds, base.seconds)):
                value = None if ours is None or theirs is None else round(ours / theirs, 3)
                note = (
                    f"rate {each.rate:g}"
                    if ours is not None
                    else f"loss {target:g} not reached; the best was {each.best:.3g}"
                )
                rows.append(Row("fig14", f"{what}, {part} to loss {target:g}", None, value, "× BSP's", ask.where, note))
        rows.append(_improvement(name, which, table, paper, ask))
        bars = Line("", tuple(each.scheme.policy for each in table), tuple(each.seconds for each in table))
        plots.append(Plot(f"{name} ({which}): s to loss {target:g}", "", "", (bars,), kind="bars"))
    return Figure("fig14", title, tuple(rows), tuple(plots), tuple(missing))


def _improvement(name: str, which: str, table: list[Measured], paper: float, ask: Ask) -> Row:
    ours = next(each.seconds for each in table if each.scheme == TUNED)
    others = [each.seconds for each in table if each.seconds is not None and not each.scheme.policy.startswith("r2sp")]
    value = None if ours is None or not others else round(100 * (1 - ours / min(others)), 1)
    what = f"{name} ({which}): R²SP with tuning, against the second best"
    return Row("fig14", what, paper, value, "% less time", ask.where)
