"""Measure some transports together, round by round: `python -m benchmarks.transports.block ELEMENTS ROUNDS NAMES`.

Each timed exchange is a line of JSON on standard output. That it is a process of its own lets whoever started it give
it up when a library hangs.
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

WARM_UP = 3  # rounds before those that count: pages are touched, windows grow


def measure(elements: int, rounds: int, names: list[str]) -> None:
    """Open them all, and let one after the other exchange, in turns."""
    buffers = Buffers.of(elements)
    with contextlib.ExitStack() as stack:
        opened: dict[str, Transport] = {}
        for name in names:
            opened[name] = OPEN[name](buffers)
            stack.callback(opened[name].close)
        total = WARM_UP + rounds
        for number in range(total):
            # Forwards and backwards in turn, so that none always follows the same one.
            for name in names if number % 2 else reversed(names):
                if number == total - 1:
                    buffers.weights.zero_()  # what is found there afterwards was received in this round
                began = time.perf_counter()
                opened[name].exchange()
                seconds = time.perf_counter() - began
                if number >= WARM_UP:
                    _say(transport=name, seconds=seconds)
                if number == total - 1:
                    _say(transport=name, right=_is_right(name, buffers, total))


def _is_right(name: str, buffers: Buffers, steps: int) -> bool:
    """Is what came back what had to? Bare sockets give back what they were sent; the others have made the steps."""
    if name == "tcp":
        return buffers.weights.equal(buffers.gradient)
    return buffers.hold_steps(steps)


def _say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was opened is closed
    elements, rounds, names = sys.argv[1:]
    measure(int(elements), int(rounds), names.split(","))


if __name__ == "__main__":
    main()
