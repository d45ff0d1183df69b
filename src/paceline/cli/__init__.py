"""The `paceline` command: thin, it reads what was asked, calls the library and shows what came out."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

import paceline
from paceline.cli import simulate, train
from paceline.cli.advise import advise
from paceline.cli.collective import collective, topology
from paceline.cli.federate import federate
from paceline.cli.lab import lab
from paceline.cli.learn import learn
from paceline.cli.reproduce import reproduce
from paceline.cli.rlp import rlp
from paceline.cli.shared import errors, refuse
from paceline.policies import PolicyError
from paceline.simulate import ClusterError, SimulationError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Synchronization policies for distributed training: simulate them on your cluster before you run them on it.",
)

#: What typer raises for a command line it cannot make sense of; where it lives differs between versions of typer.
UsageError: Any = typer.BadParameter.__bases__[0]
INTERRUPTED = 130


def main() -> None:
    """Run the command. What a person can put right is said in one sentence, with exit code 2."""
    sys.path.insert(0, os.getcwd())  # so that `module:Class` finds a policy in the folder one is working in
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="paceline", standalone_mode=False)
    except (PolicyError, ClusterError, SimulationError) as error:
        refuse(str(error))
    except UsageError as error:
        said = error.format_message()
        command = error.ctx.command_path if error.ctx else "paceline"
        refuse(f"{said}{'' if said[-1:] in '.?' else '.'} See `{command} --help`.")
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # such as a full disk
        refuse(f"{error.filename or 'A file'} cannot be written: {error.strerror}.")
    if code == INTERRUPTED:
        errors.print("Interrupted; nothing was written.")
    sys.exit(code)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if show:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


app.command()(simulate.simulate)
app.command()(simulate.policies)
app.command()(simulate.clusters)
app.command()(learn)
app.command()(lab)
app.command()(reproduce)
app.command()(topology)
app.command()(collective)
app.command(context_settings=train.THEN_COMMAND)(advise)
app.command(context_settings=train.THEN_COMMAND)(train.run)
app.command()(train.serve)
app.command(context_settings=train.THEN_COMMAND)(train.work)
app.command()(train.watch)
app.command()(train.export)
app.command()(train.replay)
app.add_typer(federate, name="federate")
app.add_typer(rlp, name="rlp")
