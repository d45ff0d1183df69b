"""What a step of a training script takes on this machine: the script is run alone for a while, and timed."""

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

FIRST = 5  # steps that are left out: they load, compile and allocate
PAUSE = 3.0  # times the median: what takes longer is no step, but an evaluation or a checkpoint between two
MAX_SIGMA = 1.0
LAST_WORDS = 15  # lines of a script that failed that are shown


@dataclass(frozen=True)
class ScriptProfile:
    """What was measured of a script."""

    seconds: float  # of computing, an iteration
    jitter: float  # relative spread of it
    batch: int  # samples in an iteration; 1 if nobody says
    model_bytes: float
    steps: int  # that were counted
    device: str
    optimizer: OptimizerSpec | None = None

    @property
    def samples_per_second(self) -> float:
        return self.batch / self.seconds

    @property
    def optimizer_name(self) -> str:
        """In words."""
        if self.optimizer is None:
            return "unknown"
        momentum = self.optimizer.name == "SGD" and chosen("auto", self.optimizer) == "full"
        return f"{self.optimizer.name} with momentum" if momentum else self.optimizer.name


async def timed(script: Sequence[str], steps: int, seconds: float, patience: float) -> ScriptProfile:
    """Run a script until it has made so many steps, or has trained for so many seconds, and end it.

    patience: seconds after which it is given up.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "probe.json"
        environment = {name: value for name, value in os.environ.items() if name != CONNECT}
        environment |= {PROBE: str(path), PROBE_STEPS: str(steps), PROBE_SECONDS: str(seconds), LAUNCHED: "1"}
        process = await start([sys.executable, *script], environment, capture=True)
        last_words: deque[str] = deque(maxlen=LAST_WORDS)
        listening = [
            asyncio.ensure_future(_listen(process.stdout, None)),
            asyncio.ensure_future(_listen(process.stderr, last_words)),
        ]
        try:
            code = await asyncio.wait_for(process.wait(), patience)
        except TimeoutError:
            raise JobError(
                f"{script[0]} did not make {steps} steps within {patience:g} s; ask for fewer with --steps, "
                "or give it longer with --patience."
            ) from None
        finally:
            await stop([process])
            await heard(listening)
        if code == REFUSED:
            refusal = [line.removeprefix(REFUSAL) for line in last_words if line.startswith(REFUSAL)]
            raise JobError(refusal[-1] if refusal else f"{script[0]} {ending(code)}.")
        if code:
            words = "".join(f"\n  {line}" for line in last_words)
            raise JobError(f"{script[0]} {ending(code)}." + (f" Its last words:{words}" if words else ""))
        if not path.exists():
            raise JobError(f"{script[0]} never called paceline.join or paceline.wrap, so no step could be timed.")
        seen = json.loads(path.read_text())
    if not seen["seconds"]:
        raise JobError(f"{script[0]} joined and made no step, so there was nothing to time.")
    found = judged(seen["seconds"], seen["batches"], seen["model_bytes"], seen["device"])
    return replace(found, optimizer=OptimizerSpec.from_json(seen["optimizer"]))


def judged(seconds: Sequence[float], batches: Sequence[int], model_bytes: float, device: str) -> ScriptProfile:
    """What the times of single steps come to: the first ones are left out, and so are pauses between steps."""
    first = min(FIRST, (len(seconds) - 1) // 2)
    counted = seconds[first:]
    median = statistics.median(counted)
    counted = [each for each in counted if each <= PAUSE * median]
    mean = max(statistics.fmean(counted), 1e-6)
    spread = statistics.pstdev(counted) / mean
    batch = statistics.mode(batches) if batches else 1
    return ScriptProfile(mean, min(round(spread, 4), MAX_SIGMA), max(1, batch), model_bytes, len(counted), device)


async def _listen(stream: asyncio.StreamReader | None, keep: deque[str] | None) -> None:
    async for line in lines(stream):
        if keep is not None:
            keep.append(line)
