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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from paceline.advise.advice import DDP
from paceline.cli.shared import check_script, check_target, errors, refuse, unfinished, write_event
from paceline.cli.simulate import Apply, Colocate, JitterOption, cluster_named, progress_bar
from paceline.observe.plots import Panel, draw
from paceline.observe.table import ComparisonRow, comparison
from paceline.policies import make, split_list
from paceline.simulate import Cluster, ClusterSpec, limit_seconds

if TYPE_CHECKING:
    from paceline.lab.namespaces import Lab
    from paceline.lab.run import LabPlan, LabResult

MIN_GIGABYTES = 0.05  # that must have been moved for what a GB costs to mean anything


@dataclasses.dataclass(frozen=True)
class LabLine:
    """One run, measured, and perhaps simulated too."""

    row: ComparisonRow
    measured: LabResult
    simulated: float | None = None

    @property
    def error(self) -> float | None:
        """How far the simulator was off, as a share of what was measured."""
        seconds = self.row.report.mean_iteration_seconds
        return None if self.simulated is None else self.simulated / seconds - 1


@dataclasses.dataclass(frozen=True)
class LabRequest:
    """What is to be measured, on which cluster."""

    policies: list[str]
    described: ClusterSpec
    plan: LabPlan  # but for the policy
    ddp: bool
    compare: bool

    def as_built(self, share: float, streamed: bool) -> tuple[ClusterSpec, float]:
        """The cluster with the rates that are reached there, and its limit."""
        from paceline.lab.hosts import as_built

        built = as_built(self.described, share, streamed)
        return built, limit_seconds(built, streamed, self.plan.overlap)


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
    from paceline.lab.hosts import goodput, hosts
    from paceline.lab.namespaces import Lab, LabError
    from paceline.lab.run import LabPlan

    specs = split_list(policy or ["bsp,r2sp"])
    for spec in specs:
        make(spec)  # a mistake in the last one is found before the first one runs
    described = cluster_named(cluster, apply, colocate, jitter)
    command = tuple(shlex.split(script or ""))
    if command:
        check_script(command[0])
        if overlap or ddp or compare:
            refuse("--script runs real training: leave --overlap, --ddp and --compare-simulation out.")
    for option, path in (("--trace", trace), ("--plot", plot)):
        check_target(path, option)
    if importlib.util.find_spec("torch") is None:
        refuse("The lab's server needs torch: pip install 'paceline[torch]'.")
    plan = LabPlan("", iterations, apply == "streamed", overlap, seed, script=command)
    asked = LabRequest(specs, described, plan, ddp, compare)
    try:
        with _ended_by_terminate(), Lab(hosts(described)) as built, progress_bar(quiet=as_json) as progress:
            share = goodput(built)
            lines = list(_measure(built, asked, share, progress))
    except LabError as error:
        refuse(str(error))
    _write(lines, described, trace, plot)
    _, limit = asked.as_built(share, plan.streamed)
    if as_json:
        typer.echo(json.dumps(_as_json(described, limit, share, lines), indent=2))
    else:
        _show(described, limit, share, lines)


def _measure(built_lab: Lab, asked: LabRequest, share: float, progress: Progress) -> Iterator[LabLine]:
    """Each policy, and DDP: as it is, and where a policy has tuned the batches, with those too."""
    from paceline.lab import ddp_run, run

    own = tuple(worker.batch for worker in asked.described.workers)
    tuned: dict[tuple[int, ...], str] = {}
    for spec in asked.policies:
        made = make(spec)
        plan = dataclasses.replace(asked.plan, policy=spec, streamed=asked.plan.streamed and made.streamable)
        if asked.plan.streamed and not (made.streamable or made.pipelined):
            errors.print(f"Note: {spec} cannot be streamed, so it is run whole.")
        task = progress.add_task(spec, total=1.0)
        result = run.run(built_lab, asked.described, plan, partial(_advance, progress, task))
        progress.update(task, completed=1.0)
        built, limit = asked.as_built(share, plan.streamed or made.pipelined)
        simulated = None
        if asked.compare:
            predicted = Cluster(built, made, plan.iterations, plan.seed, plan.streamed).run()
            simulated = predicted.report.mean_iteration_seconds
        tuned.setdefault(tuple(result.report.batch_sizes.values()), f"{DDP} (batches of {spec})")
        yield LabLine(
            ComparisonRow(spec, "streamed" if plan.streamed else "whole", limit, result.report), result, simulated
        )
    if asked.ddp:
        _, limit = asked.as_built(share, streamed=False)
        for batches, title in (tuned | {own: DDP}).items():
            task = progress.add_task(title, total=None)
            result = ddp_run.run(built_lab, asked.described, asked.plan, batches)
            progress.update(task, total=1.0, completed=1.0)
            yield LabLine(ComparisonRow(title, "whole", limit, result.report), result)


def _advance(progress: Progress, task: TaskID, part: float) -> None:
    progress.update(task, completed=part)


def _write(lines: list[LabLine], described: ClusterSpec, trace: Path | None, plot: Path | None) -> None:
    """Files get their names when they are whole."""
    for path, write in ((trace, _write_trace), (plot, _write_plot)):
        part = unfinished(path)
        if path and part:
            try:
                write(lines, described, part)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)


def _write_trace(lines: list[LabLine], _: ClusterSpec, path: Path) -> None:
    with path.open("w") as file:
        for line in lines:
            for event in line.measured.events:
                write_event(file, event)


def _write_plot(lines: list[LabLine], described: ClusterSpec, path: Path) -> None:
    panels = []
    for line in lines:
        if line.measured.events:
            panel = Panel(line.row.policy, len(described.workers), line.row.report.mean_iteration_seconds)
            panel.events.extend(line.measured.events)
            panels.append(panel)
    draw(panels, path)


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


def _show(described: ClusterSpec, limit: float, share: float, lines: list[LabLine]) -> None:
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
    costs = [(line.row.policy, line.measured.cost) for line in lines if line.measured.cost.gigabytes > MIN_GIGABYTES]
    said = ", ".join(f"{name} {cost.cpu_seconds_per_gigabyte:.2f}" for name, cost in costs)
    console.print(
        Text(
            f"The floor is {limit:.4g} s an iteration, at the {share:.1%} of the links' rates that a bare TCP stream "
            f"reaches here.{f' CPU seconds for a GB moved: {said}.' if said else ''}",
            style="dim",
        )
    )


def _as_json(described: ClusterSpec, limit: float, share: float, lines: list[LabLine]) -> dict[str, Any]:
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
