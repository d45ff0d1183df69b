"""`paceline simulate`: policies on a simulated cluster, with or without real training."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import tempfile
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from paceline.cli import round_figures, simulated_training
from paceline.cli.job_checks import check_described_updates, note_effects
from paceline.cli.options import Apply, AsJson, ClusterName, Colocate, JitterOption, PolicyList, Replicas, Seed
from paceline.cli.page import PageOption, SpeedOption, page_place, show_recorded
from paceline.cli.shared import check_target, errors, need, opened, progress_bar, refuse, unfinished, write_event
from paceline.observe.observer import Observer, Recorder, Tee
from paceline.observe.plots import Panel, draw
from paceline.observe.table import ComparisonRow, comparison
from paceline.policies import make, split_list
from paceline.simulate import Cluster, ClusterSpec, SimulationResult, limit_seconds, load_cluster, run_limit_seconds
from paceline.simulate.cluster_reader import MAX_SIGMA
from paceline.simulate.link_use import LinkUse
from paceline.simulate.random_faults import with_random_faults

TRAINING = "With --train"
#: Options that make sense only without, or only with, --train.
TIMING_ONLY = ("iterations", "apply", "colocate", "replicas", "faults", "trace", "page", "speed")
TRAINING_ONLY = (
    *("dataset", "data", "samples", "optimizer", "rate", "momentum", "nesterov", "correct", "loss", "accuracy"),
    *("rounds", "budget", "device", "precision"),
)


@dataclass(frozen=True)
class SimulatedRow:
    """A simulated run in the table."""

    row: ComparisonRow
    result: SimulationResult
    figures: round_figures.RoundFigures | None = None  # None if workers exchange gradients in every step


def simulate(
    context: typer.Context,
    cluster: ClusterName,
    policy: PolicyList = None,
    iterations: Annotated[int, typer.Option(min=1, help="The mean number of iterations of a worker.")] = 200,
    seed: Seed = 0,
    apply: Apply = "whole",
    colocate: Colocate = False,
    replicas: Replicas = 0,
    jitter: JitterOption = None,
    faults: Annotated[
        int, typer.Option(min=0, help="The number of random kills, pauses, link cuts and rejoins, from the seed.")
    ] = 0,
    as_json: AsJson = False,
    trace: Annotated[Path | None, typer.Option(help="Write every event to this file as a line of JSON.")] = None,
    page: PageOption = None,
    speed: SpeedOption = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw workers and server links, or with --train the loss, to this PNG file.")
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            metavar="NETWORK",
            help="Train this network with real gradients in virtual time: mlp, cnn, lstm, alexnet-small, vgg16, …",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="digits (bundled), mnist, fashion-mnist, cifar10, cifar100, speech.", rich_help_panel=TRAINING
        ),
    ] = "digits",
    data: Annotated[
        Path | None,
        typer.Option(help="The folder that holds the datasets; $PACELINE_DATA if left out.", rich_help_panel=TRAINING),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Train on this many samples; 0: on all.", rich_help_panel=TRAINING)
    ] = 0,
    optimizer: Annotated[
        str, typer.Option(help="SGD, Adam, AdamW or another class of torch.optim.", rich_help_panel=TRAINING)
    ] = "SGD",
    rate: Annotated[
        float, typer.Option(min=0, help="The learning rate of one update.", rich_help_panel=TRAINING)
    ] = 0.01,
    momentum: Annotated[float, typer.Option(min=0, max=1, help="The momentum of SGD.", rich_help_panel=TRAINING)] = 0.0,
    nesterov: Annotated[
        bool, typer.Option("--nesterov", help="Use Nesterov's momentum.", rich_help_panel=TRAINING)
    ] = False,
    correct: Annotated[
        str,
        typer.Option(help="Staleness correction: auto, none, predict, round or full.", rich_help_panel=TRAINING),
    ] = "auto",
    loss: Annotated[
        float | None,
        typer.Option(help="Stop when the training loss stays below this for 10 rounds.", rich_help_panel=TRAINING),
    ] = None,
    accuracy: Annotated[
        float | None, typer.Option(help="Stop at this test accuracy, from 0 to 1.", rich_help_panel=TRAINING)
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Stop after this many updates per worker.", rich_help_panel=TRAINING)
    ] = 100,
    budget: Annotated[
        float,
        typer.Option(min=0, help="Stop after this many virtual seconds; 0: no limit.", rich_help_panel=TRAINING),
    ] = 0.0,
    device: Annotated[str, typer.Option(help="Train on cpu or cuda.", rich_help_panel=TRAINING)] = "cpu",
    precision: Annotated[
        str,
        typer.Option(help="The type of gradients: float32 or, on cuda, bfloat16.", rich_help_panel=TRAINING),
    ] = "float32",
) -> None:
    """Compare policies on a simulated cluster before you run them.

    Only time is simulated. With --train, the gradients are real: a network is trained in virtual time.
    """
    for name in TRAINING_ONLY if train is None else TIMING_ONLY:
        if _is_given(context, name):
            refuse(f"--{name} {'needs --train NETWORK' if train is None else 'cannot be combined with --train'}.")
    if train is not None:
        specs = split_list(policy or ["bsp,asp,r2sp"])
        for spec in specs:
            make(spec)
        described = cluster_named(cluster, "whole", False, jitter)
        if not described.exchanges_gradients:
            refuse("--train pushes a float32 gradient in every step; leave local_steps, updates and overlap out.")
        settings = (
            {"lr": rate} | ({"momentum": momentum} if momentum else {}) | ({"nesterov": True} if nesterov else {})
        )
        wanted = simulated_training.Wanted(
            train, dataset, data, samples, optimizer, settings, correct, seed, device, precision
        )
        return simulated_training.train(described, specs, wanted, loss, accuracy, rounds, budget, as_json, plot)
    specs = split_list(policy or ["bsp,asp,ssp,dssp,r2sp"])
    for spec in specs:
        make(spec)  # a mistake in the last one is found before the first one runs
    described = with_replicas(cluster_named(cluster, apply, colocate, jitter), replicas, specs, apply)
    check_described_updates(described, specs)
    if replicas and colocate:
        refuse("A backup of a server beside a worker cannot be simulated yet; measure it with `paceline lab`.")
    if faults:
        described = with_random_faults(described, faults, iterations, seed)
    check_target(trace, "--trace")
    check_target(plot, "--plot")
    if trace and plot and trace.resolve() == plot.resolve():
        refuse("--trace and --plot must name two different files.")
    if plot:
        if plot.suffix.lower() != ".png":
            refuse(f"--plot must name a .png file, not {plot.name!r}.")
        need("matplotlib", "--plot", "plot")

    if speed is not None and page is None:
        refuse("--speed is the speed of the page: add --page 8787.")
    place = page_place(page, None, None)

    # Files get their names when all is done, so that an interrupted run leaves nothing behind.
    trace_part, plot_part = unfinished(trace), unfinished(plot)
    if place and not trace:
        trace_part = _temporary()  # the page replays a trace that nobody asked for
    rows: list[SimulatedRow] = []
    panels: list[Panel] = []
    try:
        with progress_bar(quiet=as_json) as progress, opened(trace_part) as file:
            for spec in specs:
                task = progress.add_task(spec, total=1.0)
                kept = panels if plot else None
                rows.append(_run(described, spec, iterations, seed, apply, file, kept, progress, task))
                progress.update(task, completed=1.0)
        if plot_part:
            draw(panels, plot_part)
        for part, path in ((trace_part, trace), (plot_part, plot)):
            if part and path:
                part.replace(path)
        _conclude(described, rows, apply, as_json, (trace, plot))
        if place and (shown := trace or trace_part):
            show_recorded(place, shown, described.name, speed, [each.row.limit_seconds for each in rows])
    finally:
        for part in (trace_part, plot_part):
            if part:
                part.unlink(missing_ok=True)


def _temporary() -> Path:
    """A new file that is removed at the end of the command."""
    number, name = tempfile.mkstemp(prefix="paceline-", suffix=".jsonl")
    os.close(number)
    return Path(name)


def _conclude(
    described: ClusterSpec,
    rows: list[SimulatedRow],
    apply: str,
    as_json: bool,
    written: tuple[Path | None, ...],
) -> None:
    """Print the results, and the files that were written."""
    limit = limit_seconds(described, apply == "streamed")
    if as_json:
        typer.echo(json.dumps(_as_json(described, limit, rows), indent=2))
        return
    _show(described, limit, rows)
    for path in written:
        if path:
            errors.print(f"Written: {path}")


def _is_given(context: typer.Context, name: str) -> bool:
    """Is this parameter on the command line?"""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def cluster_named(name: str, apply: str, colocate: bool, jitter: float | None) -> ClusterSpec:
    """The named cluster, changed as the options say."""
    if apply not in ("whole", "streamed"):
        refuse(f"--apply must be whole or streamed, not {apply!r}.")
    if jitter is not None and not 0 <= jitter <= MAX_SIGMA:
        refuse(f"--jitter must be a number from 0 to {MAX_SIGMA:g}, not {jitter:g}; 0.05 is 5%.")
    described = load_cluster(name)
    if colocate:
        described = described.colocated()
    return described if jitter is None else described.with_jitter(jitter)


def with_replicas(described: ClusterSpec, replicas: int, policies: list[str], apply: str) -> ClusterSpec:
    """The cluster with backups of its servers. Refuse updates that cannot be replicated."""
    if replicas and (apply == "streamed" or any(make(spec).pipelined for spec in policies)):
        refuse("Streamed updates cannot be replicated yet; leave --replicas out, or apply updates whole.")
    return dataclasses.replace(described, replicas=replicas)


def _run(
    described: ClusterSpec,
    policy: str,
    iterations: int,
    seed: int,
    apply: str,
    file: IO[str] | None,
    panels: list[Panel] | None,
    progress: Progress,
    task: Any,
) -> SimulatedRow:
    made = make(policy)
    streamed = apply == "streamed" and made.streamable
    note_effects(policy, made, len(described.workers), apply == "streamed")
    observers: list[Observer] = []
    if file:
        observers.append(Recorder(lambda event: write_event(file, event)))
    if panels is not None:
        panel = Panel(policy, len(described.workers))
        panels.append(panel)
        observers.append(Recorder(panel.events.append))
    use = None if described.exchanges_gradients else LinkUse()
    if use:
        observers.append(use)
    observer = reduce(Tee, observers) if observers else None
    if observer:
        observer.began(0.0, described.name, policy, "streamed" if streamed else "whole", seed)
    simulated = Cluster(described, made, iterations, seed, streamed, observer)
    result = simulated.run(lambda part: progress.update(task, completed=part))
    if panels is not None:
        panel.iteration_seconds = result.report.mean_iteration_seconds
    limit = run_limit_seconds(described, made, result)
    row = ComparisonRow(policy, "streamed" if streamed else "whole", limit, result.report)
    return SimulatedRow(row, result, round_figures.figures_of(described, policy, result, use) if use else None)


def _show(described: ClusterSpec, limit: float, rows: list[SimulatedRow]) -> None:
    console = Console(highlight=False)
    separate = f"{described.servers} server" + ("s" if described.servers > 1 else "")
    servers = "a server beside each worker" if described.colocate else separate
    size = f"{described.model_bytes / 1e6:,.0f} MB"
    console.print()
    title = f"{described.name}: {len(described.workers)} workers, {servers}, a model of {size}"
    if not described.exchanges_gradients:
        title += f", {round_figures.description(described)}"
    console.print(comparison([each.row for each in rows], title, console.width))
    if figures := [each.figures for each in rows if each.figures]:
        console.print()
        console.print(round_figures.table_of(figures))
        console.print(Text(round_figures.legend(described), style="dim"))
    results = [each.result for each in rows]
    console.print(
        Text(
            f"This cluster's floor is {limit:.4g} s per iteration. "
            f"Simulated {sum(result.events for result in results):,} events "
            f"in {sum(result.wall_seconds for result in results):.1f} s, "
            f"peak memory {_peak_memory():,.0f} MB; "
            f"means leave out {'nothing' if described.faults else 'the first quarter of the run'}.",
            style="dim",
        )
    )


def _as_json(described: ClusterSpec, limit: float, rows: list[SimulatedRow]) -> dict[str, Any]:
    return {
        "cluster": described.name,
        "limit_seconds": limit,
        "peak_memory_mb": round(_peak_memory(), 1),
        "policies": [
            {"policy": each.row.policy, "apply": each.row.apply, "limit_seconds": each.row.limit_seconds}
            | dataclasses.asdict(each.row.report)
            | {
                "events": each.result.events,
                "wall_seconds": each.result.wall_seconds,
                "simulated_seconds": each.result.simulated_seconds,
            }
            | (each.figures.as_json() if each.figures else {})
            for each in rows
        ],
    }


def _peak_memory() -> float:
    """The peak memory of this process, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
