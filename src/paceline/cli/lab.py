"""`paceline lab`: measure on real links what `paceline simulate` predicts."""

from __future__ import annotations

import contextlib
import dataclasses
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

from paceline.advise.candidates import DDP
from paceline.cli import round_figures
from paceline.cli.job_checks import check_described_updates, note_effects, note_links
from paceline.cli.options import Apply, AsJson, ClusterName, Colocate, JitterOption, PolicyList, Replicas, Seed
from paceline.cli.page import PageOption, Show, job_page, page_place
from paceline.cli.shared import check_script, check_target, need, progress_bar, refuse, unfinished, write_event
from paceline.cli.simulate import cluster_named, with_replicas
from paceline.observe.plots import Panel, draw
from paceline.observe.table import ComparisonRow, comparison
from paceline.policies import make, split_list, with_mean_weights
from paceline.simulate import Cluster, ClusterSpec, limit_seconds
from paceline.simulate.link_use import burst_seconds

if TYPE_CHECKING:
    from paceline.lab.namespaces import Lab
    from paceline.lab.plan import LabPlan, LabResult

MIN_GIGABYTES = 0.05  # with less traffic, the CPU time per GB means nothing


@dataclasses.dataclass(frozen=True)
class LabLine:
    """A measured run, and its simulated iteration time with --compare-simulation."""

    row: ComparisonRow
    measured: LabResult
    simulated: float | None = None
    figures: round_figures.RoundFigures | None = None  # None if workers exchange gradients in every step

    @property
    def error(self) -> float | None:
        """The relative error of the simulated iteration time."""
        seconds = self.row.report.mean_iteration_seconds
        return None if self.simulated is None else self.simulated / seconds - 1


@dataclasses.dataclass(frozen=True)
class LabRequest:
    """The runs to measure on a cluster."""

    policies: list[str]
    described: ClusterSpec
    plan: LabPlan  # its policy is filled in for each run
    ddp: bool
    compare: bool

    def as_built(
        self, share: float, streamed: bool, batches: dict[int, int] | None = None
    ) -> tuple[ClusterSpec, float]:
        """Return the cluster with the rates that its links reach in the lab, and its floor for these batch sizes."""
        from paceline.lab.hosts import as_built

        built = as_built(self.described, share, streamed)
        return built, limit_seconds(built, streamed, self.plan.overlap, batches)


def lab(
    cluster: ClusterName,
    policy: PolicyList = None,
    iterations: Annotated[int, typer.Option(min=4, help="The number of iterations of each worker, on average.")] = 20,
    seed: Seed = 0,
    apply: Apply = "whole",
    colocate: Colocate = False,
    replicas: Replicas = 0,
    jitter: JitterOption = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Push gradients during the last two thirds of computing.")
    ] = False,
    ddp: Annotated[bool, typer.Option("--ddp", help="Also measure PyTorch's DDP over gloo on the same hosts.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare-simulation", help="Also simulate each run, and show the simulator's error.")
    ] = False,
    script: Annotated[
        str | None, typer.Option(help="Run this training script, with its arguments, instead of synthetic workers.")
    ] = None,
    as_json: AsJson = False,
    trace: Annotated[Path | None, typer.Option(help="Write every event to this file as a line of JSON.")] = None,
    page: PageOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw what each worker does over time to this PNG file.")] = None,
) -> None:
    """Measure policies on real, shaped links on this machine.

    Build the cluster from network namespaces, and run the real server and workers on it. Needs Linux and root.
    """
    from paceline.lab.hosts import goodput, hosts, server_host
    from paceline.lab.namespaces import Lab, LabError
    from paceline.lab.plan import LabPlan
    from paceline.lab.round_use import sampling_seconds

    specs = split_list(policy or ["bsp,r2sp"])
    for spec in specs:
        make(spec)  # refuse a wrong policy before the first one runs
    described = with_replicas(cluster_named(cluster, apply, colocate, jitter), replicas, specs, apply)
    if replicas and colocate and compare:
        refuse("A backup of a server beside a worker cannot be simulated yet; leave --compare-simulation out.")
    command = tuple(shlex.split(script or ""))
    if command:
        check_script(command[0])
        specs = [with_mean_weights(spec) for spec in specs]  # it trains, as `paceline run` does
        if overlap or ddp or compare:
            refuse("--script runs real training and cannot be used with --overlap, --ddp or --compare-simulation.")
        if described.local_steps > 1 or described.overlap:
            refuse("A script makes its own local steps; leave local_steps and overlap out of the cluster's file.")
    elif not described.exchanges_gradients and (overlap or ddp):
        refuse("--overlap and --ddp need workers that exchange a float32 gradient in every step.")
    check_described_updates(described, specs)
    for option, path in (("--trace", trace), ("--plot", plot)):
        check_target(path, option)
    need("torch", "The lab's server", "torch")
    sampled = 0.0
    if not command and not described.exchanges_gradients and not colocate:
        sampled = sampling_seconds(described)
    plan = LabPlan("", iterations, apply == "streamed", overlap, seed, sampled=sampled, script=command)
    request = LabRequest(specs, described, plan, ddp, compare)
    place = page_place(page, None, None)
    try:
        with _interrupted_by_sigterm(), Lab(hosts(described)) as built:
            on_server = partial(built.command, server_host(described, 0))
            with job_page(place, described.name, on_server) as show, progress_bar(as_json) as progress:
                share = goodput(built)
                note_links(share)
                lines = list(_measure(built, request, share, progress, show))
    except LabError as error:
        refuse(str(error))
    finally:
        if place:
            place.listening.close()
    _write(lines, described, trace, plot)
    _, limit = request.as_built(share, plan.streamed)
    if as_json:
        typer.echo(json.dumps(_as_json(described, limit, share, lines), indent=2))
    else:
        _show(described, limit, share, lines)


