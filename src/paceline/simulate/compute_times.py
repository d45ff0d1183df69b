"""The compute times of one worker of a simulated cluster: of single steps, or of rounds of local steps."""

from __future__ import annotations

import math
import random

import numpy as np

from paceline.simulate.cluster_spec import WorkerSpec


class ComputeTimes:
    """Draws the compute times of one worker."""

    def __init__(self, worker: WorkerSpec, chance: random.Random, steps: int = 1) -> None:
        """chance: of this worker. steps: of a round."""
        self._worker, self._chance, self._steps = worker, chance, steps
        if steps > 1:  # a round may need hundreds of numbers, so they are drawn together
            self._generator = np.random.default_rng(chance.getrandbits(64))

    def draw(self, batch: int) -> float:
        """Draw the compute time of a round, in which each step has a jitter of its own.

        batch: the samples of the whole round.
        """
        if self._steps == 1:
            return self._worker.draw(batch, self._chance)
        steps, jitter = self._steps, self._worker.jitter
        seconds = self._worker.overhead + batch / steps / self._worker.samples_per_second
        if jitter.kind == "none":
            return steps * seconds
        z = self._generator.standard_normal(steps)
        if jitter.kind == "lognormal":
            return seconds * float(np.exp(jitter.sigma * z - 0.5 * jitter.sigma * jitter.sigma).sum())
        if jitter.kind == "normal":
            return seconds * float(np.maximum(0.05, 1.0 + jitter.sigma * z).sum())
        if jitter.kind == "delay":
            return steps * seconds + math.exp(jitter.mu) * float(np.exp(jitter.sigma * z).sum())
        sleeps = np.maximum(0.0, jitter.mean + jitter.deviation * z)
        return steps * seconds + float(sleeps[self._generator.random(steps) < jitter.probability].sum())
