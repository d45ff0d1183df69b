"""The images example reads its data sets and trains."""

from __future__ import annotations

import gzip
import importlib.util
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

PATH = Path(__file__).parents[2] / "examples/images.py"


def module() -> Any:
    spec = importlib.util.spec_from_file_location("images", PATH)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


images = module()
RANDOM = np.random.default_rng(0)


def idx(values: Any) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return b"\0\0\x08" + bytes([values.ndim]) + sizes + bytes(values.tobytes())


def mnist(folder: Path, compressed: bool) -> tuple[Any, Any]:
    pixels, labels = RANDOM.integers(0, 256, (40, 28, 28), np.uint8), np.arange(40, dtype=np.uint8) % 10
    for part in ("train", "t10k"):
        for name, values in ((f"{part}-images-idx3-ubyte", pixels), (f"{part}-labels-idx1-ubyte", labels)):
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
            else:
                (folder / name).write_bytes(idx(values))
    return pixels, labels


def cifar(folder: Path, binary: bool) -> tuple[Any, Any]:
    pixels, labels = RANDOM.integers(0, 256, (8, 3072), np.uint8), np.arange(8, dtype=np.uint8)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        if binary:
            (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], axis=1).tobytes())
        else:
            batch = {b"data": pixels, b"labels": labels.tolist(), b"filenames": [b"a.png"] * 8}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return pixels.reshape(8, 3, 32, 32), labels


def restored(dataset: Any) -> Any:
    """Normalize the pixels again, so that a shift and a scale of each channel make no difference."""
    pixels = dataset.tensors[0].numpy()
    return (pixels - pixels.mean((0, 2, 3), keepdims=True)) / pixels.std((0, 2, 3), keepdims=True)


@pytest.mark.parametrize("compressed", [False, True])
def test_mnist_is_read(tmp_path: Path, compressed: bool) -> None:
    pixels, labels = mnist(tmp_path, compressed)
    training, tests = images.read(tmp_path)
    assert training.tensors[0].shape == (40, 1, 28, 28) and training.tensors[1].tolist() == labels.tolist()
    expected = (pixels - pixels.mean()) / pixels.std()
    np.testing.assert_allclose(restored(training)[:, 0], expected, atol=1e-3)
    np.testing.assert_allclose(restored(tests)[:, 0], expected, atol=1e-3)


@pytest.mark.parametrize("binary", [False, True])
def test_cifar_is_read(tmp_path: Path, binary: bool) -> None:
    pixels, labels = cifar(tmp_path, binary)
    training, tests = images.read(tmp_path)
    assert training.tensors[1].tolist() == labels.tolist() * 5 and tests.tensors[1].tolist() == labels.tolist()
    whole = np.concatenate([pixels] * 5).astype(np.float64)
    expected = (whole - whole.mean((0, 2, 3), keepdims=True)) / whole.std((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(restored(training), expected, atol=1e-3)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(pickle.UnpicklingError, match="must not contain"):
        images.read(tmp_path)


def test_a_folder_without_data_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="neither the four IDX files of MNIST nor the batches of CIFAR-10"):
        images.read(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((2, 28, 28), np.uint8))[:-1])
    with pytest.raises(ValueError, match="is incomplete"):
        images.read(tmp_path)


def test_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mnist(tmp_path, compressed=False)
    saved = tmp_path / "model.pt"
    arguments = ["--epochs", "2", "--batch-size", "16", "--width", "2", "--amp", "--save", str(saved)]
    monkeypatch.setattr(sys, "argv", ["images.py", str(tmp_path), *arguments])
    images.main()
    assert capsys.readouterr().out.count("accuracy") == 2
    assert "1.running_mean" in torch.load(saved, weights_only=True)
