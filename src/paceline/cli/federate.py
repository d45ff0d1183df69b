"""`paceline federate`: a federation for real, its server and its clients."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paceline.cli import train
from paceline.cli.shared import errors, refuse

federate = typer.Typer(help="Federated training for real: clients that train by themselves, groups that take turns.")


@federate.command()
def serve(
    clients: Annotated[int, typer.Option(min=1, help="The federation begins when so many have come.")] = 1,
    policy: train.Policy = "fl-r2sp",
    host: Annotated[
        str, typer.Option(help="Where to listen; another place than loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = 0,
    token_file: train.TokenFile = None,
    lease: train.Lease = 60.0,
    checkpoint: train.CheckpointFolder = None,
    every: train.Every = None,
    resume: train.ResumeFrom = None,
    trace: train.Trace = None,
    tls_cert: train.TlsCert = None,
    tls_key: train.TlsKey = None,
    tls_ca: train.TlsCa = None,
) -> None:
    """Serve a federation until all clients have left, or Ctrl-C."""
    train.serve(
        *(1, clients, policy, "whole", "none", False, host, port, token_file, lease, checkpoint, every, resume, None),
        *(trace, tls_cert, tls_key, tls_ca),
    )


@federate.command()
def client(
    connect: Annotated[str, typer.Option(help="The server's address, host:port.")],
    number: Annotated[int, typer.Option("--client", min=0, help="Which client this is, from 0.")] = 0,
    clients: Annotated[int, typer.Option(min=1, help="Of how many, among whom the samples are dealt.")] = 1,
    network: Annotated[str, typer.Option(help="What is trained; see `paceline learn --help`.")] = "mlp",
    dataset: Annotated[str, typer.Option(help="On what.")] = "digits",
    data: Annotated[Path | None, typer.Option(help="The folder with data sets; else PACELINE_DATA.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds to take part in.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="τ, local iterations in a round.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Samples in an iteration.")] = 16,
    rate: Annotated[float, typer.Option(min=0, help="The learning rate, of SGD.")] = 0.02,
    proximal: Annotated[float, typer.Option(min=0, help="FedProx's μ.")] = 0.0,
    samples: Annotated[int, typer.Option(min=0, help="That each client has; 0: its part of the set.")] = 0,
    outliers: Annotated[
        float, typer.Option(min=0, max=1, help="The share of clients with hardly more than a class.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the network and of who has which samples; the same for all.")] = 0,
    token_file: train.TokenFile = None,
    tls_cert: train.TlsCert = None,
    tls_key: train.TlsKey = None,
    tls_ca: train.TlsCa = None,
) -> None:
    """Take part with a share of a data set. With data of your own: paceline.federated.Client, a few lines."""
    train.need_torch()
    if number >= clients:
        refuse(f"--client {number} is not one of {clients}: clients are numbered from 0 to {clients - 1}.")
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
            token=train.token_of(token_file),
            tls=train.tls_of(tls_cert, tls_key, tls_ca),
            progress=lambda done, loss: errors.print(
                Text(f"client {number}: round {done} of {rounds}, loss {loss:.4g}")
            ),
        )
        done = taking_part.run(rounds)
    except (ValueError, OSError) as error:
        said = str(error)
        refuse(said[:1].upper() + said[1:] + ("" if said.endswith(".") else "."))
    seconds = time.monotonic() - began
    typer.echo(
        f"Client {number}: {done} rounds in {seconds:.1f} s; {100 * tested(model, share.data):.1f}% on the test set."
    )


@federate.command()
def blacklist(
    connect: Annotated[str, typer.Argument(help="The server's address, host:port.")],
    pardon: Annotated[list[int] | None, typer.Option(min=0, help="Take this client back; may be repeated.")] = None,
    pardon_all: Annotated[bool, typer.Option("--pardon-all", help="Take all of them back.")] = False,
    token_file: train.TokenFile = None,
    tls_cert: train.TlsCert = None,
    tls_key: train.TlsKey = None,
    tls_ca: train.TlsCa = None,
) -> None:
    """Whom a running server leaves out as outliers, and for which cosines; and take them back."""
    from paceline.serve.environment import address
    from paceline.serve.watch import inspect
    from paceline.serve.wire.endpoint import Endpoint

    try:
        endpoint = Endpoint(*address(connect), train.token_of(token_file), train.tls_of(tls_cert, tls_key, tls_ca))
        found = asyncio.run(inspect(endpoint, pardon or (), pardon_all))
    except ValueError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{connect} cannot be asked: {error}.")
    if not found.filters:
        refuse(
            f"The policy at {connect} leaves nobody out; serve with -p fl-r2sp or -p 'filtered:policy=(…)' for that."
        )
    for client in found.pardoned:
        typer.echo(f"client {client}: taken back")
    for client in sorted(set(pardon or ()) - set(found.pardoned)):
        typer.echo(f"client {client}: was not blacklisted")
    for client, cosines in found.blacklist:
        typer.echo(f"client {client}: {', '.join(f'{cosine:.2f}' for cosine in cosines)}")
    if not found.blacklist and not found.pardoned:
        typer.echo("Nobody is blacklisted.")
