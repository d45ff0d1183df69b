"""The checkpoint that a server begins from: the newest whole one, or exactly the one that the user has named."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from model.test_damage import write
from paceline.model import checkpoint
from paceline.model.checkpoint import CheckpointError
from paceline.model.checkpoint_names import versions
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.restoration import Restoration
from serve.workers import work
from train.generations import served


def names(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("version-00000000") for path in folder.iterdir())


def damage(folder: Path, version: int) -> None:
    """Change the last byte of a shard's part."""
    path = folder / f"version-{version:09d}" / "shard-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def test_a_damaged_checkpoint_is_passed_over_and_renamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for version in (1, 2):
        write(tmp_path, version)
    damage(tmp_path, 2)
    found = Restoration(2, tmp_path, tmp_path)
    assert found.first and found.first.version == 1
    assert names(tmp_path) == ["1", "2"], "nothing is changed before the server listens"
    found.begin()
    assert names(tmp_path) == ["1", "2.damaged"]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"The checkpoint {tmp_path}/version-000000002 is damaged: the content of shard-1.safetensors does not match "
        "its digest; going back to version 1."
    )
    found.begin()
    assert len(caplog.records) == 1, "it is said once"


def test_a_folder_that_the_job_does_not_write_to_is_left_alone(tmp_path: Path) -> None:
    for version in (1, 2):
        write(tmp_path / "old", version)
    damage(tmp_path / "old", 2)
    found = Restoration(2, tmp_path / "new", tmp_path / "old")
    found.begin()
    assert found.first and found.first.version == 1
    assert names(tmp_path / "old") == ["1", "2"]
    last = found.newest()
    assert last and last.version == 1, "nothing was written yet"


@pytest.mark.parametrize("newer_is_damaged", [False, True])
def test_a_named_checkpoint_abandons_the_newer_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, newer_is_damaged: bool
) -> None:
    for version in (1, 2):
        write(tmp_path, version)
    if newer_is_damaged:
        damage(tmp_path, 2)
    found = Restoration(2, tmp_path, tmp_path / "version-000000001")
    found.begin()
    assert found.first and found.first.version == 1
    assert names(tmp_path) == ["1", "2.abandoned"]
    said = "Going back to version 1; version-000000002 will be kept as *.abandoned."
    assert [record.getMessage() for record in caplog.records] == [said]
    back = Restoration(2, tmp_path, tmp_path / "version-000000002.abandoned") if not newer_is_damaged else None
    if back:
        back.begin()
        last = back.newest()
        assert last and last.version == 2, "older checkpoints in the folder do not replace the one that was named"


def test_a_named_checkpoint_that_is_damaged_is_refused_with_a_way_out(tmp_path: Path) -> None:
    for version in (1, 2):
        write(tmp_path, version)
    damage(tmp_path, 2)
    with pytest.raises(CheckpointError, match=rf"continue from the newest whole one with --resume {tmp_path}\.$"):
        Restoration(2, tmp_path, tmp_path / "version-000000002")
    assert names(tmp_path) == ["1", "2"], "a refused command changes nothing"
    first = Restoration(2, tmp_path, tmp_path).first
    assert first and first.version == 1


@pytest.mark.parametrize("version", [1, 3])
def test_a_folder_with_checkpoints_of_another_run_is_refused(tmp_path: Path, version: int) -> None:
    """Older ones too: the run would go back to them if its own were damaged."""
    write(tmp_path / "one", 2)
    write(tmp_path / "other", version)
    with pytest.raises(CheckpointError, match="other has checkpoints of an earlier run: continue it with --resume"):
        Restoration(2, tmp_path / "other", tmp_path / "one")
    with pytest.raises(CheckpointError, match="has checkpoints of an earlier run"):
        Restoration(2, tmp_path / "other", None)


def test_a_folder_with_nothing_but_damaged_checkpoints_does_not_block_a_new_run(tmp_path: Path) -> None:
    (write(tmp_path, 1).folder / "job.json").unlink()
    found = Restoration(2, tmp_path, None)
    found.begin()
    assert found.first is None and names(tmp_path) == ["1.damaged"]


def test_automatic_recovery_goes_back_as_far_as_it_must(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = Restoration(2, tmp_path, None)
    assert found.newest() is None
    for version in (1, 2):
        write(tmp_path, version)
    damage(tmp_path, 2)
    last = found.newest()
    assert last and last.version == 1
    assert names(tmp_path) == ["1", "2.damaged"]
    found.reject(last, "Shard 0 found a NaN.")
    assert found.newest() is None
    assert names(tmp_path) == ["1.damaged", "2.damaged"]
    assert "going back to version 1" in caplog.text


def test_another_number_of_shards_is_accepted_if_the_model_can_be_cut_so(tmp_path: Path) -> None:
    found = write(tmp_path, 1)
    size = found.description.layout.size
    assert found.shards == 2
    for shards in (1, 3, size):
        first = Restoration(shards, tmp_path, tmp_path).first
        assert first and first.version == 1
    with pytest.raises(CheckpointError, match=rf"again: {size + 1} shards are too many: .*; use fewer --servers\.$"):
        Restoration(size + 1, tmp_path, tmp_path)
    with pytest.raises(CheckpointError, match=r"holds a model: use --servers 1 or more\.$"):
        Restoration(0, tmp_path, tmp_path)


def with_nan(found: checkpoint.Checkpoint) -> None:
    """Write the checkpoint again with a NaN among its weights, and with the right digests."""
    part = checkpoint.begin(found.folder.parent, found.version)
    parts = []
    for number in range(found.shards):
        tensors, meta = checkpoint.load(checkpoint.shard_file(found.folder, number))
        tensors["0/weights"][0] = np.nan
        with pytest.MonkeyPatch.context() as patch:  # paceline writes no such checkpoint itself
            patch.setattr("paceline.model.checkpoint.not_finite", lambda _tensors: "")
            parts.append(checkpoint.save_shard(part, number, tensors, meta))
    checkpoint.finish(part, {**found.job, "parts": parts})


def test_a_shard_that_finds_its_part_damaged_sends_the_job_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    plan = CheckpointPlan(tmp_path, updates=2)
    with served("asp", saving=plan) as running:
        assert running.work(lambda where: work(where, 20)) == [20.0]
    newest = checkpoint.read(tmp_path)
    with_nan(newest)
    older, newer = (int(path.name[-9:]) for path in versions(tmp_path))
    with served("asp", saving=plan, resume=tmp_path) as running:
        assert running.work(lambda where: work(where, 20)) == [20.0]
    assert "shard-0.safetensors holds a NaN in 0/weights" in caplog.text
    assert f"Going back to version {older}." in caplog.text
    assert (tmp_path / f"version-{newer:09d}.damaged").is_dir()
    assert checkpoint.read(tmp_path).job["samples"]["trained"] == 20
