"""`paceline work`: start workers that join a server elsewhere."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer
from rich.text import Text

from paceline.cli.interruption import Interrupted, stop_signals
from paceline.cli.job_checks import check_reduce
from paceline.cli.options import (
    RESTARTS,
    Connect,
    Insecure,
    PeerTls,
    Ranks,
    ReduceOption,
    Restarts,
    Script,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    restart_limit,
)
from paceline.cli.output import Output
from paceline.cli.shared import check_script, errors, refuse

LEFT_JOB = "Interrupted; the workers of this machine have left the job."


def work(
    script: Script,
    connect: Connect,
    workers: Annotated[int, typer.Option(min=1, help="The number of workers on this machine.")] = 1,
    colocate: Annotated[
        bool, typer.Option("--colocate", help="Start a shard beside the worker, for a server with --colocate.")
    ] = False,
    token_file: TokenFile = None,
    restarts: Restarts = RESTARTS,
    ranks_per_worker: Ranks = 1,
    reduce: ReduceOption = "",
    tls: PeerTls = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    insecure: Insecure = False,
) -> None:
    """Start workers that join a server elsewhere."""
    from paceline.cli.connection import tls_of, token_of
    from paceline.launch.processes import JobError
    from paceline.launch.supervisor import WorkerCommand, WorkerSupervisor
    from paceline.serve.environment import ASKED_TO_LEAVE, WORKER, address, worker_number
    from paceline.serve.server import Address

    check_script(script[0])
    try:
        host, _ = address(connect)
    except ValueError as error:
        refuse(str(error))
    limit, reach = restart_limit(restarts), tls_of(tls, tls_cert, tls_key, tls_ca)
    check_reduce(reduce, ranks_per_worker)
    environment = reach.as_environment() if reach else {}
    token = token_of(token_file, "shard" if colocate else "worker")
    if colocate and not (reach or insecure or Address(host).is_loopback):
        refuse("A shard without TLS lets the network read and change the job: give --tls sha256:…, or --insecure.")
    task = WorkerCommand(script, connect, token, environment, ranks_per_worker, reduce, workers=workers, leaves=True)
    number = worker_number() if workers == 1 else None
    if colocate and number is None:
        refuse(
            f"With --colocate a shard has the number of its worker; start each worker alone, with {WORKER}=0, 1, 2 …"
        )

    async def worked() -> bool:
        output = Output()
        supervisor = WorkerSupervisor(task, limit, output.say)
        async with output.running():
            try:
                with stop_signals(supervisor.ask_to_leave):
                    await supervisor.keep_all([number] * workers, colocate)
            finally:
                await supervisor.stop(signal.SIGINT)  # the workers leave the job, which does not wait for them then
        return supervisor.has_left

    try:
        has_left = asyncio.run(worked())
    except JobError as error:
        errors.print(Text(str(error)))
        raise typer.Exit(1) from None
    except Interrupted as stopped:
        raise Interrupted(LEFT_JOB, stopped.code) from None
    if has_left:
        raise Interrupted(LEFT_JOB, ASKED_TO_LEAVE)
