"""`paceline run`, `serve`, `work`, `watch`, `export` and `replay`: training for real."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from paceline.cli.display import Display
from paceline.cli.shared import check_script, check_target, errors, refuse
from paceline.cli.simulate import Apply
from paceline.model.correction import checked
from paceline.observe.final_report import side_by_side
from paceline.observe.observer import Tee
from paceline.observe.summary import Summary
from paceline.policies import make, split_list

if TYPE_CHECKING:
    from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
    from paceline.serve.wire.tls import Tls

Policy = Annotated[str, typer.Option("--policy", "-p", help="A policy with options; see `paceline policies`.")]
Servers = Annotated[int, typer.Option(min=0, help="Shards of the model, a process each; 0: only pace the workers.")]
Colocate = Annotated[
    bool, typer.Option("--colocate", help="A shard beside each worker, on its machine, instead of --servers here.")
]
Correct = Annotated[
    str,
    typer.Option(
        help="How staleness is made up for by the optimizer's momentum: none, predict, round or full; auto: full, "
        "if it has any and the policy knows how stale updates will be."
    ),
]
Lease = Annotated[float, typer.Option(min=0.1, help="Seconds of silence before a worker is given up.")]
CheckpointFolder = Annotated[
    Path | None, typer.Option("--checkpoint", help="Write checkpoints into this folder, the last two are kept.")
]
Every = Annotated[
    str | None,
    typer.Option("--checkpoint-every", help="So many updates (500) or so much time (30s, 10m); 60s if left out."),
]
ResumeFrom = Annotated[Path | None, typer.Option("--resume", help="Begin from the last checkpoint in this folder.")]
Record = Annotated[
    Path | None,
    typer.Option("--record-updates", help="Write every decision and update into this folder, for `replay`."),
]
TlsCert = Annotated[Path | None, typer.Option(help="This end's certificate, in PEM.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its private key.")]
TlsCa = Annotated[Path | None, typer.Option(help="The CA of the peers' certificates; a server then asks for one.")]
Trace = Annotated[
    Path | None,
    typer.Option(help="Write every event to this file, a line of JSON each; FILE.perfetto.json opens in Perfetto."),
]
Script = Annotated[list[str], typer.Argument(help="The training script and its arguments.")]
TokenFile = Annotated[Path | None, typer.Option(help="A file with the job's token, the same for all.")]

THEN_COMMAND = {"allow_interspersed_args": False}  # what follows the script's name is the script's


Reduce = Annotated[
    str,
    typer.Option(
        help="How the ranks of a worker add up, such as bcube:n=2,levels=2,stages=ring/mesh (docs/collectives.md); "
        "by the backend's own all-reduce if left out."
    ),
]


def check_reduce(text: str, ranks: int) -> None:
    """What ranks cannot be joined by is said before anything is started."""
    from paceline.collectives.algorithms import AlgorithmError
    from paceline.collectives.named import named
    from paceline.collectives.topology import TopologyError

    if not text:
        return
    if ranks == 1:
        refuse("--reduce is how several ranks add up; say how many with --ranks-per-worker.")
    try:
        named(text).fits(ranks)
    except (AlgorithmError, TopologyError) as error:
        refuse(f"--reduce: {error}")


def run(
    script: Script,
    workers: Annotated[int, typer.Option(min=1, help="How many workers.")] = 2,
    servers: Servers = 1,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="A policy with options; several are compared: bsp,r2sp.")
    ] = "bsp:weights=mean",
    apply: Apply = "whole",
    correct: Correct = "auto",
    colocate: Colocate = False,
    lease: Lease = 30.0,
    restarts: Annotated[int, typer.Option(min=0, help="How often a crashed worker is started again.")] = 1,
    ranks_per_worker: Annotated[
        int, typer.Option(min=1, help="Processes that make up one worker; they reduce among themselves first.")
    ] = 1,
    reduce: Reduce = "",
    hosts: Annotated[str | None, typer.Option(help="Start the workers on these machines over ssh: a,b,c.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Where the server listens: loopback if left out, everywhere with --hosts.")
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
    """Train a script that calls paceline.join, with several processes on this machine or over ssh."""
    if servers:
        need_torch()
    from paceline.launch import local

    specs = split_list([policy])
    for spec in specs:
        _check_policy(spec, workers, apply, correct)
    check_script(script[0])
    check_target(trace, "--trace")
    if len(specs) > 1 and any((checkpoint, resume, record, trace)):
        refuse("Several policies are run one after the other to be compared; write files of one policy at a time.")
    _plan(checkpoint, every, resume)
    _check_resume(resume)
    options = local.ServeOptions(
        specs[0],
        workers if colocate else servers,
        workers,
        host or (local.EVERYWHERE if hosts else "127.0.0.1"),
        apply=apply,
        correct=correct,
        colocate=colocate,
        lease=lease,
        checkpoint=checkpoint,
        every=every,
        resume=resume,
        record=record,
        tls=tls_of(tls_cert, tls_key, tls_ca),
    )
    check_reduce(reduce, ranks_per_worker)
    named = [name for name in (hosts or "").split(",") if name]

    async def ran(spec: str, display: Display) -> local.JobOutcome:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # stop as after a Ctrl-C
        async with display.running():
            return await local.run(
                script,
                replace(options, policy=spec),
                restarts=restarts,
                ranks=ranks_per_worker,
                reduce=reduce,
                hosts=named,
                observer=display.observer,
                say=display.say,
            )

    runs = []
    for spec in specs:
        with Display(spec, trace) as display:
            try:
                outcome = asyncio.run(ran(spec, display))
            except local.JobError as error:
                display.fail("" if error.said else str(error))
            except asyncio.CancelledError:
                raise typer.Exit(128 + signal.SIGTERM) from None
            runs.append(display.finish(outcome.report, outcome.seconds, show=len(specs) == 1))
    if len(runs) > 1:
        Console(highlight=False).print(side_by_side(runs, f"{Path(script[0]).name} with {workers} workers"))


def serve(
    servers: Servers = 1,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="The job begins when so many have come; else as Slurm or torchrun say, or 1."),
    ] = None,
    policy: Policy = "bsp:weights=mean",
    apply: Apply = "whole",
    correct: Correct = "auto",
    colocate: Colocate = False,
    host: Annotated[
        str, typer.Option(help="Where to listen; another place than loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = 0,
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
    quiet: Annotated[bool, typer.Option("--quiet", hidden=True)] = False,
) -> None:
    """Serve a job: workers on this machine or others join with `paceline work`, or any script with PACELINE_CONNECT."""
    from paceline.model.checkpoint import CheckpointError
    from paceline.serve.coordinator import event_loop
    from paceline.serve.coordinator.config import ServerConfig
    from paceline.serve.environment import workers_of_launcher
    from paceline.serve.server import Address, Server, ServerError

    if servers:
        need_torch()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    wanted = workers or workers_of_launcher() or 1
    _check_policy(policy, wanted, apply, correct)
    check_target(trace, "--trace")
    plan = _plan(checkpoint, every, resume)
    tls = tls_of(tls_cert, tls_key, tls_ca)
    config = ServerConfig(
        *(wanted if colocate else servers, wanted, token_of(token_file), lease, plan, record, policy),
        streamed=apply == "streamed",
        correct=checked(correct),
    )

    summary = Summary()

    async def served(display: Display) -> None:
        async with _until_told_to_stop() as told, display.running():
            observer = Tee(summary, display.observer)
            where = Address(host, port)
            server = Server(
                lambda: make(policy), config, where, tls=tls, observer=observer, resume=resume, own_shards=not colocate
            )
            await server.start()
            typer.echo(f"Listening on {host}:{server.port}.")
            try:
                serving = asyncio.ensure_future(server.serve())
                await asyncio.wait((serving, told), return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
                else:
                    serving.cancel()
                    await server.coordinator.save()
            finally:
                await server.stop()

    began = time.monotonic()
    with Display(policy, trace, quiet) as display:
        try:
            event_loop.run(served(display))
            display.finish(summary.report(), time.monotonic() - began, show=not quiet)
        except (ServerError, CheckpointError, ValueError) as error:
            display.fail(str(error), code=2)


def work(
    script: Script,
    connect: Annotated[str, typer.Option(help="The server's address, host:port.")],
    workers: Annotated[int, typer.Option(min=1, help="How many workers on this machine.")] = 1,
    colocate: Annotated[
        bool, typer.Option("--colocate", help="Start a shard beside the worker, for a server with --colocate.")
    ] = False,
    token_file: TokenFile = None,
    restarts: Annotated[int, typer.Option(min=0, help="How often a crashed worker is started again.")] = 1,
    ranks_per_worker: Annotated[int, typer.Option(min=1, help="Processes that make up one worker.")] = 1,
    reduce: Reduce = "",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Work for a server that runs elsewhere: start a training script that calls paceline.join."""
    from paceline.launch.processes import JobError
    from paceline.launch.supervisor import WorkerCommand, WorkerSupervisor
    from paceline.serve.environment import WORKER, address, worker_number

    check_script(script[0])
    try:
        address(connect)
    except ValueError as error:
        refuse(str(error))
    tls = tls_of(tls_cert, tls_key, tls_ca)
    check_reduce(reduce, ranks_per_worker)
    task = WorkerCommand(
        script, connect, token_of(token_file), tls.as_environment() if tls else {}, ranks_per_worker, reduce
    )
    number = worker_number() if workers == 1 else None
    if colocate and number is None:
        refuse(f"A shard has its worker's number: with --colocate start each worker by itself, with {WORKER}=0, 1, 2 …")

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


