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
from paceline.observe.table import duration
from paceline.serve.environment import CONNECT, LAUNCHED, PROBE, PROBE_SECONDS, PROBE_STEPS, REFUSAL, REFUSED

FIRST = 5  # steps that are left out, because they load, compile and allocate
PAUSE = 3.0  # times the median; a longer step includes a pause, such as an evaluation or a checkpoint
MAX_SIGMA = 1.0  # the largest jitter of a profile
BUSY = 0.05  # the share of the time that threads wait for a core, from which a machine counts as busy
STEADY = 0.1  # a spread of CPU times up to this is the script's own, also if its threads wait for each other
ASSUMED = 0.05  # the jitter if a busy machine does not let it be measured
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
    wall_jitter: float = 0.0  # relative spread of the step times on the clock
    cpu_jitter: float | None = None  # relative spread of the steps' CPU times; None if they were not measured
    waited: float | None = None  # the share of the time that a thread waited for a core; None if unknown

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took cores from the script while it was timed."""
        return self.waited is not None and self.waited > BUSY

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
    found = judged(
        seen["seconds"],
        seen["batches"],
        seen["model_bytes"],
        seen["device"],
        seen["cpu_seconds"],
        seen["waited"],
        seen["threads"],
    )
    return replace(found, optimizer=OptimizerSpec.from_json(seen["optimizer"]))


def judged(
    seconds: Sequence[float],
    batches: Sequence[int],
    model_bytes: float,
    device: str,
    cpu_seconds: Sequence[float] = (),
    waited: float | None = None,
    threads: int = 1,
) -> ScriptProfile:
    """Return a profile from the times of single steps. The first steps and pauses between steps are left out.

    cpu_seconds: the CPU times of the same steps. waited: the share of the time that a thread waited for a core.
    threads: that compute a step together.
    """
    counted, wall_jitter = _steady(seconds)
    cpu_jitter = _steady(cpu_seconds)[1] if cpu_seconds and device == "cpu" else None
    found = ScriptProfile(
        seconds=max(statistics.fmean(counted), 1e-6),
        jitter=wall_jitter,
        batch=max(1, statistics.mode(batches) if batches else 1),
        model_bytes=model_bytes,
        steps=len(counted),
        device=device,
        wall_jitter=wall_jitter,
        cpu_jitter=cpu_jitter,
        waited=waited,
    )
    return replace(found, jitter=_own_jitter(found, threads)) if found.is_disturbed else found


def _steady(times: Sequence[float]) -> tuple[Sequence[float], float]:
    """Return the times of steps without the first ones and without pauses, and their relative spread."""
    counted = times[min(FIRST, (len(times) - 1) // 2) :]
    longest = PAUSE * statistics.median(counted)
    counted = [each for each in counted if each <= longest]
    spread = statistics.pstdev(counted) / max(statistics.fmean(counted), 1e-9)
    return counted, min(round(spread, 4), MAX_SIGMA)


def _own_jitter(profile: ScriptProfile, threads: int) -> float:
    """Return the jitter of a script that was timed on a busy machine, without the jitter that comes from the load.

    CPU time leaves out the time in which other programs had the core. But threads that wait for each other use CPU time
    too. So a large spread of CPU times counts only if there is one thread.
    """
    if profile.wall_jitter <= STEADY:
        return profile.wall_jitter
    if profile.cpu_jitter is not None and (threads == 1 or profile.cpu_jitter <= STEADY):
        return min(profile.cpu_jitter, profile.wall_jitter)
    return ASSUMED


def disturbance(profile: ScriptProfile, jitter: float | None) -> str | None:
    """Return what a busy machine has done to a profile, as sentences for the user. None if the machine was quiet.

    jitter: the jitter that the user has given.
    """
    if not profile.is_disturbed:
        return None
    measured = [f"step times vary by ±{profile.wall_jitter:.0%}"]
    if profile.cpu_jitter is not None:
        measured.append(f"CPU time by ±{profile.cpu_jitter:.0%}")
    if jitter is not None:
        used = f"The advice uses ±{jitter:.0%}, as --jitter says."
    elif profile.jitter in (profile.cpu_jitter, profile.wall_jitter):
        used = f"The advice uses ±{profile.jitter:.0%}. Fix another value with --jitter 0.05."
    else:
        used = f"That is not the script's own, so the advice assumes ±{profile.jitter:.0%}. Fix it with --jitter 0.05."
    return (
        f"This machine was busy: the script waited {profile.waited:.0%} of the time for a core, {', '.join(measured)}. "
        f"{used} The {duration(profile.seconds)} of a step are too long as well: for a clean measurement, close other "
        "programs and run `paceline advise` again."
    )


async def _read(stream: asyncio.StreamReader | None, keep: deque[str] | None) -> None:
    """Read a stream to its end, so that the script never blocks on it."""
    async for line in lines(stream):
        if keep is not None and line.stays:
            keep.append(line.text)