def _measure(
    built_lab: Lab, request: LabRequest, share: float, progress: Progress, show: Show | None
) -> Iterator[LabLine]:
    """Measure each policy, and DDP if requested.

    DDP runs with the batches of the cluster, and with those that a policy has tuned.
    """
    from paceline.lab import ddp_run, run

    own = tuple(worker.batch for worker in request.described.workers)
    tuned: dict[tuple[int, ...], str] = {}
    for spec in request.policies:
        made = make(spec)
        plan = dataclasses.replace(request.plan, policy=spec, streamed=request.plan.streamed and made.streamable)
        note_effects(spec, made, len(request.described.workers), request.plan.streamed)
        task = progress.add_task(spec, total=1.0)
        _, ahead = request.as_built(share, plan.streamed or made.pipelined)
        known = None if plan.script or request.described.faults else ahead
        shown = partial(show, floor=known) if show else None
        result = run.run(built_lab, request.described, plan, partial(_advance, progress, task), shown)
        progress.update(task, completed=1.0)
        built, limit = request.as_built(share, plan.streamed or made.pipelined, result.report.batch_sizes)
        # A script has a model and compute times of its own, and lost workers leave the links to the others.
        floor = None if plan.script or built.faults else limit
        simulated = None
        if request.compare:
            predicted = Cluster(built, made, plan.iterations, plan.seed, plan.streamed).run()
            simulated = predicted.report.mean_iteration_seconds
        tuned.setdefault(tuple(result.report.batch_sizes.values()), f"{DDP} (batches of {spec})")
        row = ComparisonRow(spec, "streamed" if plan.streamed else "whole", floor, result.report)
        figures = None
        if not plan.script and not request.described.exchanges_gradients:
            figures = measured_figures(request.described, spec, result)
        yield LabLine(row, result, simulated, figures)
    if request.ddp:
        for batches, title in (tuned | {own: DDP}).items():
            task = progress.add_task(title, total=None)
            result = ddp_run.run(built_lab, request.described, request.plan, batches)
            progress.update(task, total=1.0, completed=1.0)
            yield LabLine(ComparisonRow(title, "whole", None, result.report), result)  # no server, and so no floor


def measured_figures(described: ClusterSpec, policy: str, result: LabResult) -> round_figures.RoundFigures:
    """Return how the workers and the server's links of a run in rounds of local steps have spent their time."""
    from paceline.lab.round_use import computing_shares, rates

    report, workers = result.report, len(described.workers)
    shares = computing_shares(result.events, workers, report.warm_up_iterations // workers)
    waiting = None if described.overlap else report.blocking_seconds / report.mean_iteration_seconds
    windows = (burst_seconds(described, "in"), burst_seconds(described, "out"))
    means, peaks = rates(result.carried, windows) if result.carried else (None, None)
    return round_figures.RoundFigures(policy, tuple(1.0 - each for each in shares), waiting, means, peaks)


def _advance(progress: Progress, task: TaskID, part: float) -> None:
    progress.update(task, completed=part)


def _write(lines: list[LabLine], described: ClusterSpec, trace: Path | None, plot: Path | None) -> None:
    """Write the trace and the plot. A file gets its name when it is complete."""
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
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM interrupt the run as Ctrl-C does, so that the lab is removed."""
    own_pid = os.getpid()

    def interrupt(*_: object) -> None:
        if os.getpid() != own_pid:  # a process that pyroute2 has forked, and now terminates
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
    servers += ", each with a backup" if described.replicas else ""
    title = f"{described.name}, measured: {len(described.workers)} workers, {servers}, a model of {size}"
    console.print()
    if not described.exchanges_gradients:
        title += f", {round_figures.description(described)}"
    console.print(comparison([line.row for line in lines], title, console.width))
    if figures := [line.figures for line in lines if line.figures]:
        console.print()
        console.print(round_figures.table_of(figures))
        console.print(Text(round_figures.legend(described), style="dim"))
    if any(line.simulated is not None for line in lines):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_row("", Text("measured", style="dim"), Text("simulated", style="dim"), Text("error", style="dim"))
        for line in lines:
            if line.simulated is not None and line.error is not None:
                seconds = line.row.report.mean_iteration_seconds
                table.add_row(line.row.policy, f"{seconds:.4f} s", f"{line.simulated:.4f} s", f"{line.error:+.1%}")
        console.print(table)
    costs = [(line.row.policy, line.measured.cost) for line in lines if line.measured.cost.gigabytes > MIN_GIGABYTES]
    cpu = ", ".join(f"{name} {cost.cpu_seconds_per_gigabyte:.2f}" for name, cost in costs)
    console.print(
        Text(
            f"The floor is {limit:.4g} s per iteration, at the {share:.1%} of the links' rates that a bare TCP stream "
            f"reaches here.{f' CPU seconds per GB moved: {cpu}.' if cpu else ''}",
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
            | (line.figures.as_json() if line.figures else {})
            | (
                {}
                if line.simulated is None
                else {"simulated_iteration_seconds": line.simulated, "simulation_error": line.error}
            )
            for line in lines
        ],
    }
