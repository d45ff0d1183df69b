"""Export the model of a checkpoint as a plain state_dict, for use without paceline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from paceline.model import checkpoint

FORMATS = (".safetensors", ".pt")


def export(source: Path, target: Path, note: Callable[[str], None] | None = None) -> tuple[int, int]:
    """Write the model of a checkpoint to a file. Return its version and its number of tensors.

    If the export fails, no partial file is left behind. note: is called with a sentence for each damaged checkpoint
    that is passed over.
    """
    found = checkpoint.read(source, note)
    tensors = checkpoint.weights(found)
    part = target.with_name(target.name + ".part")
    try:
        if target.suffix == ".pt":
            _save_torch(tensors, found, part)
        else:
            save_file(tensors, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return found.version, len(tensors)


def _save_torch(tensors: dict[str, Any], found: checkpoint.Checkpoint, path: Path) -> None:
    import torch  # here, because .safetensors files need no torch

    types = {tensor.name: getattr(torch, tensor.dtype) for tensor in found.description.layout.tensors}
    state = {}
    for name, array in tensors.items():
        tensor = torch.from_numpy(array)
        # The server averages integer statistics, such as batch norm's counter, over the workers. So they are rounded.
        state[name] = tensor.to(types[name]) if types[name].is_floating_point else tensor.round().to(types[name])
    torch.save(state, path)
