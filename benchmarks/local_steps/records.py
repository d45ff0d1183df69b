"""Recorded runs: a line of JSON for each."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.local_steps.arms import arm_of
from benchmarks.local_steps.data import Data
from benchmarks.local_steps.size import SIZES
from benchmarks.local_steps.training import Machine, Training

Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The settings of a run."""

    arm: str
    rate: float  # of the server
    seed: int
    updates: str
    size: str

    def is_of(self, line: Line) -> bool:
        """Is a recorded line one of this run?"""
        return all(line[name] == value for name, value in vars(self).items())


class Recorder:
    """Makes runs that have not been recorded yet, and stops in time."""

    def __init__(self, out: Path, data: Data, on: Machine, limit: float) -> None:
        self.out, self.data, self.on = out, data, on
        self.end = time.monotonic() + limit
        self.lines = read([out]) if out.exists() else []
        self.longest = 0.0  # seconds of a run

    def loss(self, run: Run) -> float:
        """Return the loss of a run, recorded or new; infinity: it diverged.

        Raise TimeoutError if a new run may not end before the limit.
        """
        known = next((line for line in self.lines if run.is_of(line)), None)
        if known is None:
            known = self._record(run)
        loss: float | None = known["loss"]
        return math.inf if loss is None else loss

    def _record(self, run: Run) -> Line:
        began = time.monotonic()
        if began + self.longest > self.end:
            raise TimeoutError
        arm = arm_of(run.arm, SIZES[run.size])
        found = Training(self.data, arm, run.rate, run.updates, run.seed, self.on).run()
        seconds = time.monotonic() - began
        self.longest = max(seconds, self.longest)
        device = torch.cuda.get_device_name() if self.on.device == "cuda" else self.on.device
        line = vars(run) | found | {"seconds": round(seconds, 2), "device": device}
        self.lines.append(line)
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{run}: loss {line['loss']}, {seconds:.1f} s", flush=True)
        return line


def record_all(
    recorder: Recorder, arms: Iterable[str], rates: Sequence[float], seeds: Sequence[int], updates: str, size: str
) -> None:
    """Run each arm with all rates on the first seed, and with the best of them on the others."""
    for word in arms:
        arm, _, rate = word.partition("@")
        tried = [float(rate)] if rate else rates
        found = {each: recorder.loss(Run(arm, each, seeds[0], updates, size)) for each in tried}
        best = min(found, key=lambda each: found[each])
        if math.isfinite(found[best]):
            for seed in seeds[1:]:
                recorder.loss(Run(arm, best, seed, updates, size))


def read(files: Iterable[Path]) -> list[Line]:
    """Return the lines of these files."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
