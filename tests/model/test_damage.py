"""A damaged checkpoint is never loaded: the newest whole one is used in its place."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from paceline.model import checkpoint
from paceline.model.checkpoint import CheckpointError, DamagedError
from paceline.model.checkpoint_names import job_folder, set_aside, versions
from paceline.model.description import Description
from paceline.model.export import export
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.tensor_file import SpoiledError, digest_of, write_tensors
from tries import tries

DESCRIPTION = json.loads(
    Description(Layout((Tensor("w", (4,)),)), OptimizerSpec("SGD", ({"lr": 1.0},))).as_json().decode()
)
NEWEST = ("job.json", "shard-0.safetensors", "shard-1.safetensors")


def write(folder: Path, version: int, value: float | None = None) -> checkpoint.Checkpoint:
    """Write a checkpoint of two shards. All weights are `value`, or else the version."""
    part = checkpoint.begin(folder, version)
    saved = [
        checkpoint.save_shard(
            part,
            number,
            {"0/weights": np.full(2, version if value is None else value, np.float32)},
            {"pieces": [{"start": 2 * number, "stop": 2 * number + 2}]},
        )
        for number in range(2)
    ]
    job = {"version": version, "shards": 2, "description": DESCRIPTION, "rate": 1e5, "parts": saved}
    return checkpoint.finish(part, job)


def flip(data: bytes, where: int) -> bytes:
    """Return the data with one bit flipped."""
    at, bit = where // 8 % len(data), where % 8
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[Path, int], object]] = {
    "a flipped bit": lambda path, where: path.write_bytes(flip(path.read_bytes(), where)),
    "a truncated file": lambda path, where: os.truncate(path, where % path.stat().st_size),
    "a longer file": lambda path, where: path.write_bytes(path.read_bytes() + bytes(where % 9 + 1)),
    "a missing file": lambda path, _: path.unlink(),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("two")
    write(folder, 1)
    write(folder, 2)
    return folder


@pytest.mark.slow
@tries(50, 200, derandomize=False)
@given(damage=st.sampled_from(sorted(DAMAGES)), name=st.sampled_from(NEWEST), where=st.integers(0, 1 << 20))
def test_any_damage_to_the_newest_checkpoint_gives_the_one_before(
    two: Path, damage: str, name: str, where: int
) -> None:
    path = two / "version-000000002" / name
    whole = path.read_bytes()
    assert checkpoint.read(two).version == 2
    DAMAGES[damage](path, where)
    try:
        notes: list[str] = []
        found = checkpoint.read(two, notes.append)
        assert found.version == 1
        assert np.all(checkpoint.weights(found)["w"] == 1)
        (note,) = notes
        assert name in note and note.endswith("; going back to version 1."), note
        with pytest.raises(DamagedError, match=name):
            checkpoint.read(path.parent)
    finally:
        path.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEWEST)
def test_every_single_bit_of_a_checkpoint_counts(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, 2).folder / name
    whole = path.read_bytes()
    for where in range(8 * len(whole)):
        path.write_bytes(flip(whole, where))
        assert checkpoint.newest(tmp_path) is None, f"bit {where}"
    path.write_bytes(whole)
    assert checkpoint.newest(tmp_path) is not None


def test_a_folder_without_a_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    (write(tmp_path, 1).folder / "job.json").unlink()
    assert checkpoint.newest(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"job\.json cannot be read: No such file or directory; .* has no whole"):
        checkpoint.read(tmp_path)


def test_a_checkpoint_that_this_user_may_not_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"job\.json cannot be read: Permission denied") as raised:
        checkpoint.read(tmp_path)
    assert not isinstance(raised.value, DamagedError)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_damage(tmp_path: Path, value: float) -> None:
    """An earlier version of paceline may have written them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.model.checkpoint.not_finite", lambda _tensors: "")
        found = write(tmp_path, 1, value)
    with pytest.raises(DamagedError, match=r"shard-0\.safetensors holds an? (NaN|infinite number) in 0/weights"):
        checkpoint.weights(found)
    with pytest.raises(DamagedError):
        export(tmp_path, tmp_path / "model.safetensors")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_not_written(tmp_path: Path, value: float) -> None:
    good = [write(tmp_path, version) for version in (1, 2)]
    for version in (3, 4, 5):
        with pytest.raises(SpoiledError, match=r"the model holds an? (NaN|infinite number) in 0/weights"):
            write(tmp_path, version, value)
    assert versions(tmp_path) == [found.folder for found in good]


