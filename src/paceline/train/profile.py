"""How long a step takes: a script that is run for that trains alone for a while, is timed, and ends.

`paceline advise` sets PACELINE_PROBE to the file that is to be written. Nothing of it is seen by the script, except
that it ends early, as by sys.exit(0).
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
    """Is this process run to be timed?"""
    return bool((os.environ if variables is None else variables).get(PROBE))


class StepProfiler:
    """Times the steps of an optimizer: from the end of one to the gradients of the next being there."""

    def __init__(self, model: torch.nn.Module, optimizer: PacedOptimizer, buffers: bool = True) -> None:
        self._path = Path(os.environ[PROBE])
        self._most, self._limit = int(os.environ[PROBE_STEPS]), float(os.environ[PROBE_SECONDS])
        self._optimizer = optimizer
        flat = FlatModel(model, optimizer.inner, buffers=buffers)  # so that what a job would refuse is refused now
        self._bytes, self._device = 4 * flat.layout.size, str(flat.device)
        self._seconds: list[float] = []
        self._batches: list[int] = []
        self._handed_out = self._seen = 0
        model.register_forward_pre_hook(self._forward, with_kwargs=True)
        optimizer.inner.register_step_pre_hook(self._before)
        optimizer.inner.register_step_post_hook(self._after)
        self._began = self._since = time.perf_counter()
        self.write()  # it has joined, at least

    def write(self) -> None:
        """Put down what was seen so far."""
        part = self._path.with_name(self._path.name + ".part")
        seen = {
            "seconds": self._seconds,
            "batches": self._batches,
            "model_bytes": self._bytes,
            "device": self._device,
            "optimizer": spec_of(self._optimizer.inner).as_json(),
        }
        part.write_text(json.dumps(seen))
        part.replace(self._path)

    def _forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Samples that go through the model, for a loop that gets them from elsewhere."""
        if model.training:
            first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
            self._seen += first.shape[0] if first is not None and first.dim() else 0

    def _before(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(callable(each) for each in (*args, *kwargs.values())):  # else computing is a part of the step
            self._note()

    def _after(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(each) for each in (*args, *kwargs.values())):
            self._note()
        handed_out, self._handed_out = self._optimizer.handed_out - self._handed_out, self._optimizer.handed_out
        self._batches.append(handed_out or self._optimizer.batch_size or self._seen)
        self._seen = 0
        if len(self._seconds) >= self._most or time.perf_counter() - self._began >= self._limit:
            self.write()
            raise SystemExit(0)
        self._wait()
        self._since = time.perf_counter()

    def _note(self) -> None:
        self._wait()
        self._seconds.append(time.perf_counter() - self._since)

    def _wait(self) -> None:
        """What a GPU was told to do is done when it says so."""
        if self._device.startswith("cuda"):
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
