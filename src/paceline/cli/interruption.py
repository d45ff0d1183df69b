"""Stop a job on Ctrl-C or SIGTERM. Report the files that were written, and the command that continues the job."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.shared import INTERRUPTED

if TYPE_CHECKING:
    from paceline.serve.job_options import JobOptions


class Interrupted(Exception):
    """A command was stopped by a signal. The message says what was written."""

    def __init__(self, message: str = "", code: int = INTERRUPTED) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def stop_signals(ask: Callable[[], None] | None = None) -> Iterator[asyncio.Event]:
    """Cancel the current task at the first SIGINT or SIGTERM, and raise Interrupted once it has cleaned up.

    ask: is called at the first SIGTERM instead. Another signal then cancels the task.
    Later signals, also those after this context, only set the event: the cleanup takes seconds, and must not be cut
    short.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    received: list[int] = []
    again = asyncio.Event()

    def stop(number: int) -> None:
        nonlocal ask
        if number == signal.SIGTERM and ask and not received:
            asked, ask = ask, None
            asked()
        elif not received:
            received.append(number)
            task.cancel()
        else:
            again.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield again
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(code=128 + received[0]) from None
    finally:
        received.append(0)


def stopped_job(job: JobOptions, trace: Path | None = None) -> str:
    """Return the message for a job that was stopped. trace: the file of its trace."""
    files = [str(path) for path in (trace, job.record) if path and path.exists()]
    said = f"Interrupted. Written: {', '.join(files)}." if files else "Interrupted."
    if not job.shards:
        return said
    if job.saving is None:
        return f"{said} The model was not saved; with --checkpoint FOLDER, a job can be continued."
    from paceline.model.checkpoint import CheckpointError, newest

    folder = job.saving.folder
    try:
        found = newest(folder, quick=True)
    except CheckpointError as error:
        return f"{said} {error}"
    if found is None:
        return f"{said} There was nothing to save yet."
    return f"{said} Continue the job from its checkpoint of version {found.version} with --resume {folder}."
