"""`paceline run` and `serve`: train for real."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paceline.cli.checkpoint_options import absence_seconds, check_resume, checkpoint_plan, resumed
from paceline.cli.comparison import LinkOption, PlotOption, TargetOption, check_plot, conclude, link_rate, target_of
from paceline.cli.display import Display
from paceline.cli.interruption import Interrupted, stop_signals, stopped_job
from paceline.cli.job_checks import (
    check_max_norm,
    check_policy,
    check_reduce,
    check_replicas,
    check_server_hosts,
    check_shards_join,
    check_updates,
    correction,
    names_of,
    note_tasks,
)
from paceline.cli.options import (
    ABSENCE,
    RESTARTS,
    Absence,
    Apply,
    CheckpointFolder,
    Colocated,
    Correct,
    Every,
    Host,
    Insecure,
    Lease,
    MaxNorm,
    Patience,
    PolicyName,
    Port,
    Ranks,
    Record,
    ReduceOption,
    Replicas,
    Restarts,
    ResumeFrom,
    Script,
    Servers,
    ServerTls,
    ShardsJoin,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    Trace,
    Updates,
    restart_limit,
)
from paceline.cli.page import PageOption, job_page, page_place
from paceline.cli.reports import Log, Metrics, Reports
from paceline.cli.shared import check_folder, check_script, check_target, errors, need_torch, refuse
from paceline.observe.observer import Tee
from paceline.observe.summary import Summary
from paceline.policies import split_list

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.launch import local
    from paceline.observe.final_report import FinishedRun
    from paceline.serve.job_options import JobOptions
    from paceline.serve.serve_job import ServedJob
    from paceline.serve.wire.endpoint import Endpoint


def run(
    script: Script,
    workers: Annotated[int, typer.Option(min=1, help="The number of workers.")] = 2,
    servers: Annotated[
        int | None,
        typer.Option(min=0, help="The number of shards; 0: the server only paces.  [1, or one for each server host]"),
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="A policy with options. Several are compared: bsp,r2sp.")
    ] = "bsp",
    apply: Apply = "whole",
    correct: Correct = "auto",
    colocate: Colocated = False,
    replicas: Replicas = 0,
    max_norm: MaxNorm = None,
    updates: Updates = "",
    lease: Lease = 30.0,
    restarts: Restarts = RESTARTS,
    ranks_per_worker: Ranks = 1,
    reduce: ReduceOption = "",
    hosts: Annotated[str | None, typer.Option(help="Start the workers on these machines over ssh: a,b,c.")] = None,
    server_hosts: Annotated[
        str | None, typer.Option(help="Start the shards on these machines over ssh, in turn: c,d.")
    ] = None,
    link: LinkOption = None,
    host: Annotated[
        str | None,
        typer.Option(help="The address to listen on; loopback if left out, all addresses with --hosts."),
    ] = None,
    checkpoint: CheckpointFolder = None,
    every: Every = None,
    patience: Patience = None,
    resume: ResumeFrom = None,
    record: Record = None,
    trace: Trace = None,
    metrics: Metrics = None,
    log: Log = None,
    page: PageOption = None,
    target: TargetOption = None,
    plot: PlotOption = None,
    tls: ServerTls = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    insecure: Insecure = False,
) -> None:
    """Train a script with several workers, here or over ssh.

    The script calls paceline.join. Its workers are processes on this machine, or on --hosts.
    """
    names, places = names_of(hosts), names_of(server_hosts)
    check_server_hosts(places, servers, colocate)
    servers = (len(places) or 1) if servers is None else servers
    if servers:
        need_torch()
    from paceline.cli.connection import server_tls
    from paceline.launch import local
    from paceline.serve.job_options import JobOptions
    from paceline.serve.last_save import UNSAVED

    specs = split_list([policy])
    for spec in specs:
        check_policy(spec, workers, apply, correct)
        check_replicas(replicas, spec, apply, record, link)
        check_max_norm(max_norm, spec, apply)
        check_updates(updates, spec, servers)
    check_script(script[0])
    check_target(trace, "--trace")
    check_folder(record, "--record-updates")
    if len(specs) > 1 and any((checkpoint, resume, record, trace)):
        refuse("Several policies run one after the other; write files with one policy at a time.")
    begins_from = resumed(resume, checkpoint)
    saving = checkpoint_plan(checkpoint, every, begins_from, patience)
    check_resume(begins_from)
    check_reduce(reduce, ranks_per_worker)
    rate, goal = link_rate(link, hosts or server_hosts, workers if colocate else servers), target_of(target)
    check_plot(plot)
    listen = host or (local.EVERYWHERE if names or places else "127.0.0.1")
    certificate = server_tls(tls, tls_cert, tls_key, tls_ca, None if insecure else listen)
    parameters: dict[str, object] = {"script": Path(script[0]).name, "workers": workers, "servers": servers}
    reports = Reports.of(metrics, log, parameters, tls=certificate, insecure=insecure)
    options = JobOptions(
        policy=specs[0],
        shards=workers if colocate else servers,
        workers=workers,
        host=listen,
        streamed=apply == "streamed",
        correct=correction(correct),
        colocate=colocate,
        shards_join=bool(places),
        replicas=replicas,
        max_norm=max_norm,
        update_codec=updates,
        lease=lease,
        saving=saving,
        resume=begins_from,
        restarts=restart_limit(restarts),
        record=record,
        tls=certificate,
        insecure=insecure,
    )
    runs: list[FinishedRun] = []
    over = f", over {link} links" if link else ""
    title = f"{Path(script[0]).name} with {workers} workers{over}"
    show_runs = partial(conclude, runs, title, goal, plot, compares=len(specs) > 1)
    with job_page(page_place(page, None, certificate, insecure), Path(script[0]).name) as show:
        for spec in specs:
            job = options.with_policy(spec)
            with Display(job.policy, trace, goal, reports) as display:
                try:
                    outcome = asyncio.run(
                        _run(script, job, display, ranks_per_worker, reduce, names, places, rate, show)
                    )
                except local.JobError as error:
                    if error.code == UNSAVED:
                        display.keep_trace()  # the job was trained to its end
                    show_runs()
                    display.fail("" if error.said else str(error), error.code)
                except Interrupted as stopped:
                    show_runs()
                    raise Interrupted(stopped_job(job, display.keep_trace()), stopped.code) from None
                alone = len(specs) == 1
                runs.append(display.finish(outcome.report, outcome.seconds, is_done=True, is_saved=True, show=alone))
    show_runs()


async def _run(
    script: list[str],
    options: JobOptions,
    display: Display,
    ranks: int,
    reduce: str,
    hosts: list[str],
    server_hosts: list[str],
    link: float | None,
    show: Callable[[Endpoint], None] | None,
) -> local.JobOutcome:
    """Run one job, and show it. SIGTERM stops the job as Ctrl-C does."""
    from paceline.launch import local

    with stop_signals() as again:
        async with display.running():
            return await local.run(
                script,
                options,
                ranks=ranks,
                reduce=reduce,
                hosts=hosts,
                server_hosts=server_hosts,
                link=link,
                observer=display.observer,
                say=display.say,
                again=again,
                show=show,
            )


def serve(
    servers: Servers = 1,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Begin when this many workers have joined; as Slurm or torchrun say, or 1."),
    ] = None,
    policy: PolicyName = "bsp",
    apply: Apply = "whole",
    correct: Correct = "auto",
    colocate: Colocated = False,
    shards_join: ShardsJoin = False,
    replicas: Replicas = 0,
    max_norm: MaxNorm = None,
    updates: Updates = "",
    host: Host = "127.0.0.1",
    port: Port = 0,
    token_file: TokenFile = None,
    lease: Lease = 30.0,
    absence: Absence = ABSENCE,
    restarts: Restarts = RESTARTS,
    checkpoint: CheckpointFolder = None,
    every: Every = None,
    patience: Patience = None,
    resume: ResumeFrom = None,
    record: Record = None,
    trace: Trace = None,
    metrics: Metrics = None,
    log: Log = None,
    page: PageOption = None,
    tls: ServerTls = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    insecure: Insecure = False,
) -> None:
    """Serve a job that workers on any machine can join.

    Workers join with `paceline work`. Any script that calls paceline.join can join too, with PACELINE_CONNECT set.
    """
    from paceline.cli.connection import server_tls, token_of
    from paceline.model.checkpoint import CheckpointError
    from paceline.serve.coordinator import event_loop
    from paceline.serve.environment import workers_of_launcher
    from paceline.serve.job_options import JobOptions
    from paceline.serve.last_save import UNSAVED
    from paceline.serve.serve_job import NO_UPDATE, serve_job, unsaved
    from paceline.serve.server import ServerError

    check_shards_join(shards_join, servers, colocate, replicas)
    if servers and not shards_join:
        need_torch()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    started = workers_of_launcher()
    wanted = workers or started or 1
    note_tasks(wanted, started)
    check_policy(policy, wanted, apply, correct)
    check_replicas(replicas, policy, apply, record)
    check_max_norm(max_norm, policy, apply)
    check_updates(updates, policy, servers)
    check_target(trace, "--trace")
    check_folder(record, "--record-updates")
    begins_from = resumed(resume, checkpoint)
    certificate = server_tls(tls, tls_cert, tls_key, tls_ca)
    parameters: dict[str, object] = {"workers": wanted, "servers": wanted if colocate else servers}
    reports = Reports.of(metrics, log, parameters, token_file=token_file, tls=certificate, insecure=insecure)
    options = JobOptions(
        policy=policy,
        shards=wanted if colocate else servers,
        workers=wanted,
        host=host,
        port=port,
        streamed=apply == "streamed",
        correct=correction(correct),
        colocate=colocate,
        shards_join=shards_join,
        replicas=replicas,
        max_norm=max_norm,
        update_codec=updates,
        lease=lease,
        absence=absence_seconds(absence),
        saving=checkpoint_plan(checkpoint, every, begins_from, patience),
        resume=begins_from,
        restarts=restart_limit(restarts),
        record=record,
        tls=certificate,
        insecure=insecure,
    )
    token, summary = token_of(token_file), Summary()

    async def served(display: Display, show: Callable[[Endpoint], None] | None) -> ServedJob:
        async with display.running():
            announce = partial(display.say, aside=False)
            return await serve_job(options, token, announce, Tee(summary, display.observer), show=show)

    with (
        job_page(page_place(page, token, certificate, insecure), "") as show,
        Display(options.policy, trace, reports=reports) as display,
    ):
        try:
            job = event_loop.run(served(display, show))
            if job.is_done and options.shards and not job.version:
                display.fail(NO_UPDATE)
            if not job.is_done and job.is_saved:
                errors.print(Text(stopped_job(options)))
            report = summary.report()
            display.finish(report, report.seconds, is_done=job.is_done, is_saved=job.is_saved)
            if not job.is_saved:
                display.fail(unsaved(options, job), code=UNSAVED)
            if job.signal == signal.SIGTERM:
                raise typer.Exit(128 + job.signal)  # a scheduler must not take the job for done
        except (ServerError, CheckpointError, ValueError) as error:
            display.fail(str(error), code=2)
