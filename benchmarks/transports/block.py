"""Measure some transports together, round by round: `python -m benchmarks.transports.block ELEMENTS ROUNDS NAMES`.

Each timed exchange is a line of JSON on standard output. This is a separate process, so that its parent can kill it if
a library hangs.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from typing import Any

from benchmarks.transports.clients import OPEN, Transport
from benchmarks.transports.load import Buffers

WARM_UP = 3  # rounds that are not timed, in which pages are touched and TCP windows grow


def measure(elements: int, rounds: int, names: list[str]) -> None:
    """Open all transports, and let them exchange one after the other in every round."""
    buffers = Buffers.of(elements)
    with contextlib.ExitStack() as stack:
        opened: dict[str, Transport] = {}
        for name in names:
            opened[name] = OPEN[name](buffers)
            stack.callback(opened[name].close)
        total = WARM_UP + rounds
        for number in range(total):
            # The order alternates, so that no transport always follows the same one.
            for name in names if number % 2 else reversed(names):
                if number == total - 1:
                    buffers.weights.zero_()  # so that the check below sees only what this round received
                began = time.perf_counter()
                opened[name].exchange()
                seconds = time.perf_counter() - began
                if number >= WARM_UP:
                    _print(transport=name, seconds=seconds)
                if number == total - 1:
                    _print(transport=name, right=_is_right(name, buffers, total))


def _is_right(name: str, buffers: Buffers, steps: int) -> bool:
    """Return whether the right bytes came back: from bare TCP the gradient, else the weights after all steps."""
    if name == "tcp":
        return buffers.weights.equal(buffers.gradient)
    return buffers.hold_steps(steps)


def _print(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # close all transports
    elements, rounds, names = sys.argv[1:]
    measure(int(elements), int(rounds), names.split(","))


if __name__ == "__main__":
    main()
