"""The `paceline` command: thin, it reads what was asked, calls the library and shows what came out."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
import resource
import sys
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import paceline
from paceline.observe.events import Event, as_line
from paceline.observe.observer import Recorder, Tee
from paceline.observe.plot import Panel, draw
from paceline.observe.table import Row, comparison
from paceline.policies import PolicyError, make, names, policy_class, policy_options, split_list
from paceline.policies.options import shown
from paceline.simulate import (
    Cluster,
    ClusterError,
    ClusterSpec,
    Result,
    SimulationError,
    builtin_names,
    limit_seconds,
    load_cluster,
)
from paceline.simulate.chaos import chaos
from paceline.simulate.read import MOST_SIGMA, describe

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Synchronization policies for distributed training: simulate them on your cluster before you run them on it.",
)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

#: What typer raises for a command line it cannot make sense of; where it lives differs between versions of typer.
UsageError: Any = typer.BadParameter.__bases__[0]
INTERRUPTED = 130


def main() -> None:
    """Run the command. What a person can put right is said in one sentence, with exit code 2."""
    sys.path.insert(0, os.getcwd())  # so that `module:Class` finds a policy in the folder one is working in
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="paceline", standalone_mode=False)
    except (PolicyError, ClusterError, SimulationError) as error:
        _refuse(str(error))
    except UsageError as error:
        said = error.format_message()
        command = error.ctx.command_path if error.ctx else "paceline"
        _refuse(f"{said}{'' if said[-1:] in '.?' else '.'} See `{command} --help`.")
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # such as a full disk
        _refuse(f"{error.filename or 'A file'} cannot be written: {error.strerror}.")
    if code == INTERRUPTED:
        errors.print("Interrupted; nothing was written.")
    sys.exit(code)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if show:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.command()
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


@app.command()
def clusters() -> None:
    """List the clusters that come with paceline."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in builtin_names():
        table.add_row(Text(name, style="bold"), describe(name))
    Console(highlight=False).print(table)


@app.command()
def simulate(
    cluster: Annotated[str, typer.Argument(help="A built-in cluster (see `paceline clusters`) or a TOML file.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="Policies with options, separated by commas; may be repeated."),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of each worker, on average.")] = 200,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    apply: Annotated[
        str, typer.Option(help="whole, or streamed: slices are applied and returned as they come.")
    ] = "whole",
    colocate: Annotated[
        bool, typer.Option("--colocate", help="A server beside each worker instead of separate ones.")
    ] = False,
    jitter: Annotated[float | None, typer.Option(help="Log-normal jitter of every compute time; 0.05 is 5%.")] = None,
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
    if apply not in ("whole", "streamed"):
        _refuse(f"--apply must be whole or streamed, not {apply!r}.")
    if jitter is not None and not 0 <= jitter <= MOST_SIGMA:
        _refuse(f"--jitter must be a number from 0 to {MOST_SIGMA:g}, not {jitter:g}; 0.05 is 5%.")
    described = load_cluster(cluster)
    if colocate:
        described = described.colocated()
    if jitter is not None:
        described = described.with_jitter(jitter)
    if faults:
        described = chaos(described, faults, iterations, seed)
    _check_target(trace, "--trace")
    _check_target(plot, "--plot")
    if trace and plot and trace.resolve() == plot.resolve():
        _refuse("--trace and --plot must name two different files.")
    if plot:
        if plot.suffix.lower() != ".png":
            _refuse(f"--plot must name a .png file, not {plot.name!r}.")
        if importlib.util.find_spec("matplotlib") is None:
            _refuse("--plot needs matplotlib: pip install 'paceline[plot]'.")

    # Files get their names when all is done, so that an interrupted run leaves nothing behind.
    trace_part, plot_part = _part(trace), _part(plot)
    rows: list[tuple[Row, Result]] = []
    panels: list[Panel] = []
    try:
        with _progress(quiet=as_json) as progress, _open(trace_part) as file:
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


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[list[str], typer.Argument(help="The training script and its arguments.")],
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    servers: Annotated[int, typer.Option(min=1, help="Shards of the model, a process each.")] = 1,
    policy: Annotated[str, typer.Option("--policy", "-p", help="A policy with options.")] = "bsp:weights=mean",
    lease: Annotated[float, typer.Option(min=0.1, help="Seconds of silence before a worker is given up.")] = 30.0,
    restarts: Annotated[int, typer.Option(min=0, help="How often a crashed worker is started again.")] = 1,
    trace: Annotated[Path | None, typer.Option(help="Write every event to this file, a line of JSON each.")] = None,
) -> None:
    """Train a script that calls paceline.join, with several processes on this machine."""
    make(policy)
    _check_target(trace, "--trace")
    if not Path(script[0]).is_file():
        _refuse(f"There is no script {script[0]!r}.")
    if importlib.util.find_spec("torch") is None:
        _refuse("Training needs torch: pip install 'paceline[torch]'.")
    from paceline.launch import local  # only now: it needs what `simulate` does not

    part = _part(trace)
    try:
        with _open(part) as file:
            observer = Recorder(lambda event: _write(file, event)) if file else None
            outcome = asyncio.run(
                local.run(
                    script,
                    policy=policy,
                    workers=workers,
                    servers=servers,
                    lease=lease,
                    restarts=restarts,
                    observer=observer,
                )
            )
        if part and trace:
            part.replace(trace)
    except local.JobError as error:
        errors.print(Text(str(error)))
        raise typer.Exit(1) from None
    finally:
        if part:
            part.unlink(missing_ok=True)
    report = outcome.report
    typer.echo(
        f"{policy}: {report.updates} updates in {outcome.seconds:.1f} s, {report.samples_per_second:,.0f} samples/s, "
        f"waiting {report.blocking_seconds / max(report.mean_iteration_seconds, 1e-9):.0%}, "
        f"staleness {report.mean_staleness:.1f} (at most {report.max_staleness})"
    )


