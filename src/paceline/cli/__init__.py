"""The `paceline` command. Each command reads its options, calls the library and shows the result."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer
from rich.text import Text

import paceline
from paceline.cli import job, job_files
from paceline.cli.advise import advise
from paceline.cli.collective import collective
from paceline.cli.federate import federate
from paceline.cli.interruption import Interrupted
from paceline.cli.lab import lab
from paceline.cli.options import THEN_SCRIPT
from paceline.cli.policies import clusters, policies
from paceline.cli.reproduce import reproduce
from paceline.cli.shard import shard
from paceline.cli.shared import INTERRUPTED, errors, refuse
from paceline.cli.simulate import simulate
from paceline.cli.token import certificate, token
from paceline.cli.work import work
from paceline.policies import PolicyError
from paceline.simulate import ClusterError, SimulationError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Distributed training over slow networks and unequal machines.",
)

WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}  # such as a full disk
#: The base class of typer's errors for a wrong command line. Its module differs between versions of typer.
UsageError: Any = typer.BadParameter.__bases__[0]


def main() -> None:
    """Run the command. An error that a person can correct is one sentence, and exit code 2."""
    sys.path.insert(0, os.getcwd())  # so that `module:Class` finds a policy in the current folder
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="paceline", standalone_mode=False)
    except (PolicyError, ClusterError, SimulationError) as error:
        refuse(str(error))
    except UsageError as error:
        said = error.format_message()
        command = error.ctx.command_path if error.ctx else "paceline"
        refuse(f"{said}{'' if said[-1:] in '.?' else '.'} See `{command} --help`.")
    except Interrupted as error:
        errors.print(Text(str(error)))
        sys.exit(error.code)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        reason = "cannot be written" if error.errno in WRITE_ERRORS else "cannot be used"
        refuse(f"{error.filename or 'A file'} {reason}: {error.strerror}.")
    if code == INTERRUPTED:
        errors.print("Interrupted; nothing was written.")
    sys.exit(code)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if show:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


TRAIN, DECIDE, RESEARCH = "Train", "Decide", "Research"

app.command(rich_help_panel=TRAIN, context_settings=THEN_SCRIPT)(job.run)
app.command(rich_help_panel=TRAIN)(job.serve)
app.command(rich_help_panel=TRAIN, context_settings=THEN_SCRIPT)(work)
app.command(rich_help_panel=TRAIN)(shard)
app.command(rich_help_panel=TRAIN)(job_files.watch)
app.command(rich_help_panel=TRAIN)(token)
app.command(rich_help_panel=TRAIN)(certificate)
app.command(rich_help_panel=TRAIN)(job_files.export)
app.command(rich_help_panel=TRAIN)(job_files.replay)
app.command(rich_help_panel=DECIDE, context_settings=THEN_SCRIPT)(advise)
app.command(rich_help_panel=DECIDE)(simulate)
app.command(rich_help_panel=DECIDE)(lab)
app.command(rich_help_panel=RESEARCH)(reproduce)
app.add_typer(federate, name="federate", rich_help_panel=RESEARCH)
app.command(rich_help_panel=RESEARCH)(collective)
app.add_typer(policies, name="policies", rich_help_panel=RESEARCH)
app.command(rich_help_panel=RESEARCH)(clusters)
