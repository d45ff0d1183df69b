"""The checkpoint of a run: one file with the model's arrays and, beside them, the state of the policy and the roster.

The file is a NumPy archive without pickled objects. A new one replaces the old one at once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
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
KINDS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


def save(folder: Path, state: Mapping[str, Any], arrays: Arrays) -> None:
    """Replace the checkpoint in a folder."""
    durable.make_folder(folder)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    archive = io.BytesIO()
    np.savez(archive, allow_pickle=False, **{STATE: text}, **{f"array/{name}": array for name, array in arrays.items()})
    new = folder / f"{NAME}.new"
    durable.write_file(new, [archive.getbuffer()])
    durable.rename(new, folder / NAME)


def load(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Return the state and the arrays of the checkpoint in a folder; None if there is none."""
    try:
        with np.load(folder / NAME, allow_pickle=False) as archive:
            state = json.loads(archive[STATE].tobytes())
            return state, {name[6:]: archive[name] for name in archive.files if name.startswith("array/")}
    except FileNotFoundError:
        return None
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"The checkpoint in {folder} cannot be read: {error}. Choose another folder.") from None


def metrics_as_json(result: Result) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the metrics of a result as JSON values."""
    return {kind: {str(at): dict(each) for at, each in getattr(result, kind).items()} for kind in KINDS}


def recall_metrics(result: Result, saved: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Restore the metrics of earlier rounds."""
    for kind in KINDS:
        getattr(result, kind).update({int(at): MetricRecord(dict(each)) for at, each in saved[kind].items()})
