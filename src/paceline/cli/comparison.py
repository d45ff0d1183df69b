"""The options of `paceline run` for comparing policies: emulated links, a target for a metric, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from paceline.cli.shared import check_target, errors, need, refuse
from paceline.observe.final_report import FinishedRun, side_by_side
from paceline.observe.metric_history import Target, verdicts
from paceline.observe.metric_plot import FORMATS, draw_metric
from paceline.simulate import units

LinkOption = Annotated[
    str | None,
    typer.Option("--link", help="Emulate a network: every worker and server has a link of this rate, such as 200Mbit."),
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", help="Show when a metric of session.log reached this value: accuracy=0.97, val_loss<0.1."),
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw a metric of session.log over time to this file (.png, .svg or .pdf)."),
]


def link_rate(text: str | None, hosts: str | None, shards: int) -> float | None:
    """Return the rate of --link in bytes per second, or None if it is left out. Refuse one that cannot be emulated."""
    from paceline.serve.wire.link import check_rate

    if text is None:
        return None
    if hosts:
        refuse("--link emulates links between processes on this machine; leave it out with --hosts.")
    if not shards:
        refuse("--link emulates the links of the servers; with --servers 0 there are none.")
    try:
        rate = units.rate(text)
    except ValueError:
        refuse(f"--link must be a rate, such as 200Mbit or 25MB/s; got {text!r}.")
    try:
        check_rate(rate)
    except ValueError as error:
        refuse(f"--link {text}: {error}")
    return rate


def target_of(text: str | None) -> Target | None:
    """Return the target that --target describes. Refuse a text that is none."""
    if text is None:
        return None
    try:
        return Target.parse(text)
    except ValueError:
        refuse(f"--target must be a metric and its value, such as accuracy=0.97 or val_loss<0.1; got {text!r}.")


def check_plot(path: Path | None) -> None:
    """Refuse a plot that cannot be drawn or written."""
    if path is None:
        return
    need("matplotlib", "--plot", "plot")
    if path.suffix not in FORMATS:
        refuse(f"--plot: {str(path)!r} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    check_target(path, "--plot")


def conclude(
    runs: Sequence[FinishedRun], title: str, target: Target | None, plot: Path | None, *, compares: bool
) -> None:
    """Print the table of a comparison, compare when its runs reached the target, and draw the metric.

    compares: whether several runs were asked for. Fewer may have finished; then the table holds those.
    """
    if not runs:
        return
    console = Console(highlight=False, soft_wrap=True)
    if compares:
        Console(highlight=False).print(side_by_side(runs, title))
        if target and any(run.curves.get(target.metric) for run in runs):
            console.print()
            for sentence in verdicts([(run.policy, run.seconds_to_target) for run in runs], target):
                console.print(Text(sentence))
    if target and not any(run.curves.get(target.metric) for run in runs):
        reported = sorted({metric for run in runs for metric, curve in run.curves.items() if curve})
        instead = f"; reported were: {', '.join(reported)}" if reported else f"; call session.log({target.metric}=…)"
        errors.print(Text(f"No worker has reported {target.metric}{instead}."))
    if plot:
        _draw(runs, title, target, plot)


def _draw(runs: Sequence[FinishedRun], title: str, target: Target | None, path: Path) -> None:
    """Draw the target's metric, or accuracy, or the first metric that was reported."""
    reported = {metric: None for run in runs for metric in run.curves}
    metric = target.metric if target else "accuracy" if "accuracy" in reported else next(iter(reported), "")
    curves = {run.policy: run.curves[metric] for run in runs if metric in run.curves}
    if not curves:
        errors.print(Text(f"{path} was not written: no worker has reported a metric with session.log."))
        return
    draw_metric(curves, metric, target, title, path)
    errors.print(Text(f"Written: {path}"))
