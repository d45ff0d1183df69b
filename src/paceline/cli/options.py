"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.shared import refuse

if TYPE_CHECKING:
    from paceline.serve.restarts import RestartLimit

ClusterName = Annotated[str, typer.Argument(help="A built-in cluster (see `paceline clusters`) or a TOML file.")]
PolicyList = Annotated[
    list[str] | None,
    typer.Option("--policy", "-p", help="Policies to compare, separated by commas; may be repeated."),
]
PolicyName = Annotated[str, typer.Option("--policy", "-p", help="A policy with options; see `paceline policies`.")]
Apply = Annotated[str, typer.Option(help="Apply updates whole, or streamed: piece by piece as they arrive.")]
Colocate = Annotated[bool, typer.Option("--colocate", help="Put a server beside each worker.")]
Replicas = Annotated[
    int,
    typer.Option(
        min=0, max=1, help="Backups of each shard. If a shard is lost, its backup takes over without a rollback."
    ),
]
MaxNorm = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        help="Scale an update down to this many times the usual norm, so that no worker can take the model over; "
        "10 leaves usual training alone. Off if left out.",
    ),
]
Updates = Annotated[
    str,
    typer.Option(
        help="Send updates, and the changes of the model, as int8, int4 or topk:F (the fraction F of the numbers, such "
        "as topk:0.02). int4/4 sends a quarter of the model at a time. What that leaves out is sent later. Without "
        "this option, both are sent in full."
    ),
]
JitterOption = Annotated[
    float | None, typer.Option("--jitter", help="Add log-normal jitter to every compute time; 0.05 is 5%.")
]
MAX_SEED = 2**32 - 1
Seed = Annotated[int, typer.Option(min=-MAX_SEED, max=MAX_SEED, help="The seed of all random numbers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
DataFolder = Annotated[
    Path | None, typer.Option("--data", help="The folder that holds the datasets; $PACELINE_DATA if left out.")
]
Device = Annotated[str, typer.Option(help="Train on cpu or cuda.")]

# Options of a real job

Lease = Annotated[float, typer.Option(min=0.1, help="Seconds without a heartbeat before a worker is given up.")]
CheckpointFolder = Annotated[
    Path | None, typer.Option("--checkpoint", help="Write checkpoints to this folder. The last two are kept.")
]
Every = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-every", help="Take a checkpoint every 500 updates (500) or every 30 s (30s, 10m, 1h).  [60s]"
    ),
]
Patience = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-patience", help="How long a last checkpoint that fails is tried again (30s, 10m).  [10m]"
    ),
]
ResumeFrom = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        help="Start from the last checkpoint in this folder, or from this one. "
        "auto: from the last one in --checkpoint, if there is one.",
    ),
]
ABSENCE = "60s"  # the default of --absence
Absence = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="How long to wait for workers that were lost or preempted, if no other trains (30s, 10m)."
    ),
]
RESTARTS = "3/10m"  # the default of --restarts
Restarts = Annotated[
    str,
    typer.Option(
        metavar="N[/TIME]",
        help="How often processes that were lost are restarted: 5 in the whole job, or 5/10m within any ten minutes "
        "(30s, 10m, 1h). Workers, the server and lost shards are counted apart.",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(help="Write every event to this file as a line of JSON. FILE.perfetto.json opens in Perfetto."),
]
TokenFile = Annotated[Path | None, typer.Option(help="A file with the job's token; see `paceline token`.")]
ServerTls = Annotated[
    str | None,
    typer.Option(
        "--tls",
        help="Use TLS with a certificate that the job makes: auto, or a .pem file that keeps it for later jobs.",
    ),
]
PeerTls = Annotated[
    str | None, typer.Option("--tls", help="The fingerprint of the server's certificate, sha256:…; `serve` prints it.")
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Listen without TLS, although others may reach the address; for safe networks."),
]
TlsCert = Annotated[Path | None, typer.Option(help="The certificate of this process, in PEM format.")]
TlsKey = Annotated[Path | None, typer.Option(help="The private key of --tls-cert.")]
TlsCa = Annotated[
    Path | None, typer.Option(help="The CA that signs the peers' certificates. A server then requires one.")
]
Connect = Annotated[
    str,
    typer.Option(
        envvar="PACELINE_CONNECT",
        show_envvar=False,
        help="The address of the server, host:port; PACELINE_CONNECT if left out. "
        "Under Slurm and torchrun, :port is a server on the job's first host.",
    ),
]
Host = Annotated[str, typer.Option(help="The address to listen on. Any address but loopback needs a token and TLS.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free port.")]
Script = Annotated[list[str], typer.Argument(help="The training script and its arguments.")]
Servers = Annotated[
    int, typer.Option(min=0, help="The number of shards, one process each; 0: the server only paces the workers.")
]
Colocated = Annotated[
    bool, typer.Option("--colocate", help="Put a shard beside each worker, on its machine, instead of --servers.")
]
ShardsJoin = Annotated[
    bool,
    typer.Option("--shards-join", help="Start no shards; --servers of them join, with `paceline shard --join`."),
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
Ranks = Annotated[
    int, typer.Option(min=1, help="Processes that form one worker. They add up their gradients before the push.")
]
ReduceOption = Annotated[
    str,
    typer.Option(
        help="The all-reduce of one worker's ranks, such as bcube:n=2,levels=2,stages=ring/mesh "
        "(docs/collectives.md); the backend's own if left out."
    ),
]

#: Everything after the script's name is an argument of the script.
THEN_SCRIPT = {"allow_interspersed_args": False}


def restart_limit(text: str) -> RestartLimit:
    """Return the limit that --restarts gives. Refuse any other text."""
    from paceline.serve.restarts import RestartLimit

    try:
        return RestartLimit.parse(text)
    except ValueError as error:
        refuse(f"--restarts must be {error}.")
