"""`paceline simulate`, `policies` and `clusters`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import resource
import sys
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from paceline.cli.shared import check_target, errors, opened, refuse, unfinished, write_event
from paceline.observe.observer import Recorder, Tee
from paceline.observe.plots import Panel, draw
from paceline.observe.table import ComparisonRow, comparison
from paceline.policies import make, names, policy_class, policy_options, split_list
from paceline.policies.options import shown
from paceline.simulate import Cluster, ClusterSpec, SimulationResult, builtin_names, limit_seconds, load_cluster
from paceline.simulate.cluster_reader import MAX_SIGMA, describe
from paceline.simulate.random_faults import chaos

Apply = Annotated[str, typer.Option(help="whole, or streamed: slices are applied and returned as they come.")]
Colocate = Annotated[bool, typer.Option("--colocate", help="A server beside each worker instead of separate ones.")]
JitterOption = Annotated[
    float | None, typer.Option("--jitter", help="Log-normal jitter of every compute time; 0.05 is 5%.")
]


def policies() -> None:
    """List the synchronization policies and their options."""
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in names():
        table.add_row(Text(name, style="bold"), policy_class(name).summary)
        for option in policy_options(name).values():
            table.add_row("", Text(f"{option.name}={shown(option.default)}: {option.help}", style="dim"))
    console.print(table)
    console.print("\nWrite options after a colon: ssp:staleness=5. Your own policy: module:Class.")


def clusters() -> None:
    """List the clusters that come with paceline."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in builtin_names():
        table.add_row(Text(name, style="bold"), describe(name))
    Console(highlight=False).print(table)


def simulate(
    cluster: Annotated[str, typer.Argument(help="A built-in cluster (see `paceline clusters`) or a TOML file.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="Policies with options, separated by commas; may be repeated."),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of each worker, on average.")] = 200,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    apply: Apply = "whole",
    colocate: Colocate = False,
    jitter: JitterOption = None,
    faults: Annotated[
        int, typer.Option(min=0, help="So many random kills, pauses, cuts and rejoins, from the seed.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write every event to this file, a line of JSON each.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw who does what, and the servers' links, to this PNG file.")
    ] = None,
) -> None:
    """Run policies on a simulated cluster and show them side by side."""
    specs = split_list(policy or ["bsp,asp,ssp,dssp,r2sp"])
    for spec in specs:
        make(spec)  # a mistake in the last one is found before the first one runs
    described = cluster_named(cluster, apply, colocate, jitter)
    if faults:
        described = chaos(described, faults, iterations, seed)
    check_target(trace, "--trace")
    check_target(plot, "--plot")
    if trace and plot and trace.resolve() == plot.resolve():
        refuse("--trace and --plot must name two different files.")
    if plot:
        if plot.suffix.lower() != ".png":
            refuse(f"--plot must name a .png file, not {plot.name!r}.")
        if importlib.util.find_spec("matplotlib") is None:
            refuse("--plot needs matplotlib: pip install 'paceline[plot]'.")

    # Files get their names when all is done, so that an interrupted run leaves nothing behind.
    trace_part, plot_part = unfinished(trace), unfinished(plot)
    rows: list[tuple[ComparisonRow, SimulationResult]] = []
    panels: list[Panel] = []
    try:
        with progress_bar(quiet=as_json) as progress, opened(trace_part) as file:
            for spec in specs:
                task = progress.add_task(spec, total=1.0)
                row, result = _run(
                    described, spec, iterations, seed, apply, file, panels if plot else None, progress, task
                )
                rows.append((row, result))
                progress.update(task, completed=1.0)
        if plot_part:
            draw(panels, plot_part)
        for part, path in ((trace_part, trace), (plot_part, plot)):
            if part and path:
                part.replace(path)
    finally:
        for part in (trace_part, plot_part):
            if part:
                part.unlink(missing_ok=True)
    limit = limit_seconds(described, apply == "streamed")
    if as_json:
        typer.echo(json.dumps(_as_json(described, limit, rows), indent=2))
        return
    _show(described, limit, rows)
    for path in (trace, plot):
        if path:
            errors.print(f"Written: {path}")


def cluster_named(name: str, apply: str, colocate: bool, jitter: float | None) -> ClusterSpec:
    """The cluster that is asked for, as the options change it."""
    if apply not in ("whole", "streamed"):
        refuse(f"--apply must be whole or streamed, not {apply!r}.")
    if jitter is not None and not 0 <= jitter <= MAX_SIGMA:
        refuse(f"--jitter must be a number from 0 to {MAX_SIGMA:g}, not {jitter:g}; 0.05 is 5%.")
    described = load_cluster(name)
    if colocate:
        described = described.colocated()
    return described if jitter is None else described.with_jitter(jitter)


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
) -> tuple[ComparisonRow, SimulationResult]:
    made = make(policy)
    streamed = apply == "streamed" and made.streamable
    if apply == "streamed" and not streamed:
        errors.print(f"Note: {policy} cannot be streamed, so it is simulated whole.")
    observers = []
    if file:
        observers.append(Recorder(lambda event: write_event(file, event)))
    if panels is not None:
        panel = Panel(policy, len(described.workers))
        panels.append(panel)
        observers.append(Recorder(panel.events.append))
    observer = None if not observers else observers[0] if len(observers) == 1 else Tee(*observers)
    if observer:
        observer.began(0.0, described.name, policy, "streamed" if streamed else "whole", seed)
    simulated = Cluster(described, made, iterations, seed, streamed, observer)
    result = simulated.run(lambda part: progress.update(task, completed=part))
    if panels is not None:
        panel.iteration_seconds = result.report.mean_iteration_seconds
    # A pipelined barrier returns slices as they come, so that is its floor too.
    limit = limit_seconds(described, streamed or made.pipelined)
    return ComparisonRow(policy, "streamed" if streamed else "whole", limit, result.report), result


def _show(described: ClusterSpec, limit: float, rows: list[tuple[ComparisonRow, SimulationResult]]) -> None:
    console = Console(highlight=False)
    separate = f"{described.servers} server" + ("s" if described.servers > 1 else "")
    servers = "a server beside each" if described.colocate else separate
    size = f"{described.model_bytes / 1e6:,.0f} MB"
    console.print()
    title = f"{described.name}: {len(described.workers)} workers, {servers}, a model of {size}"
    console.print(comparison([row for row, _ in rows], title, console.width))
    results = [result for _, result in rows]
    console.print(
        Text(
            f"The floor of this cluster is {limit:.4g} s an iteration. "
            f"Simulated {sum(result.events for result in results):,} events "
            f"in {sum(result.wall_seconds for result in results):.1f} s, "
            f"peak memory {_peak_memory():,.0f} MB; "
            f"means are of {'the whole run' if described.faults else 'all but its first quarter'}.",
            style="dim",
        )
    )


def _as_json(
    described: ClusterSpec, limit: float, rows: list[tuple[ComparisonRow, SimulationResult]]
) -> dict[str, Any]:
    return {
        "cluster": described.name,
        "limit_seconds": limit,
        "peak_memory_mb": round(_peak_memory(), 1),
        "policies": [
            {"policy": row.policy, "apply": row.apply, "limit_seconds": row.limit_seconds}
            | dataclasses.asdict(row.report)
            | {
                "events": result.events,
                "wall_seconds": result.wall_seconds,
                "simulated_seconds": result.simulated_seconds,
            }
            for row, result in rows
        ],
    }


def progress_bar(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=quiet or not errors.is_terminal,
    )


def _peak_memory() -> float:
    """Of this process, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
