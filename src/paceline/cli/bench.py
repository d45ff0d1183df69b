"""`paceline bench`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.shared import refuse
from paceline.cli.simulate import progress_bar

bench = typer.Typer(help="Measure what the real thing costs on this machine.", no_args_is_help=True)


@bench.command()
def wire(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    megabytes: Annotated[int, typer.Option(min=1, help="Size of the model that is pushed, applied and pulled.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Exchanges that are timed.")] = 15,
) -> None:
    """Push, apply and pull between two processes, beside bare TCP and other libraries' transports."""
    if importlib.util.find_spec("torch") is None:
        refuse("The bench needs torch: pip install 'paceline[torch]'.")
    from paceline.bench import wire as measuring  # only now: it needs what `simulate` does not

    tasks: dict[str, Any] = {}
    with progress_bar(quiet=as_json) as progress:

        def advance(transports: str, part: float) -> None:
            if transports not in tasks:
                tasks[transports] = progress.add_task(transports, total=1.0)
            progress.update(tasks[transports], completed=part)

        try:
            result = measuring.measure(megabytes, rounds, progress=advance)
        except measuring.BenchError as error:
            refuse(str(error))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result), indent=2))
        return
    table = Table(title=f"{megabytes} MB there and back", title_justify="left")
    for column in ("transport", "ms", "GB/s", "of bare TCP"):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for row in measuring.rows(result):
        table.add_row(*row)
    Console(highlight=False).print(table)
    if result.ratio_to_tcp_with_apply:
        typer.echo(f"paceline: {result.ratio_to_tcp_with_apply:.2f} of TCP that applies the step too")
