"""Data sets that are read from files: where they are found, how they are read, and how bad files are refused."""

from __future__ import annotations

import gzip
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from paceline.workloads import data, files, idx
from paceline.workloads.errors import DataError
from tries import tries
from workloads import making

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DATA", raising=False)


def in_order(*words: str) -> str:
    """Return a pattern that matches a text with these words in this order."""
    return ".*".join(re.escape(each) for each in words)


# Finding files


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        *(("mnist", folder) for folder in ("", "mnist", "MNIST/raw", "MNIST", "raw")),
        *(("fashion-mnist", folder) for folder in ("", "fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "raw")),
    ],
)
def test_idx_files_are_found_and_read(tmp_path: Path, name: str, folder: str, packed: bool) -> None:
    written = making.write_idx(tmp_path / folder, packed=packed)
    loaded = data.load(name, tmp_path)
    for part, inputs, labels in (
        ("train", loaded.inputs, loaded.labels),
        ("t10k", loaded.test_inputs, loaded.test_labels),
    ):
        assert torch.equal(inputs, torch.from_numpy(written[f"{part}-images-idx3-ubyte"])[:, None])
        assert labels.tolist() == written[f"{part}-labels-idx1-ubyte"].tolist()
    assert inputs.dtype == torch.uint8 and labels.dtype == torch.int64
    assert (loaded.name, loaded.classes) == (name, 10)
    assert loaded.mean == pytest.approx([(written[IMAGES] / 255).mean()])


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        *(("cifar10", folder) for folder in ("", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin")),
        *(("cifar100", folder) for folder in ("", "cifar-100-binary", "cifar100")),
    ],
)
def test_cifar_files_are_found_and_read(tmp_path: Path, name: str, folder: str) -> None:
    written = making.write_cifar(tmp_path / folder, name)
    loaded = data.load(name, tmp_path)
    *training, test = (written[file] for file in making.CIFAR_FILES[name])
    label = 0 if name == "cifar10" else 1  # the fine label
    for inputs, labels, rows in (
        (loaded.inputs, loaded.labels, np.concatenate(training)),
        (loaded.test_inputs, loaded.test_labels, test),
    ):
        assert labels.tolist() == rows[:, label].tolist()
        assert inputs.shape == (len(rows), 3, 32, 32)
        assert inputs[1, 2, 3, 4] == rows[1, label + 1 + 2 * 1024 + 3 * 32 + 4]  # planes, then rows
        assert torch.equal(inputs.flatten(1), torch.from_numpy(rows[:, label + 1 :]))
    assert loaded.classes == {"cifar10": 10, "cifar100": 100}[name]
    assert len(loaded.mean) == len(loaded.deviation) == 3


def test_the_folder_argument_overrides_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [making.write_idx(tmp_path / str(seed) / "mnist", seed) for seed in range(2)]
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "0"))
    assert data.load("mnist").labels.tolist() == written[0][LABELS].tolist()
    assert data.load("mnist", tmp_path / "1").labels.tolist() == written[1][LABELS].tolist()
    assert written[0][LABELS].tolist() != written[1][LABELS].tolist()


def test_two_sets_with_the_same_file_names_are_not_mixed_up(tmp_path: Path) -> None:
    written = {name: making.write_idx(tmp_path / name, seed) for seed, name in enumerate(["mnist", "fashion-mnist"])}
    for name, content in written.items():
        assert data.load(name, tmp_path).labels.tolist() == content[LABELS].tolist()
        assert data.load(name, tmp_path / name).labels.tolist() == content[LABELS].tolist()
    with pytest.raises(DataError, match="fashion-mnist is not in"):
        data.load("fashion-mnist", tmp_path / "mnist")
    making.write_idx(tmp_path / "MNIST" / "raw")
    for folder in ("MNIST", "MNIST/raw"):
        with pytest.raises(DataError, match="fashion-mnist is not in"):
            data.load("fashion-mnist", tmp_path / folder)
        assert data.load("mnist", tmp_path / folder)


