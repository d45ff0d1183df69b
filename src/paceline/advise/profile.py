"""Profiles a training script: runs it alone on this machine for a while, and measures the time of its steps."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.launch.processes import JobError, ending, heard, lines, start, stop
from paceline.model.correction import chosen
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.serve.environment import CONNECT, LAUNCHED, PROBE, PROBE_SECONDS, PROBE_STEPS, REFUSAL, REFUSED

FIRST = 5  # steps that are left out, because they load, compile and allocate
PAUSE = 3.0  # times the median; a longer step includes a pause, such as an evaluation or a checkpoint
MAX_SIGMA = 1.0  # the largest jitter of a profile
LAST_LINES = 15  # lines of a failed script's standard error that are shown


@dataclass(frozen=True)
class ScriptProfile:
    """The measured compute time of a script, its batch, its model and its optimizer."""

    seconds: float  # compute time of an iteration
    jitter: float  # relative spread of the compute time
    batch: int  # samples in an iteration; 1 if unknown
    model_bytes: float
    steps: int  # number of steps that were counted
    device: str
    optimizer: OptimizerSpec | None = None

    @property
    def samples_per_second(self) -> float:
        return self.batch / self.seconds

    @property
    def optimizer_name(self) -> str:
        """The optimizer in words, such as "SGD with momentum"."""
        if self.optimizer is None:
            return "unknown"
        momentum = self.optimizer.name == "SGD" and chosen("auto", self.optimizer) == "full"
        return f"{self.optimizer.name} with momentum" if momentum else self.optimizer.name


async def timed(script: Sequence[str], steps: int, seconds: float, patience: float) -> ScriptProfile:
    """Run a script until it has made `steps` steps or trained for `seconds`, and return its profile.

    patience: seconds after which the script is stopped with a JobError.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "probe.json"
        environment = {name: value for name, value in os.environ.items() if name != CONNECT}
        environment |= {PROBE: str(path), PROBE_STEPS: str(steps), PROBE_SECONDS: str(seconds), LAUNCHED: "1"}
        process = await start([sys.executable, *script], environment, capture=True)
        last_lines: deque[str] = deque(maxlen=LAST_LINES)
        readers = [
            asyncio.ensure_future(_read(process.stdout, None)),
            asyncio.ensure_future(_read(process.stderr, last_lines)),
        ]
        try:
            code = await asyncio.wait_for(process.wait(), patience)
        except TimeoutError:
            raise JobError(
                f"{script[0]} did not make {steps} steps within {patience:g} s. Reduce --steps or increase --patience."
            ) from None
        finally:
            await stop([process])
            await heard(readers)
        if code == REFUSED:
            refusal = [line.removeprefix(REFUSAL) for line in last_lines if line.startswith(REFUSAL)]
            raise JobError(refusal[-1] if refusal else f"{script[0]} {ending(code)}.")
        if code:
            output = "".join(f"\n  {line}" for line in last_lines)
            raise JobError(f"{script[0]} {ending(code)}." + (f" Its last output:{output}" if output else ""))
        if not path.exists():
            raise JobError(f"{script[0]} never called paceline.join or paceline.wrap, so no step could be timed.")
        seen = json.loads(path.read_text())
    if not seen["seconds"]:
        raise JobError(f"{script[0]} joined but made no step, so there was nothing to time.")
    found = judged(seen["seconds"], seen["batches"], seen["model_bytes"], seen["device"])
    return replace(found, optimizer=OptimizerSpec.from_json(seen["optimizer"]))


def judged(seconds: Sequence[float], batches: Sequence[int], model_bytes: float, device: str) -> ScriptProfile:
    """Return a profile from the times of single steps. The first steps and pauses between steps are left out."""
    first = min(FIRST, (len(seconds) - 1) // 2)
    counted = seconds[first:]
    median = statistics.median(counted)
    counted = [each for each in counted if each <= PAUSE * median]
    mean = max(statistics.fmean(counted), 1e-6)
    spread = statistics.pstdev(counted) / mean
    batch = statistics.mode(batches) if batches else 1
    return ScriptProfile(mean, min(round(spread, 4), MAX_SIGMA), max(1, batch), model_bytes, len(counted), device)


async def _read(stream: asyncio.StreamReader | None, keep: deque[str] | None) -> None:
    """Read a stream to its end, so that the script never blocks on it."""
    async for line in lines(stream):
        if keep is not None:
            keep.append(line)
