"""The numbers that a worker may send. The job checks them before a policy sees them.

Beyond these limits the arithmetic of a policy may overflow: batch sizes divided by the shortest time, losses times the
worst factor, and squares of both are finite within them. `paceline.model.slice` has the limits of gradients and rates.
"""

from __future__ import annotations

import math

MAX_SAMPLES = 1 << 40  # in one update, and in a dataset
MAX_EPOCHS = 1 << 31
MAX_TAKEN = 1 << 14  # ranges of samples that a worker may hold at a time
MIN_SECONDS, MAX_SECONDS = 1e-6, 1e7  # of one computation; 0 means that the worker does not know
MAX_VALUE = 1e30  # of a loss or a metric, positive or negative


def seconds_of(claimed: float) -> float | None:
    """Return how long a computation took, for a policy. Return None if it cannot have taken that long.

    No computation takes less than a microsecond, so a shorter time counts as one.
    """
    if not 0 <= claimed <= MAX_SECONDS:
        return None
    return max(claimed, MIN_SECONDS) if claimed else 0.0


def loss_of(claimed: float | None) -> float | None:
    """Return a worker's loss for a policy, or None if it is not a usable number."""
    return claimed if claimed is not None and -MAX_VALUE <= claimed <= MAX_VALUE else None


def metric_of(claimed: float) -> float:
    """Return a metric for a policy. It may be NaN or infinite, but a finite number is limited."""
    return max(-MAX_VALUE, min(claimed, MAX_VALUE)) if math.isfinite(claimed) else claimed
