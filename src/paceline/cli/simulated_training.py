"""`paceline learn`: real training on a simulated cluster."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.shared import check_target, errors, refuse
from paceline.cli.simulate import JitterOption, cluster_named, progress_bar
from paceline.observe.plots import draw_curves
from paceline.policies import make, split_list

if TYPE_CHECKING:
    from paceline.simulate.task import Goal, TrainingOutcome

INTERRUPTED = 130


def learn(
    cluster: Annotated[str, typer.Argument(help="A built-in cluster (see `paceline clusters`) or a TOML file.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="Policies with options, separated by commas; may be repeated."),
    ] = None,
    network: Annotated[str, typer.Option(help="mlp, cnn, lstm, alexnet-small, alexnet, vgg16, resnet20, …")] = "mlp",
    dataset: Annotated[str, typer.Option(help="digits (bundled), mnist, fashion-mnist, cifar10, cifar100.")] = "digits",
    data: Annotated[Path | None, typer.Option(help="The folder where data sets lie; else $PACELINE_DATA.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Train on so many only; 0: on all.")] = 0,
    optimizer: Annotated[str, typer.Option(help="SGD, Adam, AdamW, or another of torch.optim.")] = "SGD",
    rate: Annotated[float, typer.Option(min=0, help="The learning rate of one update.")] = 0.01,
    momentum: Annotated[float, typer.Option(min=0, max=1, help="Of SGD.")] = 0.0,
    nesterov: Annotated[bool, typer.Option("--nesterov", help="Nesterov's momentum.")] = False,
    correct: Annotated[str, typer.Option(help="Of staleness: auto, none, predict, round or full.")] = "auto",
    loss: Annotated[
        float | None, typer.Option(help="Stop when the training loss has been this low for 10 rounds.")
    ] = None,
    accuracy: Annotated[float | None, typer.Option(help="Stop at this accuracy on the test set, from 0 to 1.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="At most: updates of each worker, on average.")] = 100,
    budget: Annotated[float, typer.Option(min=0, help="At most so many virtual seconds; 0: no bound.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    jitter: JitterOption = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str, typer.Option(help="Of the gradients: float32 or, on cuda, bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw loss over virtual time to this PNG file.")] = None,
) -> None:
    """Train a network on a simulated cluster: virtual time outside, real gradients inside."""
    if importlib.util.find_spec("torch") is None:
        refuse("Training needs PyTorch: pip install 'paceline[torch]'.")
    specs = split_list(policy or ["bsp,asp,r2sp"])
    for spec in specs:
        make(spec)
    described = cluster_named(cluster, "whole", False, jitter)
    check_target(plot, "--plot")
    if plot and importlib.util.find_spec("matplotlib") is None:
        refuse("--plot needs matplotlib: pip install 'paceline[plot]'.")
    if loss is not None and accuracy is not None:
        refuse("Give --loss or --accuracy, not both.")
    if loss is not None and loss <= 0:
        refuse(f"--loss is a cross-entropy greater than 0, not {loss:g}.")
    if accuracy is not None and not 0 < accuracy <= 1:
        refuse(f"--accuracy is a share of the test set, greater than 0 and at most 1, not {accuracy:g}.")
    settings: dict[str, Any] = {"lr": rate}
    if momentum:
        settings["momentum"] = momentum
    if nesterov:
        settings["nesterov"] = True

    from paceline.simulate.task import Goal, TrainingError, task_of
    from paceline.simulate.training import train

    goal = Goal("loss", loss) if loss is not None else Goal("accuracy", accuracy, every=5) if accuracy else None
    try:
        task = task_of(network, dataset, data, samples, optimizer, settings, correct, seed, device, precision)
    except ValueError as error:
        refuse(str(error) if str(error).endswith(".") else f"{error}.")
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
                outcomes.append(train(described, made, task, goal, rounds, bound, name=spec, progress=show))
            except TrainingError as error:
                refuse(str(error))
            if outcomes[-1].ended == "interrupted":
                break
    if as_json:
        what = {"cluster": described.name, "network": network, "dataset": dataset, "samples": len(task.data.labels)}
        what |= {"optimizer": optimizer, "settings": settings, "correct": correct, "seed": seed}
        what |= {"device": device, "precision": precision}
        typer.echo(json.dumps({**what, "runs": [_as_json(each) for each in outcomes]}, indent=1))
    else:
        _show(outcomes, goal, described.name, network, dataset)
    if plot:
        curves = {each.policy: [(point.seconds, point.loss) for point in each.curve] for each in outcomes}
        draw_curves(curves, "virtual seconds", "training loss", plot)
        errors.print(f"Written: {plot}")
    if any(each.ended == "budget" and not each.curve for each in outcomes):
        errors.print(f"In {budget:g} virtual seconds not one round was over; give a larger --budget.")
    if outcomes[-1].ended == "interrupted":
        errors.print("Interrupted: this is how far it came.")
        sys.exit(INTERRUPTED)


def _show(outcomes: list[TrainingOutcome], goal: Goal | None, cluster: str, network: str, data: str) -> None:
    console = Console(highlight=False)
    table = Table(title=f"{network} on {data}, {cluster}", title_justify="left", box=None, header_style="bold")
    table.add_column("policy", overflow="fold", min_width=10)
    headings = ("s an iteration", "rounds", "loss", "test accuracy", "staleness", *([f"s to {goal}"] if goal else []))
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
    said = "Seconds are the simulated cluster's; the loss is the mean of the last round's."
    if goal and goal.kind == "loss":
        said += f" A loss is reached when it has been that low for {goal.hold} rounds."
    console.print(Text(said, style="dim"))


def _as_json(outcome: TrainingOutcome) -> dict[str, Any]:
    """A loss that is no number any more is null: JSON has no word for it."""
    whole = asdict(outcome)
    whole["curve"] = [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in point.items()}
        for point in whole["curve"]
    ]
    return whole