def watch(
    connect: Annotated[str, typer.Argument(help="The server's address, host:port.")],
    token_file: TokenFile = None,
    trace: Trace = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Watch a job that runs: the live table of a server, from wherever it can be reached."""
    from paceline.observe.observer import replay as show
    from paceline.serve.environment import address
    from paceline.serve.watch import watch as events_of
    from paceline.serve.wire.endpoint import Endpoint

    check_target(trace, "--trace")
    try:
        endpoint = Endpoint(*address(connect), token_of(token_file), tls_of(tls_cert, tls_key, tls_ca))
    except ValueError as error:
        refuse(str(error))

    summary = Summary()

    async def watched(display: Display) -> None:
        async with display.running():
            async for event in events_of(endpoint):
                show([event], Tee(summary, display.observer))

    began = time.monotonic()
    with Display("", trace) as display:
        try:
            asyncio.run(watched(display))
            display.finish(summary.report(), time.monotonic() - began)
        except (OSError, ValueError) as error:
            display.fail(f"{connect} cannot be watched: {error}.", code=2)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a job's checkpoints.")],
    target: Annotated[Path, typer.Argument(help="The file to write: .safetensors, or .pt for torch.load.")],
) -> None:
    """Write the model of a checkpoint as a plain state_dict."""
    from paceline.model.checkpoint import CheckpointError
    from paceline.model.export import FORMATS
    from paceline.model.export import export as write

    check_target(target, "The target")
    if target.suffix not in FORMATS:
        refuse(f"The target must be named {' or '.join('*' + each for each in FORMATS)}, not {target.name!r}.")
    try:
        version, tensors = write(checkpoint, target)
    except (CheckpointError, ValueError) as error:
        refuse(str(error))
    typer.echo(f"{target}: {tensors} tensors of version {version}.")


def replay(
    folder: Annotated[Path, typer.Argument(help="What --record-updates wrote.")],
) -> None:
    """Run a recorded job again: every decision and every weight must come out the same, bit for bit."""
    need_torch()
    from paceline.model.optimizer import without_compiler
    from paceline.serve.replay import ReplayError, journals, weights
    from paceline.simulate.journal_replay import retell

    without_compiler()
    same = True
    try:
        for path in journals(folder):
            with path.open() as lines:
                count, difference = retell(lines)
            if difference:
                same = False
                typer.echo(f"{path.name}: line {difference.line} was decided otherwise: {difference.decided}.")
            else:
                typer.echo(f"{path.name}: {count} decisions, all the same.")
        for part in weights(folder):
            verdict = "the same, bit for bit" if part.same else "not the same" if part.whole else "cut short"
            typer.echo(f"{part.name}: {part.updates} updates, weights of version {part.version}: {verdict}.")
            same = same and (part.same or not part.whole)
    except (ReplayError, ValueError, KeyError) as error:
        refuse(str(error))
    raise typer.Exit(0 if same else 1)


@asynccontextmanager
async def _until_told_to_stop() -> AsyncIterator[asyncio.Future[None]]:
    """A future that is done when this process is asked to end, by Ctrl-C or by SIGTERM."""
    event_loop = asyncio.get_running_loop()
    told: asyncio.Future[None] = event_loop.create_future()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        event_loop.add_signal_handler(number, lambda: None if told.done() else told.set_result(None))
    try:
        yield told
    finally:
        for number in numbers:
            event_loop.remove_signal_handler(number)


def _check_policy(policy: str, workers: int, apply: str, correct: str) -> None:
    if apply not in ("whole", "streamed"):
        refuse(f"--apply must be whole or streamed, not {apply!r}.")
    try:
        asked = checked(correct)
    except ValueError as error:
        refuse(f"--{error}.")
    made = make(policy)
    if made.mixes and asked not in ("auto", "none"):
        errors.print(f"Note: under {policy} workers make their own steps, so there is no momentum to correct by.")
    if apply == "streamed" and not (made.streamable or made.pipelined):
        errors.print(f"Note: {policy} cannot be streamed, so its updates are applied whole.")
    least = made.least_workers
    if least > workers:
        refuse(f"{policy} needs {least} workers or more, and there are {workers}; use --workers {least}.")


def _check_resume(resume: Path | None) -> None:
    if resume is not None:
        from paceline.model import checkpoint

        try:
            checkpoint.read(resume)
        except checkpoint.CheckpointError as error:
            refuse(str(error))


def need_torch() -> None:
    """Refuse, if it is not installed."""
    if importlib.util.find_spec("torch") is None:
        refuse("Training needs torch: pip install 'paceline[torch]'.")


def _plan(folder: Path | None, every: str | None, resume: Path | None) -> CheckpointPlan | None:
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
    refuse(f"--checkpoint-every is a number of updates (500) or a time (30s, 10m, 1h), not {text!r}.")


def tls_of(cert: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    """As these files say, or the environment."""
    from paceline.serve.wire.tls import Tls

    tls = Tls(*(str(path) if path else None for path in (cert, key, ca)))
    return Tls.from_environment() if tls == Tls() else tls


def token_of(file: Path | None) -> bytes:
    """The job's token: of this file, or of the environment."""
    from paceline.serve.environment import TOKEN

    if file is None:
        try:
            return bytes.fromhex(os.environ.get(TOKEN, ""))
        except ValueError:
            refuse(f"{TOKEN} must be hexadecimal.")
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        refuse(f"The token file {file} cannot be read: {error.strerror}.")
    if len(token) < 16:
        refuse(f"The token in {file} is too short to be safe: it needs 16 characters or more.")
    return token
