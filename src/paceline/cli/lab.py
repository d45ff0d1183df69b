"""`paceline lab`: what `paceline simulate` predicts, measured on real links."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shlex
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from paceline.cli.shared import check_target, errors, opened, refuse, unfinished, write_event
from paceline.cli.simulate import Apply, Colocate, JitterOption, cluster_named, progress_bar
from paceline.observe.plot import Panel, draw
from paceline.observe.table import Row, comparison
from paceline.policies import make, split_list
from paceline.simulate import Cluster, ClusterSpec

LEAST_GIGABYTES = 0.05  # that must have been moved for what a GB costs to mean anything


@dataclasses.dataclass(frozen=True)
class Line:
    """One run, measured, and perhaps simulated too."""

    row: Row
    measured: Any
    simulated: float | None = None

    @property
    def error(self) -> float | None:
        """How far the simulator was off, as a share of what was measured."""
        seconds = self.row.report.mean_iteration_seconds
        return None if self.simulated is None else self.simulated / seconds - 1


def lab(
    cluster: Annotated[str, typer.Argument(help="A built-in cluster (see `paceline clusters`) or a TOML file.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="Policies with options, separated by commas; may be repeated."),
    ] = None,
    iterations: Annotated[int, typer.Option(min=4, help="Iterations of each worker, on average.")] = 20,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    apply: Apply = "whole",
    colocate: Colocate = False,
    jitter: JitterOption = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Gradients come out, and are sent, in the last two thirds of computing.")
    ] = False,
    ddp: Annotated[bool, typer.Option("--ddp", help="Add PyTorch's DDP over gloo, on the same hosts.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare-simulation", help="Simulate each run too, and show the error.")
    ] = False,
    script: Annotated[
        str | None, typer.Option(help="Run this training script, with its arguments, instead of waiting workers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write every event to this file, a line of JSON each.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw who does what to this PNG file.")] = None,
) -> None:
    """Build a cluster of network namespaces with real, shaped links, and run the real server and workers in it."""
    from paceline.launch import lab as labs
    from paceline.launch import trial

    specs = split_list(policy or ["bsp,r2sp"])
    for spec in specs:
        make(spec)
    described = cluster_named(cluster, apply, colocate, jitter)
    command = tuple(shlex.split(script)) if script else ()
    if command and not Path(command[0]).is_file():
        refuse(f"There is no script {command[0]!r}.")
    if command and (overlap or ddp or compare):
        refuse("--script runs real training: leave --overlap, --ddp and --compare-simulation out.")
    for option, path in (("--trace", trace), ("--plot", plot)):
        check_target(path, option)
    if importlib.util.find_spec("torch") is None:
        refuse("The lab's server needs torch: pip install 'paceline[torch]'.")
    trace_part, plot_part = unfinished(trace), unfinished(plot)
    lines: list[Line] = []
    panels: list[Panel] = []
    try:
        with (
            _ended_by_terminate(),
            labs.Lab(trial.hosts(described)) as built_lab,
            progress_bar(quiet=as_json) as progress,
            opened(trace_part) as file,
        ):
            share = trial.goodput(built_lab)
            for spec in specs:
                made = make(spec)
                streamed = apply == "streamed" and made.streamable
                if apply == "streamed" and not (streamed or made.pipelined):
                    errors.print(f"Note: {spec} cannot be streamed, so it is run whole.")
                task = progress.add_task(spec, total=1.0)
                plan = trial.Plan(spec, iterations, streamed, overlap, seed, script=command)
                result = trial.run(built_lab, described, plan, partial(_advance, progress, task))
                in_slices = streamed or made.pipelined
                built = trial.as_built(described, share, in_slices)
                row = Row(
                    spec, result.apply if streamed else "whole", trial.floor(built, in_slices, overlap), result.report
                )
                simulated = None
                if compare:
                    run = Cluster(built, made, iterations, seed, streamed).run()
                    simulated = run.report.mean_iteration_seconds
                lines.append(Line(row, result, simulated))
                if plot:
                    panel = Panel(spec, len(described.workers), result.report.mean_iteration_seconds)
                    panel.events.extend(result.events)
                    panels.append(panel)
                if file:
                    for event in result.events:
                        write_event(file, event)
                progress.update(task, completed=1.0)
            if ddp:
                task = progress.add_task(trial.DDP, total=None)
                lines += _with_ddp(trial, built_lab, described, iterations, overlap, seed, share, lines)
                progress.update(task, total=1.0, completed=1.0)
        if plot_part:
            draw(panels, plot_part)
        for part, path in ((trace_part, trace), (plot_part, plot)):
            if part and path:
                part.replace(path)
    except labs.LabError as error:
        refuse(str(error))
    finally:
        for part in (trace_part, plot_part):
            if part:
                part.unlink(missing_ok=True)
    limit = trial.floor(trial.as_built(described, share, apply == "streamed"), apply == "streamed", overlap)
    if as_json:
        typer.echo(json.dumps(_as_json(described, limit, share, lines), indent=2))
    else:
        _show(described, limit, share, lines)


def _advance(progress: Progress, task: TaskID, part: float) -> None:
    progress.update(task, completed=part)


def _with_ddp(
    trial: Any,
    built_lab: Any,
    described: ClusterSpec,
    iterations: int,
    overlap: bool,
    seed: int,
    share: float,
    lines: list[Line],
) -> Iterator[Line]:
    """DDP as it is, and where a policy has tuned the batches, DDP with those too."""
    plan = trial.Plan(trial.DDP, iterations, overlap=overlap, seed=seed)
    limit = trial.floor(trial.as_built(described, share, False), False)
    own = tuple(worker.batch for worker in described.workers)
    tuned = {tuple(line.row.report.batch_sizes.values()): line.row.policy for line in lines}
    for batches, name in ({own: ""} | {sizes: name for sizes, name in tuned.items() if sizes != own}).items():
        result = trial.run_ddp(built_lab, described, plan, batches)
        title = f"{trial.DDP} (batches of {name})" if name else trial.DDP
        yield Line(Row(title, "whole", limit, result.report), result)


@contextlib.contextmanager
def _ended_by_terminate() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does, so that the lab is taken down."""
    ours = os.getpid()

    def interrupt(*_: object) -> None:
        if os.getpid() != ours:  # a process that pyroute2 has forked, and ends so
            os._exit(0)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(described: ClusterSpec, limit: float, share: float, lines: list[Line]) -> None:
    console = Console(highlight=False)
    servers = (
        "a server beside each" if described.colocate else f"{described.servers} server" + "s" * (described.servers > 1)
    )
    size = f"{described.model_bytes / 1e6:,.3g} MB"
    title = f"{described.name}, measured: {len(described.workers)} workers, {servers}, a model of {size}"
    console.print()
    console.print(comparison([line.row for line in lines], title, console.width))
    if any(line.simulated is not None for line in lines):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_row("", Text("measured", style="dim"), Text("simulated", style="dim"), Text("error", style="dim"))
        for line in lines:
            if line.simulated is not None and line.error is not None:
                seconds = line.row.report.mean_iteration_seconds
                table.add_row(line.row.policy, f"{seconds:.4f} s", f"{line.simulated:.4f} s", f"{line.error:+.1%}")
        console.print(table)
    costs = [(line.row.policy, line.measured.cost) for line in lines if line.measured.cost.gigabytes > LEAST_GIGABYTES]
    said = ", ".join(f"{name} {cost.cpu_seconds_per_gigabyte:.2f}" for name, cost in costs)
    console.print(
        Text(
            f"The floor is {limit:.4g} s an iteration, at the {share:.1%} of the links' rates that a bare TCP stream "
            f"reaches here.{f' CPU seconds for a GB moved: {said}.' if said else ''}",
            style="dim",
        )
    )


def _as_json(described: ClusterSpec, limit: float, share: float, lines: list[Line]) -> dict[str, Any]:
    return {
        "cluster": described.name,
        "measured": True,
        "limit_seconds": limit,
        "goodput_share": share,
        "goodput_bytes_per_second": share * min(worker.link for worker in described.workers),
        "policies": [
            {"policy": line.row.policy, "apply": line.row.apply, "limit_seconds": line.row.limit_seconds}
            | dataclasses.asdict(line.row.report)
            | {
                "wall_seconds": line.measured.seconds,
                "gigabytes_moved": line.measured.cost.gigabytes,
                "cpu_seconds_per_gigabyte": line.measured.cost.cpu_seconds_per_gigabyte,
            }
            | (
                {}
                if line.simulated is None
                else {"simulated_iteration_seconds": line.simulated, "simulation_error": line.error}
            )
            for line in lines
        ],
    }
