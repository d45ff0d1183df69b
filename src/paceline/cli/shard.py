"""`paceline shard`: hold a part of the model of a job whose server runs elsewhere."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.text import Text

from paceline.cli.interruption import Interrupted, stop_signals
from paceline.cli.options import Insecure, PeerTls, TlsCa, TlsCert, TlsKey, TokenFile
from paceline.cli.output import Output
from paceline.cli.shared import errors, need_torch, refuse

PATIENCE = 60.0  # seconds without a server after which a shard gives up, as a worker does


def shard(
    join: Annotated[str, typer.Option(help="The address of the server, host:port.")],
    number: Annotated[
        int | None, typer.Option(min=0, help="The number of the shard; the server chooses one if left out.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="The address to listen on; loopback for a server on loopback, otherwise all addresses."),
    ] = None,
    token_file: TokenFile = None,
    tls: PeerTls = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    insecure: Insecure = False,
) -> None:
    """Start a shard that joins a server elsewhere.

    The server runs `paceline serve --shards-join`. The shard is restarted until the job is over.
    """
    need_torch()
    from paceline.cli.connection import tls_of, token_of
    from paceline.launch.processes import JobError
    from paceline.launch.supervisor import LOOPBACK, WorkerCommand, WorkerSupervisor
    from paceline.serve.environment import address
    from paceline.serve.restarts import DEFAULT_RESTARTS
    from paceline.serve.server import Address

    try:
        server, _ = address(join)
    except ValueError as error:
        refuse(str(error))
    reach, token = tls_of(tls, tls_cert, tls_key, tls_ca), token_of(token_file, "shard")
    is_here = Address(host).is_loopback if host else server in LOOPBACK
    if not (reach or insecure or is_here):
        refuse("A shard without TLS lets the network read and change the job: give --tls sha256:…, or --insecure.")
    environment = reach.as_environment() if reach else {}
    task = WorkerCommand((), join, token, environment, workers=0, listen=host or "")

    async def kept() -> None:
        output = Output()
        supervisor = WorkerSupervisor(task, DEFAULT_RESTARTS, output.say)
        async with output.running():
            try:
                with stop_signals():
                    await supervisor.keep_shard(number, patience=PATIENCE)
            finally:
                await supervisor.stop()

    try:
        asyncio.run(kept())
    except JobError as error:
        errors.print(Text(str(error)))
        raise typer.Exit(1) from None
    except Interrupted as stopped:
        raise Interrupted("Interrupted; the job waits for another shard in its place.", stopped.code) from None
