"""The data: Python files, as bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.local_steps.size import WORKERS, Size


@dataclass(frozen=True)
class Data:
    """The bytes of the training set and of the validation set."""

    training: npt.NDArray[np.uint8]
    validation: npt.NDArray[np.uint8]


def python_sources(folder: Path) -> Data:
    """Return the Python files below a folder. A hash of its name puts about one of 20 files into the validation set."""
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if "site-packages" not in name and "dist-packages" not in name:
            parts[hashlib.sha256(name.encode()).digest()[0] < 13].append(path.read_bytes())
    validation, training = (np.frombuffer(bytearray().join(parts[kind]), np.uint8) for kind in (True, False))
    return Data(training, validation)


def sample_starts(size: Size, seed: int, length: int) -> npt.NDArray[np.int64]:
    """Return the places where each worker's sequences begin: [steps, workers, batch].

    Every worker has its own random stream, so a worker's samples do not depend on the schedule.
    """
    count = (size.rounds * size.local_steps, size.batch)
    streams = [np.random.default_rng((seed, worker)) for worker in range(WORKERS)]
    return np.stack([stream.integers(0, length - size.context, count) for stream in streams], axis=1)
