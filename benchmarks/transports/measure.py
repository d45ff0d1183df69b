"""Measures transports: a model is pushed, applied and pulled between two processes on one machine.

Figures are ratios to a bare TCP exchange of the same bytes, which alternates with the transport in the same run,
because machines are shared and noisy. Each foreign transport is measured in its own process with its own bare TCP
exchange, so that its threads and helpers disturb no other transport.
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
#: Foreign transports, and the module that each needs.
OTHERS = {"gloo": "torch", "pyzmq": "zmq", "ray": "ray", "torch_rpc": "torch"}
ALL = (*OURS, *OTHERS)
PATIENCE = 60.0  # seconds without output before a block is given up
STOPPING = 10.0  # seconds before a block that does not stop is killed
COPIES = 8  # copies of the model that the largest block holds in memory


class BenchError(RuntimeError):
    """The benchmark cannot run here. The message says what to do."""


@dataclass(frozen=True)
class TransportResult:
    """The result of one transport. If it could not be measured, it has a fault and no figures."""

    transport: str
    seconds: float | None = None  # the median of an exchange
    best_seconds: float | None = None
    gigabytes_per_second: float | None = None  # in both directions together
    ratio_to_tcp: float | None = None  # bare TCP's seconds over this transport's, the median over the rounds
    fault: str | None = None


@dataclass(frozen=True)
class WireResult:
    """The results of all transports in one run."""

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
    """Measure the transports, and always bare TCP. All started processes are stopped before this returns or raises.

    progress: called with the transports that are being measured, and the finished share of their rounds.
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
    """Yield the rows of a table: transport, milliseconds, GB/s, ratio to bare TCP."""
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
    """Return the median ratio over the rounds. The two exchanges of a round meet the same conditions."""
    if not base or not seconds:
        return None
    return statistics.median(one / other for one, other in zip(base, seconds, strict=True))


def _must_fit(megabytes: int) -> None:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) // 1024
        if megabytes * COPIES > free:
            raise BenchError(
                f"A model of {megabytes} MB needs {megabytes * COPIES} MB of memory, but {free} MB are free. Use fewer "
                "--megabytes."
            )


def _run(
    names: Sequence[str], elements: int, rounds: int, progress: Callable[[str, float], None]
) -> dict[str, list[float]]:
    """Run a block. Return the seconds of every timed exchange, by transport."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    right = dict.fromkeys(names, False)
    shown = ", ".join(name for name in names if name != "tcp") or "tcp"
    with _block([str(elements), str(rounds), ",".join(names)]) as lines:
        progress(shown, 0.0)
        while line := _next(lines):
            report = json.loads(line)
            if "right" in report:
                right[report["transport"]] = report["right"]
                continue
            seconds[report["transport"]].append(report["seconds"])
            progress(shown, sum(map(len, seconds.values())) / (rounds * len(names)))
    for name in names:
        if len(seconds[name]) < rounds:
            raise BenchError("failed; its output above says why")
        if not right[name]:
            raise BenchError(f"{name} returned wrong bytes")
    return seconds


@contextlib.contextmanager
def _block(arguments: list[str]) -> Iterator[queue.SimpleQueue[str]]:
    """Start the process of a block. Yield the queue of the lines that it prints; an empty line is the last one."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.transports.block", *arguments]
    # In its own process group, so that Ctrl-C reaches only this process, and all of the block can be killed.
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
        raise BenchError(f"gave no output for {PATIENCE:.0f} s") from None