def test_a_missing_data_set_is_reported_with_the_searched_folders(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=in_order("mnist is read from files", IMAGES, "MNIST/raw", "--data", "PACELINE_DATA")
    ):
        data.load("mnist")
    with pytest.raises(DataError, match=in_order(str(tmp_path / "no"), "is not a folder", "--data", "PACELINE_DATA")):
        data.load("cifar10", tmp_path / "no")
    with pytest.raises(DataError, match=in_order("cifar10 is not in", "data_batch_1.bin", "test_batch.bin")) as refused:
        data.load("cifar10", tmp_path)
    for folder in ("cifar-10-batches-bin", "cifar10"):
        assert str(tmp_path / folder) in str(refused.value)
    assert ".gz" not in str(refused.value) and "--data" in str(refused.value)


@pytest.mark.parametrize("missing", idx.FILES)
def test_a_data_set_with_a_missing_file_is_not_found(tmp_path: Path, missing: str) -> None:
    making.write_idx(tmp_path)
    (tmp_path / missing).rename(tmp_path / "away")
    with pytest.raises(DataError, match=in_order("mnist is not in", missing, "each plain or as .gz")):
        data.load("mnist", tmp_path)
    (tmp_path / missing).mkdir()
    with pytest.raises(DataError, match="mnist is not in"):
        data.load("mnist", tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(
        DataError, match=in_order("cifar-10-batches-py holds cifar10 as pickles", "download the binary version")
    ):
        data.load("cifar10", tmp_path)


# Bad files


def broken(folder: Path, name: str, content: bytes, packed: bool = False) -> Path:
    """Write MNIST with this content in one of its files. Return the path of that file."""
    making.write_idx(folder, packed=packed)
    path = folder / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    return path


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("change", [-1, -784, 1, 5000])
def test_a_file_whose_size_contradicts_its_header_is_refused(tmp_path: Path, packed: bool, change: int) -> None:
    content = making.idx(np.zeros((12, 28, 28), np.uint8))
    wrong = content[:change] if change < 0 else content + bytes(change)
    path = broken(tmp_path, IMAGES, wrong, packed)
    has = f"{len(wrong):,} bytes" if not packed else f"{len(wrong):,} bytes unpacked"
    if packed and change > 0:
        has = "more than 9,424 bytes unpacked"
    with pytest.raises(DataError, match=in_order(f"{path} has {has} and should have 9,424. Download it again")):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (IMAGES, b"", ("begins with nothing and should begin with 00000803", "images")),
        (IMAGES, b"\0\0\x08\x03\0\0", ("begins with 00000803", "and 3 sizes")),
        (IMAGES, making.idx(np.zeros(12, np.uint8)), ("begins with 00000801 and should begin with 00000803",)),
        (LABELS, making.idx(np.zeros((12, 28, 28), np.uint8)), ("begins with 00000803", "00000801", "labels")),
        (LABELS, b"<html>not found</html>", ("begins with 3c68746d",)),
        (IMAGES, making.idx(np.zeros((12, 14, 56), np.uint8)), ("images are 14 by 56", "should be 28 by 28")),
        (IMAGES, making.idx(np.zeros((0, 28, 28), np.uint8)), ("holds no samples",)),
        (LABELS, making.idx(np.full(12, 10, np.uint8)), ("has the label 10", "only 10 classes")),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, packed: bool, file: str, content: bytes, words: tuple[str, ...]
) -> None:
    path = broken(tmp_path, file, content, packed)
    with pytest.raises(DataError, match=in_order(str(path), *words, "Download it again")):
        data.load("mnist", tmp_path)


def test_different_numbers_of_images_and_labels_are_refused(tmp_path: Path) -> None:
    broken(tmp_path, LABELS, making.idx(np.zeros(11, np.uint8)))
    with pytest.raises(DataError, match=in_order(IMAGES, "has 12 images, but", LABELS, "11 labels")):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize("cut", [3, 15, 1000])
def test_a_truncated_gzip_file_is_refused(tmp_path: Path, cut: int) -> None:
    making.write_idx(tmp_path, packed=True)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=in_order(f"{path} cannot be unpacked", "Download it again")):
        data.load("mnist", tmp_path)


def test_a_gz_file_that_is_not_gzip_is_refused(tmp_path: Path) -> None:
    making.write_idx(tmp_path, packed=True)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(making.idx(np.zeros((12, 28, 28), np.uint8)))
    with pytest.raises(DataError, match=in_order(f"{path} cannot be unpacked")):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("count", [1_000_000, 2**32 - 1])
