"""A checkpoint's model as a plain state_dict, for whoever wants to use it without paceline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from paceline.model import checkpoint

FORMATS = (".safetensors", ".pt")


def export(source: Path, target: Path) -> tuple[int, int]:
    """Write it; the version and the number of tensors. Nothing is left behind if it fails."""
    found = checkpoint.read(source)
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
    import torch  # only here: .safetensors needs none

    types = {tensor.name: getattr(torch, tensor.dtype) for tensor in found.description.layout.tensors}
    state = {}
    for name, array in tensors.items():
        tensor = torch.from_numpy(array)
        # A count (batch norm has one) is a mean over workers on the server, and may lie between two.
        state[name] = tensor.to(types[name]) if types[name].is_floating_point else tensor.round().to(types[name])
    torch.save(state, path)
