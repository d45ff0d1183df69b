"""`paceline simulate --train`: real gradients in virtual time."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.shared import INTERRUPTED, check_target, errors, need, need_torch, progress_bar, refuse, sentence
from paceline.observe.plots import draw_curves
from paceline.policies import make
from paceline.simulate import ClusterSpec

if TYPE_CHECKING:
    from paceline.simulate.task import Goal, TrainingOutcome


@dataclass(frozen=True)
class Wanted:
    """The training that the user asks for."""

    network: str
    dataset: str
    data: Path | None
    samples: int
    optimizer: str
    settings: dict[str, Any]
    correct: str
    seed: int
    device: str
    precision: str


def train(
    described: ClusterSpec,
    specs: Sequence[str],
    wanted: Wanted,
    loss: float | None,
    accuracy: float | None,
    rounds: int,
    budget: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Train under each policy in turn, and show what each reached."""
    need_torch()
    check_target(plot, "--plot")
    if plot:
        need("matplotlib", "--plot", "plot")
    if loss is not None and accuracy is not None:
        refuse("Give --loss or --accuracy, not both.")
    if loss is not None and loss <= 0:
        refuse(f"--loss must be greater than 0; got {loss:g}.")
    if accuracy is not None and not 0 < accuracy <= 1:
        refuse(f"--accuracy must be greater than 0 and at most 1; got {accuracy:g}.")

    from paceline.simulate.task import Goal, TrainingError, task_of
    from paceline.simulate.training import train as run

    goal = Goal("loss", loss) if loss is not None else Goal("accuracy", accuracy, every=5) if accuracy else None
    try:
        task = task_of(
            wanted.network,
            wanted.dataset,
            wanted.data,
            wanted.samples,
            wanted.optimizer,
            wanted.settings,
            wanted.correct,
            wanted.seed,
            wanted.device,
            wanted.precision,
        )
    except ValueError as error:
        refuse(sentence(error))
    outcomes: list[TrainingOutcome] = []
    with progress_bar(quiet=as_json) as progress:
        for spec in specs:
            bar = progress.add_task(spec, total=rounds)

            def show(outcome: TrainingOutcome, bar: Any = bar, spec: str = spec) -> None:
                now = f"  loss {outcome.curve[-1].loss:.3g}" if outcome.curve else ""
                progress.update(bar, completed=len(outcome.curve), description=spec + now)

            made = make(spec)
            bound = budget or math.inf
            try:
                outcomes.append(run(described, made, task, goal, rounds, bound, name=spec, progress=show))
            except TrainingError as error:
                refuse(str(error))
            if outcomes[-1].ended == "interrupted":
                break
    if as_json:
        setting = asdict(wanted) | {"cluster": described.name, "samples": len(task.data.labels)}
        del setting["data"]
        typer.echo(json.dumps({**setting, "runs": [_as_json(each) for each in outcomes]}, indent=1))
    else:
        _show(outcomes, goal, described.name, wanted.network, wanted.dataset)
    if plot:
        curves = {each.policy: [(point.seconds, point.loss) for point in each.curve] for each in outcomes}
        draw_curves(curves, "virtual seconds", "training loss", plot)
        errors.print(f"Written: {plot}")
    if any(each.ended == "budget" and not each.curve for each in outcomes):
        errors.print(f"No round was finished within {budget:g} virtual seconds; give a larger --budget.")
    if outcomes[-1].ended == "interrupted":
        errors.print("Interrupted. The results so far are shown.")
        sys.exit(INTERRUPTED)


def _show(outcomes: list[TrainingOutcome], goal: Goal | None, cluster: str, network: str, data: str) -> None:
    console = Console(highlight=False)
    table = Table(title=f"{network} on {data}, {cluster}", title_justify="left", box=None, header_style="bold")
    table.add_column("policy", overflow="fold", min_width=10)
    headings = ("s per iteration", "rounds", "loss", "test accuracy", "staleness", *([f"s to {goal}"] if goal else []))
    for heading in headings:
        table.add_column(heading, justify="right")
    for each in outcomes:
        pace = f"{each.report.mean_iteration_seconds:.4g}" if each.report and each.curve else "–"
        cells = [each.policy, pace, f"{len(each.curve)}"]
        cells.append(f"{each.curve[-1].loss:.4g}" if each.curve else "–")
        cells.append(f"{each.tested[1]:.1%}" if each.tested else "–")
        cells.append(f"{each.staleness:.1f}")
        if goal and each.reached:
            cells.append(f"{each.reached.seconds:.4g}")
        elif goal:
            near = "" if each.best is None else f", best {each.best:.3g}"
            cells.append(f"{'diverged' if each.ended == 'diverged' else 'not reached'}{near}")
        table.add_row(*cells)
    console.print()
    console.print(table)
    said = "Seconds are virtual. The loss is the mean over the last round."
    if goal and goal.kind == "loss":
        said += f" A loss counts as reached after {goal.hold} rounds below it."
    console.print(Text(said, style="dim"))


def _as_json(outcome: TrainingOutcome) -> dict[str, Any]:
    """An outcome as JSON values. A loss that is not finite becomes null, since JSON has no NaN."""
    whole = asdict(outcome)
    whole["curve"] = [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in point.items()}
        for point in whole["curve"]
    ]
    return whole
