"""Measure how long a training step takes: the script trains alone for a while, is timed, and ends early.

Beside the time on the clock, the CPU time of each step is measured, and how long threads waited for a core. So the
load of the machine can be told apart from the script's own jitter.

`paceline advise` sets PACELINE_PROBE to the file that receives the result. The script itself runs unchanged, except
that it ends early, as if it had called sys.exit(0).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.model.optimizer import spec_of
from paceline.serve.environment import PROBE, PROBE_SECONDS, PROBE_STEPS
from paceline.train.flat_model import FlatModel
from paceline.train.optimizer import PacedOptimizer


def wanted(variables: Mapping[str, str] | None = None) -> bool:
    """Return whether this process runs in order to be timed."""
    return bool((os.environ if variables is None else variables).get(PROBE))


class StepProfiler:
    """Times an optimizer's steps. Each time runs from the end of one step until the next gradients are computed."""

    def __init__(self, model: torch.nn.Module, optimizer: PacedOptimizer, buffers: bool = True) -> None:
        self._path = Path(os.environ[PROBE])
        self._max_steps, self._max_seconds = int(os.environ[PROBE_STEPS]), float(os.environ[PROBE_SECONDS])
        self._optimizer = optimizer
        flat = FlatModel(model, optimizer.inner, buffers=buffers)  # raises what a job would refuse
        self._bytes, self._device = 4 * flat.layout.size, str(flat.device)
        self._seconds: list[float] = []
        self._cpu_seconds: list[float] = []
        self._batches: list[int] = []
        self._samples_taken = 0  # from the session, up to the last step
        self._samples_forwarded = 0  # through the model, since the last step
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        optimizer.inner.register_step_pre_hook(self._before_step)
        optimizer.inner.register_step_post_hook(self._after_step)
        self._started_at = self._step_ended_at = self._waits_since = time.perf_counter()
        self._step_ended_cpu = time.process_time()
        self._waits = core_waits()
        self.write()  # shows that the script has joined, even if it never makes a step

    def write(self) -> None:
        """Write what was measured so far to the file."""
        part = self._path.with_name(self._path.name + ".part")
        measured = {
            "seconds": self._seconds,
            "cpu_seconds": self._cpu_seconds,
            "waited": self._waited_share(),
            "threads": torch.get_num_threads(),
            "batches": self._batches,
            "model_bytes": self._bytes,
            "device": self._device,
            "optimizer": spec_of(self._optimizer.inner).as_json(),
        }
        part.write_text(json.dumps(measured))
        part.replace(self._path)

    def _before_forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the samples that pass through the model, for a loop that does not take its batches from a session."""
        if model.training:
            first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
            self._samples_forwarded += first.shape[0] if first is not None and first.dim() else 0

    def _before_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(callable(each) for each in (*args, *kwargs.values())):  # with a closure, step() computes
            self._record()

    def _after_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(each) for each in (*args, *kwargs.values())):
            self._record()
        taken = self._optimizer.samples_taken - self._samples_taken
        self._samples_taken = self._optimizer.samples_taken
        self._batches.append(taken or self._optimizer.batch_size or self._samples_forwarded)
        self._samples_forwarded = 0
        if len(self._seconds) >= self._max_steps or time.perf_counter() - self._started_at >= self._max_seconds:
            self.write()
            raise SystemExit(0)
        self._wait_for_gpu()
        if len(self._seconds) == 1:  # the first step loads and compiles
            self._waits, self._waits_since = core_waits(), time.perf_counter()
        self._step_ended_at, self._step_ended_cpu = time.perf_counter(), time.process_time()

    def _record(self) -> None:
        self._wait_for_gpu()
        self._seconds.append(time.perf_counter() - self._step_ended_at)
        self._cpu_seconds.append(time.process_time() - self._step_ended_cpu)

    def _waited_share(self) -> float | None:
        """Return the share of the time that some thread waited for a core. None if the system does not say."""
        if not self._waits:
            return None
        seconds = max(time.perf_counter() - self._waits_since, 1e-9)
        return max(now - self._waits.get(thread, 0.0) for thread, now in core_waits().items()) / seconds

    def _wait_for_gpu(self) -> None:
        if self._device.startswith("cuda"):
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._device)


def core_waits() -> dict[str, float]:
    """Return the seconds that each thread of this process has waited for a core so far, as Linux counts them."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, IndexError, ValueError):  # a thread that has just ended
                words = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
                found[thread] = int(words[1]) / 1e9
    return found
