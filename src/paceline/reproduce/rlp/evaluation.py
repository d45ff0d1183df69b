"""Evaluates policies on instances for the RLP figures, and computes ratios of their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np

from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Row, Value
from paceline.rlp.evaluate import Times, judged
from paceline.rlp.instance import Instance
from paceline.workloads.data import Data, load

#: The paper's SSP, which waits at a lead of s.
LETTER_SSP = tuple(f"ssp:staleness={s},wait=at" for s in (2, 5, 8))
NAMES = {
    "bsp": "BSP",
    "asp": "ASP",
    "ssp:staleness=2": "SSP(2)",
    "ssp:staleness=5": "SSP(5)",
    "ssp:staleness=8": "SSP(8)",
    "dssp": "DSSP",
    "r2sp": "R²SP",
    "rlp": "RLP",
    **{spec: f"SSP, s = {s} as in the paper" for spec, s in zip(LETTER_SSP, (2, 5, 8), strict=True)},
}
NO_MNIST = "This needs MNIST. Name the folder that holds it with --data."


def evaluated(request: Request, instances: Sequence[Instance], seeds: int, specs: Sequence[str]) -> dict[str, Times]:
    """Return the times of every policy on the instances."""
    if request.quick:
        instances = [replace(each, budget=min(each.budget, 400)) for each in instances]
    jobs = 1 if request.quick else request.runs.jobs
    folder = str(request.folder) if request.folder else ""
    progress = request.runs.report_progress
    return judged(instances, seeds, specs, lambda name: _data(name, folder), request.device, progress, jobs)


def seeds_per_instance(request: Request) -> int:
    """Return the seeds per instance. Chance changes a time by 15%, but on a CPU, 100 instances take hours already."""
    return 1 if request.quick else 20 if request.where == "gpu" else 5


def speedup(times: dict[str, Times], prefix: str) -> float:
    """Return RLP's mean speed-up over the policies whose names begin with `prefix`: over the best for each instance."""
    others = np.min([times[spec].mean for spec in times if spec.startswith(prefix)], axis=0)
    return float((others / times["rlp"].mean).mean())


def extra_time_of_best_other(times: dict[str, Times], some: Sequence[int] | None = None) -> float:
    """Return by how many per cent the mean time of the best other policy exceeds RLP's, as the paper computes it.

    some: the instances to compare, by index; None: all.
    """
    at = list(range(len(times["rlp"].mean))) if some is None else list(some)
    others = [mean(times[spec].mean[at].tolist()) for spec in times if spec != "rlp"]
    return 100 * (float(min(others)) / float(mean(times["rlp"].mean[at].tolist())) - 1)


def rlp_row(id: str, what: str, paper: Value, ours: Value, unit: str, request: Request, note: str = "") -> Row:
    """Return a row with two decimals of the paper's value and four significant digits of ours."""
    short = float(f"{ours:.4g}") if isinstance(ours, float) else ours
    return Row(id, what, round(paper, 2) if isinstance(paper, float) else paper, short, unit, request.where, note)


@cache
def _data(name: str, folder: str) -> Data:
    return load(name, Path(folder) if folder else None)
