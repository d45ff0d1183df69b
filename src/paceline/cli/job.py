"""`paceline run`, `serve` and `work`: train for real."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from paceline.cli.display import Display
from paceline.cli.options import (
    Apply,
    CheckpointFolder,
    Connect,
    Every,
    Host,
    Lease,
    PolicyName,
    Port,
    ReduceOption,
    ResumeFrom,
    Script,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    Trace,
)
from paceline.cli.shared import check_script, check_target, errors, need_torch, refuse
from paceline.model.correction import CorrectionOption, checked
from paceline.observe.final_report import side_by_side
from paceline.observe.observer import Tee
from paceline.observe.summary import Summary
from paceline.policies import make, split_list

if TYPE_CHECKING:
    from paceline.launch import local
    from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
    from paceline.serve.job_options import JobOptions

Servers = Annotated[
    int, typer.Option(min=0, help="The number of shards, one process each; 0: the server only paces the workers.")
]
Colocate = Annotated[
    bool, typer.Option("--colocate", help="Put a shard beside each worker, on its machine, instead of --servers.")
]
Correct = Annotated[
    str,
    typer.Option(
        help="The correction of staleness by the optimizer's momentum: none, predict, round or full. "
        "auto is full if there is momentum and the policy knows the staleness in advance."
    ),
]
Record = Annotated[
    Path | None,
    typer.Option("--record-updates", help="Record every decision and update in this folder, for `replay`."),
]
Restarts = Annotated[int, typer.Option(min=0, help="The number of times that a crashed worker is restarted.")]
Ranks = Annotated[
    int, typer.Option(min=1, help="Processes that form one worker. They add up their gradients before the push.")
]


def run(
    script: Script,
    workers: Annotated[int, typer.Option(min=1, help="The number of workers.")] = 2,
    servers: Servers = 1,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="A policy with options. Several are compared: bsp,r2sp.")
    ] = "bsp:weights=mean",
    apply: Apply = "whole",
    correct: Correct = "auto",
    colocate: Colocate = False,
    lease: Lease = 30.0,
    restarts: Restarts = 1,
    ranks_per_worker: Ranks = 1,
    reduce: ReduceOption = "",
    hosts: Annotated[str | None, typer.Option(help="Start the workers on these machines over ssh: a,b,c.")] = None,
    host: Annotated[
        str | None,
        typer.Option(help="The address to listen on; loopback if left out, all addresses with --hosts."),
    ] = None,
    checkpoint: CheckpointFolder = None,
    every: Every = None,
    resume: ResumeFrom = None,
    record: Record = None,
    trace: Trace = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Train a script with several workers, here or over ssh.

    The script calls paceline.join. Its workers are processes on this machine, or on --hosts.
    """
    if servers:
        need_torch()
    from paceline.cli.connection import tls_of
    from paceline.launch import local
    from paceline.serve.job_options import JobOptions

    specs = split_list([policy])
    for spec in specs:
        _check_policy(spec, workers, apply, correct)
    check_script(script[0])
    check_target(trace, "--trace")
    if len(specs) > 1 and any((checkpoint, resume, record, trace)):
        refuse("Several policies run one after the other; write files with one policy at a time.")
    saving = _checkpoint_plan(checkpoint, every, resume)
    _check_resume(resume)
    _check_reduce(reduce, ranks_per_worker)
    options = JobOptions(
        policy=specs[0],
        shards=workers if colocate else servers,
        workers=workers,
        host=host or (local.EVERYWHERE if hosts else "127.0.0.1"),
        streamed=apply == "streamed",
        correct=_correction(correct),
        colocate=colocate,
        lease=lease,
        saving=saving,
        resume=resume,
        record=record,
        tls=tls_of(tls_cert, tls_key, tls_ca),
    )
    names = [name for name in (hosts or "").split(",") if name]
    runs = []
    for spec in specs:
        with Display(spec, trace) as display:
            job = options.with_policy(spec)
            try:
                outcome = asyncio.run(_run(script, job, display, restarts, ranks_per_worker, reduce, names))
            except local.JobError as error:
                display.fail("" if error.said else str(error))
            except asyncio.CancelledError:
                raise typer.Exit(128 + signal.SIGTERM) from None
            runs.append(display.finish(outcome.report, outcome.seconds, show=len(specs) == 1))
    if len(runs) > 1:
        Console(highlight=False).print(side_by_side(runs, f"{Path(script[0]).name} with {workers} workers"))


async def _run(
    script: list[str],
    options: JobOptions,
    display: Display,
    restarts: int,
    ranks: int,
    reduce: str,
    hosts: list[str],
) -> local.JobOutcome:
    """Run one job, and show it. SIGTERM stops the job as Ctrl-C does."""
    from paceline.launch import local

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with display.running():
        return await local.run(
            script,
            options,
            restarts=restarts,
            ranks=ranks,
            reduce=reduce,
            hosts=hosts,
            observer=display.observer,
            say=display.say,
        )


