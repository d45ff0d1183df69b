"""The checkpoint of a run: one file with the model's arrays, the strategy's, and the state of the policy and the nodes.

The file is a NumPy archive without pickled objects. A new one replaces the old one at once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from paceline.flower.global_model import Arrays
from paceline.model import durable

NAME = "federation.npz"
STATE = "paceline/state"  # the name under which the archive holds the state
MODEL, STRATEGY = "array/", "strategy/"  # the beginnings of the names of the model's arrays and of the strategy's
KINDS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


@dataclass(frozen=True)
class FlowerCheckpoint:
    """The state and the arrays from which a restarted ServerApp goes on."""

    state: Mapping[str, Any]
    model: Arrays
    strategy: Arrays


def save(folder: Path, checkpoint: FlowerCheckpoint) -> None:
    """Replace the checkpoint in a folder."""
    durable.make_folder(folder)
    named = {STATE: np.frombuffer(json.dumps(checkpoint.state).encode(), np.uint8)}
    for begin, arrays in ((MODEL, checkpoint.model), (STRATEGY, checkpoint.strategy)):
        named |= {begin + name: array for name, array in arrays.items()}
    archive = io.BytesIO()
    np.savez(archive, allow_pickle=False, **named)
    new = folder / f"{NAME}.new"
    durable.write_file(new, [archive.getbuffer()])
    durable.rename(new, folder / NAME)


def load(folder: Path) -> FlowerCheckpoint | None:
    """Return the checkpoint in a folder; None if there is none."""
    try:
        with np.load(folder / NAME, allow_pickle=False) as archive:
            state = json.loads(archive[STATE].tobytes())
            return FlowerCheckpoint(state, _part(archive, MODEL), _part(archive, STRATEGY))
    except FileNotFoundError:
        return None
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"The checkpoint in {folder} cannot be read: {error}. Choose another folder.") from None


def _part(archive: Any, begin: str) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin like this."""
    return {name.removeprefix(begin): archive[name] for name in archive.files if name.startswith(begin)}


def metrics_as_json(result: Result) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the metrics of a result as JSON values."""
    return {kind: {str(at): dict(each) for at, each in getattr(result, kind).items()} for kind in KINDS}


def recall_metrics(result: Result, saved: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Restore the metrics of earlier rounds."""
    for kind in KINDS:
        getattr(result, kind).update({int(at): MetricRecord(dict(each)) for at, each in saved[kind].items()})