def test_an_interrupted_removal_leaves_no_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (1, 2):
        write(tmp_path, version)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_arguments, **_options: None)  # the process was killed just before
        write(tmp_path, 3)
    assert [path.name for path in versions(tmp_path)] == ["version-000000002", "version-000000003"]
    write(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-000000003", "version-000000004"]


def without_digests(found: checkpoint.Checkpoint) -> None:
    """Turn a checkpoint into one of the format before."""
    path = found.folder / "job.json"
    job = json.loads(path.read_text())
    path.write_text(
        json.dumps({name: job[name] for name in job if name not in ("digest", "parts")} | {"format": 2}, indent=1)
    )


def test_a_checkpoint_without_digests_can_still_be_read(tmp_path: Path) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    without_digests(newest)
    found = checkpoint.read(tmp_path)
    assert found.version == 2 and not found.parts
    assert np.all(checkpoint.weights(found)["w"] == 2)
    part = newest.folder / "shard-1.safetensors"
    part.write_bytes(part.read_bytes()[:-4] + np.array([np.nan], np.float32).tobytes())
    assert checkpoint.read(tmp_path).version == 1, "a NaN is found without a digest"
    os.truncate(part, 40)
    assert checkpoint.read(tmp_path).version == 1


def test_a_checkpoint_of_a_later_paceline_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 4)
        write(tmp_path, 2)
    with pytest.raises(CheckpointError, match="has format 4; this paceline reads 3"):
        checkpoint.read(tmp_path)


def test_only_the_owner_may_read_a_checkpoint(tmp_path: Path) -> None:
    found = write(tmp_path / "new" / "job", 1)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in found.folder.iterdir()}
    assert modes == dict.fromkeys(NEWEST, 0o600)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (found.folder, found.folder.parent)} == {0o700}


def test_a_checkpoint_is_on_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, then their folder, then the rename, then the folder above. A new folder is on disk before its content."""
    calls: list[str] = []
    sync, rename = os.fsync, Path.rename

    def watched_sync(handle: int) -> None:
        calls.append("sync " + str(Path(os.readlink(f"/proc/self/fd/{handle}")).relative_to(tmp_path)))
        sync(handle)

    def watched_rename(path: Path, target: Path) -> Path:
        calls.append(f"rename {path.relative_to(tmp_path)}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    write(tmp_path / "runs" / "job", 1)
    part = "runs/job/version-000000001.part"
    assert calls == [
        *("sync .", "sync runs", "sync runs/job"),  # each holds the name of a new folder
        *(f"sync {part}/shard-0.safetensors", f"sync {part}/shard-1.safetensors"),  # by the shards
        *(f"sync {part}/shard-0.safetensors", f"sync {part}/shard-1.safetensors"),  # by the coordinator
        *(f"sync {part}/job.json", f"sync {part}", f"rename {part}", "sync runs/job"),
    ]


def test_a_part_that_was_cut_short_does_not_become_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    part = checkpoint.begin(tmp_path, 2)
    saved = checkpoint.save_shard(part, 0, {"0/weights": np.zeros(2, np.float32)}, {})
    os.truncate(part / "shard-0.safetensors", saved.size - 1)
    with pytest.raises(CheckpointError, match="bytes instead of"):
        checkpoint.finish(part, {"version": 2, "shards": 1, "description": DESCRIPTION, "parts": [saved]})
    assert checkpoint.read(tmp_path).version == 1


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (write(tmp_path, 2).folder / "shard-0.safetensors").unlink()
    write(tmp_path, 3)
    assert [path.name[-1] for path in versions(tmp_path)] == ["1", "2", "3"]
    write(tmp_path, 4)
    assert [path.name[-1] for path in versions(tmp_path)] == ["2", "3", "4"]


def test_a_checkpoint_that_is_set_aside_keeps_its_content_and_counts_no_more(tmp_path: Path) -> None:
    for version in (2, 2, 2):
        write(tmp_path, version)
        set_aside(versions(tmp_path)[-1], "damaged")
    write(tmp_path, 1)
    assert checkpoint.read(tmp_path).version == 1
    names = {"version-000000002.damaged", "version-000000002.damaged-2", "version-000000002.damaged-3"}
    assert {path.name for path in tmp_path.iterdir()} == {"version-000000001"} | names
    assert all(checkpoint.read(tmp_path / name).version == 2 for name in names)


def test_the_order_of_checkpoints_is_that_of_their_numbers(tmp_path: Path) -> None:
    write(tmp_path, 999_999_999)
    write(tmp_path, 1_000_000_000)
    assert checkpoint.read(tmp_path).version == 1_000_000_000


def test_the_jobs_folder_of_a_checkpoint(tmp_path: Path) -> None:
    found = write(tmp_path / "version-1", 3)
    assert job_folder(tmp_path / "version-1") == tmp_path / "version-1", "a name that the user has chosen"
    assert job_folder(found.folder) == tmp_path / "version-1"
    assert job_folder(set_aside(found.folder, "abandoned")) == tmp_path / "version-1"
    copied = shutil.copytree(tmp_path / "version-1" / "version-000000003.abandoned", tmp_path / "best")
    assert job_folder(Path(copied)) is None
    (tmp_path / "link").symlink_to(write(tmp_path / "job", 3).folder)
    assert job_folder(tmp_path / "link") == tmp_path.resolve() / "job"


def test_tensors_are_written_in_the_format_of_safetensors(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "weights": np.arange(5, dtype=np.float32),
        "step": np.array(7, dtype=np.float64),
        "flags": np.array([True, False, True]),
        "matrix": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "empty": np.zeros((0, 2), dtype=np.float16),
    }
    path = tmp_path / "file.safetensors"
    written = write_tensors(path, tensors, {"paceline": "{}"})
    assert written.size == path.stat().st_size and written.digest == digest_of(path)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array), name
    same = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
    assert path.stat().st_size == len(save(same, metadata={"paceline": "{}"}))
