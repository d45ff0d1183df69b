"""Push, apply and pull a model between two processes, compared with bare TCP and the transports of other libraries.

python benchmarks/wire.py [--json] [--megabytes 100] [--rounds 15]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks.transports import measure
from paceline.cli.shared import progress_bar


def main() -> None:
    """Measure all transports, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--megabytes", type=_positive, default=100, help="size of the model")
    parser.add_argument("--rounds", type=_positive, default=15, help="number of timed exchanges")
    args = parser.parse_args()
    tasks = {}
    with progress_bar(quiet=args.json) as progress:

        def advance(transports: str, part: float) -> None:
            if transports not in tasks:
                tasks[transports] = progress.add_task(transports, total=1.0)
            progress.update(tasks[transports], completed=part)

        try:
            result = measure.measure(args.megabytes, args.rounds, progress=advance)
        except measure.BenchError as error:
            parser.error(str(error))
    if args.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
        return
    table = Table(title=f"{args.megabytes} MB in each direction", title_justify="left")
    for column in ("transport", "ms", "GB/s", "of bare TCP"):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for row in measure.rows(result):
        table.add_row(*row)
    Console(highlight=False).print(table)
    if result.ratio_to_tcp_with_apply:
        print(f"paceline: {result.ratio_to_tcp_with_apply:.2f} of TCP that also applies the step")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    main()
