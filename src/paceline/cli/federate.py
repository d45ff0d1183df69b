"""`paceline federate`: a federation for real, its server and its clients."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated

import typer
from rich.text import Text

from paceline.cli import job
from paceline.cli.job_checks import check_policy, check_updates
from paceline.cli.options import (
    MAX_SEED,
    CheckpointFolder,
    Connect,
    DataFolder,
    Every,
    Host,
    Insecure,
    Lease,
    Patience,
    PeerTls,
    PolicyName,
    Port,
    ResumeFrom,
    ServerTls,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    Trace,
    Updates,
)
from paceline.cli.page import PageOption
from paceline.cli.reports import Log, Metrics
from paceline.cli.shared import errors, need_torch, refuse, sentence
from paceline.model.codecs import codec

federate = typer.Typer(help="Train a federation of clients that keep their data.")


@federate.command()
def serve(
    clients: Annotated[int, typer.Option(min=1, help="Begin when this many clients have joined.")] = 1,
    policy: PolicyName = "fl-r2sp",
    host: Host = "127.0.0.1",
    port: Port = 0,
    token_file: TokenFile = None,
    lease: Lease = 60.0,
    checkpoint: CheckpointFolder = None,
    every: Every = None,
    patience: Patience = None,
    resume: ResumeFrom = None,
    trace: Trace = None,
    metrics: Metrics = None,
    log: Log = None,
    page: PageOption = None,
    updates: Updates = "",
    tls: ServerTls = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    insecure: Insecure = False,
) -> None:
    """Serve a federation until all clients have left, or until Ctrl-C."""
    check_policy(policy, clients, "whole", "none", option="--clients")
    check_updates(updates, policy, None)
    if updates and codec(updates).parts > 1:
        whole, _, _ = updates.partition("/")
        refuse(
            f"A client begins each round at the whole model of the server, so parts of it cannot be sent: use "
            f"{f'--updates {whole}' if whole != 'float32' else 'no --updates'}."
        )
    if not (checkpoint or resume):
        errors.print("Note: the model is not saved when the federation ends; give --checkpoint FOLDER to keep it.")
    job.serve(
        workers=clients,
        policy=policy,
        correct="none",
        updates=updates,
        host=host,
        port=port,
        token_file=token_file,
        lease=lease,
        checkpoint=checkpoint,
        every=every,
        patience=patience,
        resume=resume,
        trace=trace,
        metrics=metrics,
        log=log,
        page=page,
        tls=tls,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        insecure=insecure,
    )


@federate.command()
def client(
    connect: Connect,
    number: Annotated[int, typer.Option("--client", min=0, help="The number of this client, from 0.")] = 0,
    clients: Annotated[int, typer.Option(min=1, help="The number of clients that share the dataset.")] = 1,
    network: Annotated[str, typer.Option(help="The network to train; see `paceline simulate --help`.")] = "mlp",
    dataset: Annotated[str, typer.Option(help="The dataset to train on; see `paceline simulate --help`.")] = "digits",
    data: DataFolder = None,
    rounds: Annotated[int, typer.Option(min=1, help="The number of rounds to take part in.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="τ, the number of local iterations in a round.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="The batch size of a local iteration.")] = 16,
    rate: Annotated[float, typer.Option(min=0, help="The learning rate of SGD.")] = 0.02,
    proximal: Annotated[float, typer.Option(min=0, help="FedProx's μ.")] = 0.0,
    samples: Annotated[int, typer.Option(min=0, help="Samples of each client; 0: its part of the dataset.")] = 0,
    outliers: Annotated[
        float, typer.Option(min=0, max=1, help="The share of clients that have samples of hardly more than one class.")
    ] = 0.0,
    seed: Annotated[
        int,
        typer.Option(
            min=-MAX_SEED, max=MAX_SEED, help="The seed of the network and of the partition; the same for all clients."
        ),
    ] = 0,
    token_file: TokenFile = None,
    tls: PeerTls = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Take part in a federation with a part of a dataset.

    For data of your own, use paceline.federated.FederatedClient.
    """
    need_torch()
    if number >= clients:
        refuse(f"--client must be from 0 to {clients - 1}, since there are {clients} clients; got {number}.")
    from paceline.cli.connection import tls_of, token_of
    from paceline.federated.client import FederatedClient, plain_sgd
    from paceline.federated.client_data import network_for, share_of, tested
    from paceline.federated.partition import Skew

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    began = time.monotonic()
    try:
        share = share_of(number, clients, dataset, data, Skew(outliers), samples, batch, seed)
        model = network_for(network, share.data, seed)
        taking_part = FederatedClient(
            model,
            share,
            connect=connect,
            steps=steps,
            optimizer=plain_sgd(rate),
            proximal=proximal,
            client=number,
            token=token_of(token_file, "worker"),
            tls=tls_of(tls, tls_cert, tls_key, tls_ca),
            progress=lambda done, loss: errors.print(
                Text(f"client {number}: round {done} of {rounds}, loss {loss:.4g}")
            ),
        )
        done = taking_part.run(rounds)
    except (ValueError, OSError) as error:
        refuse(sentence(error))
    seconds = time.monotonic() - began
    typer.echo(
        f"Client {number}: {done} rounds in {seconds:.1f} s; {100 * tested(model, share.data):.1f}% on the test set."
    )


@federate.command()
def blacklist(
    connect: Annotated[str, typer.Argument(help="The address of the server, host:port.")],
    pardon: Annotated[list[int] | None, typer.Option(min=0, help="Readmit this client; may be repeated.")] = None,
    pardon_all: Annotated[bool, typer.Option("--pardon-all", help="Readmit all clients.")] = False,
    token_file: TokenFile = None,
    tls: PeerTls = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Show or readmit the clients that a server excludes as outliers."""
    from paceline.cli.connection import endpoint_of, tls_of
    from paceline.serve.watch import inspect

    reach = tls_of(tls, tls_cert, tls_key, tls_ca)
    endpoint = endpoint_of(connect, token_file, reach, "" if pardon or pardon_all else "watch")
    try:
        found = asyncio.run(inspect(endpoint, pardon or (), pardon_all))
    except OSError as error:
        refuse(f"{connect} does not answer: {error}.")
    if not found.filters:
        refuse(
            f"The policy at {connect} excludes no clients; serve with -p fl-r2sp or -p 'filtered:policy=(…)' for that."
        )
    for client in found.pardoned:
        typer.echo(f"client {client}: readmitted")
    for client in sorted(set(pardon or ()) - set(found.pardoned)):
        typer.echo(f"client {client}: was not excluded")
    for client, cosines in found.blacklist:
        typer.echo(f"client {client}: {', '.join(f'{cosine:.2f}' for cosine in cosines)}")
    if not found.blacklist and not found.pardoned:
        typer.echo("No client is excluded.")
