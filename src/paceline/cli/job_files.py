"""`paceline watch`, `export` and `replay`: look at a job from outside, during and after it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paceline.cli.display import Display
from paceline.cli.interruption import Interrupted
from paceline.cli.options import PeerTls, TlsCa, TlsCert, TlsKey, TokenFile, Trace
from paceline.cli.page import PageOption, SpeedOption, job_page, page_place, show_recorded
from paceline.cli.shared import check_target, errors, need_torch, refuse
from paceline.observe.observer import Tee
from paceline.observe.summary import Summary


def watch(
    connect: Annotated[
        str,
        typer.Argument(metavar="JOB", help="The address of the server, host:port; or a trace file, with --page."),
    ],
    token_file: TokenFile = None,
    trace: Trace = None,
    page: PageOption = None,
    speed: SpeedOption = None,
    tls: PeerTls = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Show a running job as a live table, or in a browser.

    With --page, it can be the trace of a recorded run.
    """
    from paceline.cli.connection import endpoint_of, tls_of
    from paceline.observe.observer import replay as show
    from paceline.serve.watch import watch as events_of

    if Path(connect).is_file():
        if page is None:
            refuse(f"{connect} is a file; to look at a trace in a browser, add --page 8787.")
        if trace:
            refuse("--trace records a running job, and this one is recorded already.")
        if place := page_place(page, None, None):
            show_recorded(place, Path(connect), Path(connect).name, speed)
        return
    if ":" not in connect and (Path(connect).suffix in (".json", ".jsonl") or os.sep in connect):
        refuse(f"There is no file {connect!r}; name a trace that exists, or the address of a server as host:port.")
    if speed is not None:
        refuse("--speed is for a recorded run; a running job is shown at its own speed.")
    check_target(trace, "--trace")
    endpoint = endpoint_of(connect, token_file, tls_of(tls, tls_cert, tls_key, tls_ca), "watch")
    summary = Summary()

    async def watched(display: Display) -> None:
        async with display.running():
            async for event in events_of(endpoint):
                show([event], Tee(summary, display.observer))

    with (
        job_page(page_place(page, endpoint.token, endpoint.tls), connect) as show_page,
        Display("", trace) as display,
    ):
        if show_page:
            show_page(endpoint)
        try:
            asyncio.run(watched(display))
            report = summary.report()
            display.finish(report, report.seconds, is_done=True, is_saved=True)
        except KeyboardInterrupt:
            written = f" Written: {path}." if (path := display.keep_trace()) else ""
            raise Interrupted(f"Interrupted; the job goes on.{written}") from None
        except ConnectionRefusedError:
            display.fail(f"There is no server at {connect}: start it, or correct its address.", code=2)
        except (OSError, ValueError) as error:
            display.fail(f"{connect} cannot be watched: {error}.", code=2)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a job's checkpoints.")],
    target: Annotated[Path, typer.Argument(help="The file to write: .safetensors, or .pt for torch.load.")],
) -> None:
    """Write a checkpoint's model as a plain state_dict."""
    from paceline.model.checkpoint import CheckpointError
    from paceline.model.export import FORMATS
    from paceline.model.export import export as write

    check_target(target, "The target")
    if target.suffix not in FORMATS:
        refuse(f"The target must be named {' or '.join('*' + each for each in FORMATS)}, not {target.name!r}.")
    try:
        version, tensors = write(checkpoint, target, lambda note: errors.print(Text(note)))
    except (CheckpointError, ValueError) as error:
        refuse(str(error))
    typer.echo(f"{target}: {tensors} tensors of version {version}.")


def replay(
    folder: Annotated[Path, typer.Argument(help="The folder that --record-updates wrote to.")],
) -> None:
    """Repeat a recorded job, and check it bit for bit.

    Every decision of the policy and every weight of the model must be the same as in the recording.
    """
    need_torch()
    from paceline.model.optimizer import without_compiler
    from paceline.serve.replay import ReplayError, journals, weights
    from paceline.simulate.journal_replay import replay_journal

    without_compiler()
    same = True
    try:
        for path in journals(folder):
            with path.open() as lines:
                count, difference = replay_journal(lines)
            if difference:
                same = False
                typer.echo(f"{path.name}: line {difference.line} has another decision now: {difference.decided}.")
            else:
                typer.echo(f"{path.name}: {count} decisions, all the same.")
        for part in weights(folder):
            verdict = "the same, bit for bit" if part.same else "not the same" if part.whole else "cut short"
            typer.echo(f"{part.name}: {part.updates} updates, weights of version {part.version}: {verdict}.")
            same = same and (part.same or not part.whole)
    except (ReplayError, ValueError, KeyError) as error:
        refuse(str(error))
    raise typer.Exit(0 if same else 1)
