"""What carries the bytes, and how well: a model pushed, applied and pulled between two processes on this machine.

Everything is a ratio to a bare TCP exchange of the same bytes, in the same run and in turns with it, since machines are
shared and noisy. A transport other than paceline's is measured in a block of its own with bare TCP, so that its threads
and helpers disturb nobody else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks import environment

OURS = ("tcp", "tcp_with_apply", "paceline")
#: The others, and the module that each needs.
OTHERS = {"gloo": "torch", "pyzmq": "zmq", "ray": "ray", "torch_rpc": "torch"}
ALL = (*OURS, *OTHERS)
PATIENCE = 60.0  # seconds without a word before a block is given up
STOPPING = 10.0  # seconds that a block has to stop before it is killed
COPIES = 8  # of the model, that the largest block holds in memory at a time


class BenchError(RuntimeError):
    """It cannot be measured here; the message says what to do."""


@dataclass(frozen=True)
class TransportResult:
    """How one transport did. What could not be measured has a fault, and no figures."""

    transport: str
    seconds: float | None = None  # of one exchange, the median
    best_seconds: float | None = None
    gigabytes_per_second: float | None = None  # bytes both ways
    ratio_to_tcp: float | None = None  # bare TCP's seconds over this one's, the median over the rounds
    fault: str | None = None


@dataclass(frozen=True)
class WireResult:
    """One run."""

    megabytes: int
    rounds: int
    ratio_to_tcp: float | None
    ratio_to_tcp_with_apply: float | None
    transports: tuple[TransportResult, ...]


def measure(
    megabytes: int = 100,
    rounds: int = 15,
    transports: Sequence[str] = ALL,
    progress: Callable[[str, float], None] = lambda _transport, _part: None,
) -> WireResult:
    """Measure these transports. Bare TCP is always among them.

    `progress` is told which transports are being measured, and which part of their rounds is done. Whatever was
    started is stopped on the way out, whichever way that is.
    """
    _must_fit(megabytes)
    elements = megabytes * 1_000_000 // 4
    ours = [name for name in OURS if name in transports or name == "tcp"]
    blocks = [ours, *(["tcp", name] for name in OTHERS if name in transports)]
    figures: list[TransportResult] = []
    seconds: dict[str, list[float]] = {}
    for block in blocks:
        measured = [name for name in block if name not in {figure.transport for figure in figures}]
        if any(importlib.util.find_spec(OTHERS.get(name, "torch")) is None for name in measured):
            figures += [TransportResult(name, fault="not installed") for name in measured]
            continue
        try:
            found = _run(block, elements, rounds, progress)
        except BenchError as error:
            figures += [TransportResult(name, fault=str(error)) for name in measured]
            continue
        figures += [_figure(name, found[name], found["tcp"], megabytes) for name in measured]
        if block is ours:
            seconds = found
    mine = seconds.get("paceline")
    return WireResult(
        megabytes,
        rounds,
        _ratio(seconds.get("tcp"), mine),
        _ratio(seconds.get("tcp_with_apply"), mine),
        tuple(figures),
    )


def rows(result: WireResult) -> Iterator[tuple[str, str, str, str]]:
    """A table of it: transport, milliseconds, GB/s, part of bare TCP's speed."""
    for figure in result.transports:
        if figure.seconds is None or figure.gigabytes_per_second is None or figure.ratio_to_tcp is None:
            yield figure.transport, figure.fault or "", "", ""
        else:
            rate, ratio = figure.gigabytes_per_second, figure.ratio_to_tcp
            yield figure.transport, f"{figure.seconds * 1e3:.1f}", f"{rate:.2f}", f"{ratio:.2f}"


def _figure(name: str, seconds: list[float], tcp: list[float], megabytes: int) -> TransportResult:
    median = statistics.median(seconds)
    return TransportResult(name, median, min(seconds), 2 * megabytes / 1e3 / median, _ratio(tcp, seconds))


def _ratio(base: list[float] | None, seconds: list[float] | None) -> float | None:
    """Round by round, since the two of one round met the same machine."""
    if not base or not seconds:
        return None
    return statistics.median(its / ours for its, ours in zip(base, seconds, strict=True))


def _must_fit(megabytes: int) -> None:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) // 1024
        if megabytes * COPIES > free:
            raise BenchError(
                f"{megabytes} MB need {megabytes * COPIES} MB of memory, and {free} are free; give fewer --megabytes."
            )


def _run(
    names: Sequence[str], elements: int, rounds: int, progress: Callable[[str, float], None]
) -> dict[str, list[float]]:
    """The seconds of every timed exchange of a block."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    right = dict.fromkeys(names, False)
    shown = ", ".join(name for name in names if name != "tcp") or "tcp"
    with _block([str(elements), str(rounds), ",".join(names)]) as lines:
        progress(shown, 0.0)
        while line := _next(lines):
            said = json.loads(line)
            if "right" in said:
                right[said["transport"]] = said["right"]
                continue
            seconds[said["transport"]].append(said["seconds"])
            progress(shown, sum(map(len, seconds.values())) / (rounds * len(names)))
    for name in names:
        if len(seconds[name]) < rounds:
            raise BenchError("failed; its output above says why")
        if not right[name]:
            raise BenchError(f"{name} gave back other bytes than it had to")
    return seconds


@contextlib.contextmanager
def _block(arguments: list[str]) -> Iterator[queue.SimpleQueue[str]]:
    """The process of a block, and the lines that it says; the last one is empty."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.transports.block", *arguments]
    # In a group of its own: a Ctrl-C reaches us alone, and nobody of it outlives us.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment())
    assert process.stdout is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        yield lines
        process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        process.stdout.close()


def _read(output: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in output:
        lines.put(line)
    lines.put("")


def _next(lines: queue.SimpleQueue[str]) -> str:
    try:
        return lines.get(timeout=PATIENCE)
    except queue.Empty:
        raise BenchError(f"gave no answer for {PATIENCE:.0f} s") from None