def serve(
    servers: Servers = 1,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Begin when this many workers have joined; as Slurm or torchrun say, or 1."),
    ] = None,
    policy: PolicyName = "bsp:weights=mean",
    apply: Apply = "whole",
    correct: Correct = "auto",
    colocate: Colocate = False,
    host: Host = "127.0.0.1",
    port: Port = 0,
    token_file: TokenFile = None,
    lease: Lease = 30.0,
    checkpoint: CheckpointFolder = None,
    every: Every = None,
    resume: ResumeFrom = None,
    record: Record = None,
    trace: Trace = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Serve a job that workers on any machine can join.

    Workers join with `paceline work`. Any script that calls paceline.join can join too, with PACELINE_CONNECT set.
    """
    from paceline.cli.connection import tls_of, token_of
    from paceline.model.checkpoint import CheckpointError
    from paceline.serve.coordinator import event_loop
    from paceline.serve.environment import workers_of_launcher
    from paceline.serve.job_options import JobOptions
    from paceline.serve.serve_job import serve_job
    from paceline.serve.server import ServerError

    if servers:
        need_torch()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    wanted = workers or workers_of_launcher() or 1
    _check_policy(policy, wanted, apply, correct)
    check_target(trace, "--trace")
    options = JobOptions(
        policy=policy,
        shards=wanted if colocate else servers,
        workers=wanted,
        host=host,
        port=port,
        streamed=apply == "streamed",
        correct=_correction(correct),
        colocate=colocate,
        lease=lease,
        saving=_checkpoint_plan(checkpoint, every, resume),
        resume=resume,
        record=record,
        tls=tls_of(tls_cert, tls_key, tls_ca),
    )
    token, summary = token_of(token_file), Summary()

    async def served(display: Display) -> None:
        async with display.running():
            await serve_job(options, token, typer.echo, Tee(summary, display.observer))

    began = time.monotonic()
    with Display(policy, trace) as display:
        try:
            event_loop.run(served(display))
            display.finish(summary.report(), time.monotonic() - began)
        except (ServerError, CheckpointError, ValueError) as error:
            display.fail(str(error), code=2)


def work(
    script: Script,
    connect: Connect,
    workers: Annotated[int, typer.Option(min=1, help="The number of workers on this machine.")] = 1,
    colocate: Annotated[
        bool, typer.Option("--colocate", help="Start a shard beside the worker, for a server with --colocate.")
    ] = False,
    token_file: TokenFile = None,
    restarts: Restarts = 1,
    ranks_per_worker: Ranks = 1,
    reduce: ReduceOption = "",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Start workers that join a server elsewhere."""
    from paceline.cli.connection import tls_of, token_of
    from paceline.launch.processes import JobError
    from paceline.launch.supervisor import WorkerCommand, WorkerSupervisor
    from paceline.serve.environment import WORKER, address, worker_number

    check_script(script[0])
    try:
        address(connect)
    except ValueError as error:
        refuse(str(error))
    tls = tls_of(tls_cert, tls_key, tls_ca)
    _check_reduce(reduce, ranks_per_worker)
    task = WorkerCommand(
        script, connect, token_of(token_file), tls.as_environment() if tls else {}, ranks_per_worker, reduce
    )
    number = worker_number() if workers == 1 else None
    if colocate and number is None:
        refuse(
            f"With --colocate a shard has the number of its worker; start each worker alone, with {WORKER}=0, 1, 2 …"
        )

    async def worked() -> None:
        supervisor = WorkerSupervisor(task, restarts, lambda line, aside: typer.echo(line, err=aside))
        try:
            await supervisor.keep_all([number] * workers, colocate)
        finally:
            await supervisor.stop()

    try:
        asyncio.run(worked())
    except JobError as error:
        errors.print(Text(str(error)))
        raise typer.Exit(1) from None


def _check_policy(policy: str, workers: int, apply: str, correct: str) -> None:
    """Refuse a policy that cannot be made or has too few workers. Note options that have no effect."""
    if apply not in ("whole", "streamed"):
        refuse(f"--apply must be whole or streamed, not {apply!r}.")
    asked = _correction(correct)
    made = make(policy)
    if made.mixes and asked not in ("auto", "none"):
        errors.print(f"Note: --correct has no effect, since workers make their own steps under {policy}.")
    if apply == "streamed" and not (made.streamable or made.pipelined):
        errors.print(f"Note: {policy} cannot be streamed. Its updates are applied whole.")
    least = made.least_workers
    if least > workers:
        refuse(f"{policy} needs at least {least} workers, and there are {workers}; use --workers {least}.")


def _correction(correct: str) -> CorrectionOption:
    try:
        return checked(correct)
    except ValueError as error:
        refuse(f"--{error}.")


def _check_resume(resume: Path | None) -> None:
    """Refuse a folder without a checkpoint."""
    if resume is not None:
        from paceline.model import checkpoint

        try:
            checkpoint.read(resume)
        except checkpoint.CheckpointError as error:
            refuse(str(error))


def _check_reduce(text: str, ranks: int) -> None:
    """Refuse an all-reduce that does not fit the number of ranks, before anything is started."""
    from paceline.collectives.algorithms import AlgorithmError
    from paceline.collectives.named import named
    from paceline.collectives.topology import TopologyError

    if not text:
        return
    if ranks == 1:
        refuse("--reduce joins the ranks of one worker; give their number with --ranks-per-worker.")
    try:
        named(text).fits(ranks)
    except (AlgorithmError, TopologyError) as error:
        refuse(f"--reduce: {error}")


def _checkpoint_plan(folder: Path | None, every: str | None, resume: Path | None) -> CheckpointPlan | None:
    """The plan that --checkpoint and --checkpoint-every describe; None without a folder."""
    from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan

    folder = folder or resume
    if folder is None:
        if every:
            refuse("--checkpoint-every needs --checkpoint, the folder to write to.")
        return None
    if folder.exists() and not folder.is_dir():
        refuse(f"--checkpoint: {str(folder)!r} is not a folder.")
    text = every or "60s"
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    try:
        if text.isdigit() and int(text):
            return CheckpointPlan(folder, updates=int(text))
        if text[-1:] in units and float(text[:-1]) > 0:
            return CheckpointPlan(folder, seconds=float(text[:-1]) * units[text[-1]])
    except ValueError:
        pass
    refuse(f"--checkpoint-every must be a number of updates (500) or a time (30s, 10m, 1h), not {text!r}.")