bench = typer.Typer(help="Measure what the real thing costs on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("wire")
def bench_wire(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    megabytes: Annotated[int, typer.Option(min=1, help="Size of the model that is pushed, applied and pulled.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Exchanges that are timed.")] = 15,
) -> None:
    """Push, apply and pull between two processes, beside bare TCP and other libraries' transports."""
    if importlib.util.find_spec("torch") is None:
        _refuse("The bench needs torch: pip install 'paceline[torch]'.")
    from paceline.bench import wire  # only now: it needs what `simulate` does not

    tasks: dict[str, Any] = {}
    with _progress(quiet=as_json) as progress:

        def advance(transports: str, part: float) -> None:
            if transports not in tasks:
                tasks[transports] = progress.add_task(transports, total=1.0)
            progress.update(tasks[transports], completed=part)

        try:
            result = wire.measure(megabytes, rounds, progress=advance)
        except wire.BenchError as error:
            _refuse(str(error))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result), indent=2))
        return
    table = Table(title=f"{megabytes} MB there and back", title_justify="left")
    for column in ("transport", "ms", "GB/s", "of bare TCP"):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for row in wire.rows(result):
        table.add_row(*row)
    Console(highlight=False).print(table)
    if result.ratio_to_tcp_with_apply:
        typer.echo(f"paceline: {result.ratio_to_tcp_with_apply:.2f} of TCP that applies the step too")


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
) -> tuple[Row, Result]:
    made = make(policy)
    streamed = apply == "streamed" and made.streamable
    if apply == "streamed" and not streamed:
        errors.print(f"Note: {policy} cannot be streamed, so it is simulated whole.")
    observers = []
    if file:
        observers.append(Recorder(lambda event: _write(file, event)))
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
    return Row(policy, "streamed" if streamed else "whole", limit, result.report), result


def _show(described: ClusterSpec, limit: float, rows: list[tuple[Row, Result]]) -> None:
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


def _as_json(described: ClusterSpec, limit: float, rows: list[tuple[Row, Result]]) -> dict[str, Any]:
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


def _write(file: IO[str], event: Event) -> None:
    file.write(as_line(event))
    file.write("\n")


def _part(path: Path | None) -> Path | None:
    """Where a file is written until it is whole."""
    return path.with_name(path.name + ".part") if path else None


class _open:
    """A file to write, or None where there is none to be written."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w") if path else None

    def __enter__(self) -> IO[str] | None:
        return self._file

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()


def _progress(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=quiet or not errors.is_terminal,
    )


def _check_target(path: Path | None, option: str) -> None:
    if path is None:
        return
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        _refuse(f"{option}: {str(path)!r} cannot be written; name a plain file in a folder that exists.")
    if not os.access(path.parent, os.W_OK):
        _refuse(f"{option}: the folder {str(path.parent)!r} cannot be written to.")


def _peak_memory() -> float:
    """Of this process, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def _refuse(message: str) -> NoReturn:
    errors.print(Text(message))
    sys.exit(2)