def test_a_wrong_size_in_a_header_allocates_no_memory(tmp_path: Path, packed: bool, count: int) -> None:
    content = b"\0\0\x08\x03" + count.to_bytes(4, "big") + (28).to_bytes(4, "big") * 2 + bytes(1000)
    path = broken(tmp_path, IMAGES, content, packed)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=in_order(str(path), f"{16 + count * 784:,}", "Download it again")):
            data.load("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 * files.PIECE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_the_size_of_a_file_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    making.write_idx(tmp_path, packed=packed)
    monkeypatch.setattr(files, "MAX_BYTES", 9424)
    assert data.load("mnist", tmp_path)
    monkeypatch.setattr(files, "MAX_BYTES", 9423)
    with pytest.raises(
        DataError, match=in_order(IMAGES, "claims to have 9,424 bytes", "more than the 9,423 that are allowed")
    ):
        data.load("mnist", tmp_path)


def test_a_gzip_bomb_is_not_unpacked_to_its_end(tmp_path: Path) -> None:
    path = broken(tmp_path, IMAGES, making.idx(np.zeros((12, 28, 28), np.uint8)) + bytes(32 * files.PIECE), packed=True)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=in_order(f"{path} has more than 9,424 bytes unpacked")):
            data.load("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 * files.PIECE
    finally:
        tracemalloc.stop()


@tries(50, 200)
@given(st.data(), st.booleans())
def test_any_content_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, chosen: st.DataObject, packed: bool
) -> None:
    """A file with changed bytes, cut anywhere, gives an array of the right shape or a DataError."""
    original = np.arange(40, dtype=np.uint8).reshape(10, 2, 2)
    whole = making.idx(original)
    content = bytearray(gzip.compress(whole, mtime=0) if packed else whole)
    for _ in range(chosen.draw(st.integers(0, 3))):
        content[chosen.draw(st.integers(0, len(content) - 1))] = chosen.draw(st.integers(0, 255))
    content = content[: chosen.draw(st.integers(0, len(content)) | st.just(len(content)))]
    path = tmp_path_factory.getbasetemp() / ("any.gz" if packed else "any")
    path.write_bytes(content)
    try:
        found = idx.read(path, (2, 2))
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert found.shape == (10, 2, 2)
        assert not packed or np.array_equal(found, original)  # gzip has a checksum


@pytest.mark.parametrize(("name", "record"), [("cifar10", 3073), ("cifar100", 3074)])
@pytest.mark.parametrize("change", [-1, 1, -3072, None])
def test_a_cifar_file_with_a_partial_record_is_refused(
    tmp_path: Path, name: str, record: int, change: int | None
) -> None:
    making.write_cifar(tmp_path, name)
    size = 0 if change is None else 3 * record + change
    published = {"data_batch_3.bin": 10_000, "test_batch.bin": 10_000, "train.bin": 50_000, "test.bin": 10_000}
    for file in making.CIFAR_FILES[name]:
        if file in published:
            path, whole = tmp_path / file, (tmp_path / file).read_bytes()
            path.write_bytes(bytes(size))
            should = f"should have {published[file] * record:,}, or another multiple of {record:,}"
            with pytest.raises(DataError, match=in_order(f"{path} has {size:,} bytes and", should)):
                data.load(name, tmp_path)
            path.write_bytes(whole)
    assert data.load(name, tmp_path)


def test_a_cifar_batch_cut_at_the_end_of_a_record_is_refused(tmp_path: Path) -> None:
    making.write_cifar(tmp_path, "cifar10")
    path = tmp_path / "data_batch_4.bin"
    path.write_bytes(path.read_bytes()[: 2 * 3073])
    with pytest.raises(
        DataError, match=in_order(f"{path} has 2 images, but data_batch_1.bin has 3", "Download both again")
    ):
        data.load("cifar10", tmp_path)


@pytest.mark.parametrize("file", making.CIFAR_FILES["cifar10"])
def test_a_cifar_label_outside_the_classes_is_refused(tmp_path: Path, file: str) -> None:
    records = making.write_cifar(tmp_path, "cifar10")[file]
    records[1, 0] = 10
    (tmp_path / file).write_bytes(records.tobytes())
    with pytest.raises(DataError, match=in_order(f"{tmp_path / file} has the label 10")):
        data.load("cifar10", tmp_path)
