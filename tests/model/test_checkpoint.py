"""A checkpoint is complete or does not exist, and a job continues from one as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import paceline
from paceline.model import checkpoint
from paceline.model.checkpoint import CheckpointError
from paceline.model.export import export
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from serve.workers import SIZE, described, work
from train.jobs import job


def trained(folder: Path, samples: int = 40, shards: int = 2) -> checkpoint.Checkpoint:
    with job("asp", shards=shards, workers=2, saving=CheckpointPlan(folder, updates=3)) as running:
        running.work(*[lambda where: work(where, samples)] * 2)
        running.finish()
    found = checkpoint.newest(folder)
    assert found is not None
    return found


def test_the_last_checkpoint_holds_the_whole_job(tmp_path: Path) -> None:
    found = trained(tmp_path)
    assert found.version == 10
    assert found.shards == 2
    weights = checkpoint.weights(found)
    assert {name: array.shape for name, array in weights.items()} == {"w": (SIZE - 2,), "b": (2,)}
    assert all(np.all(array == 40) for array in weights.values())
    assert found.job["samples"]["trained"] == 40
    assert found.job["samples"]["open"] == []
    assert sum(iteration for _, _, iteration in found.job["applied"]) == 10, (
        "one entry per worker, with its last iteration"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in tmp_path.iterdir() if path.name.startswith("version-") and not path.name.endswith(".part")
    )
    assert len(list(tmp_path.iterdir())) == 2, "only the last two are kept"


def test_a_job_continues_from_a_checkpoint(tmp_path: Path) -> None:
    """Samples that were done stay done, the other samples are trained on, and incarnations keep counting."""
    trained(tmp_path, 40)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    with job("asp", shards=2, workers=1, restored=found, saving=CheckpointPlan(tmp_path, updates=100)) as running:
        assert running.work(lambda where: work(where, 40, epochs=2)) == [80.0]
        running.finish()
    again = checkpoint.newest(tmp_path)
    assert again is not None
    assert np.all(checkpoint.weights(again)["w"] == 80)
    assert again.version == 20
    assert again.job["incarnations"]["0"] == 2


def test_the_memory_of_the_policy_is_restored(tmp_path: Path) -> None:
    spec = "fl-r2sp:groups=2,fraction=1"
    with job(spec, workers=4, saving=CheckpointPlan(tmp_path, updates=2)) as running:
        before: Any = running.coordinator.ledger.policy
        before.blacklist[9] = (0.25, 0.5)
        running.work(*[lambda where: work(where, 40)] * 4)
        running.finish()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.job["memory"]["T"] > 0
    with job(spec, restored=found) as running:
        again: Any = running.coordinator.ledger.policy
        assert again.blacklist == {9: (0.25, 0.5)}
        assert again.outer.pace.T == found.job["memory"]["T"]
        assert running.work(lambda where: work(where, 40, epochs=2))[0] > 40
    with job("fl-r2sp:groups=3", restored=found) as running:  # another policy ignores the memory
        other: Any = running.coordinator.ledger.policy
        assert not other.blacklist and other.outer.pace.T is None


def test_a_model_other_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    found = trained(tmp_path)
    with job("asp", shards=2, restored=found) as running:
        from paceline.serve.environment import address
        from paceline.serve.worker.client import Client

        with pytest.raises(ConnectionError, match="is of another model: the shape of 'w' is"):
            Client(address(running.address), described(size=13))
        with pytest.raises(ConnectionError, match="was trained with SGD, and this job uses Adam"):
            Client(address(running.address), described(optimizer="Adam"))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_export_writes_a_plain_state_dict(tmp_path: Path, suffix: str) -> None:
    trained(tmp_path / "job")
    target = tmp_path / f"model{suffix}"
    assert export(tmp_path / "job", target) == (10, 2)
    if suffix == ".pt":
        state = torch.load(target, weights_only=True)
    else:
        from safetensors.torch import load_file

        state = load_file(target)
    assert torch.equal(state["b"], torch.full((2,), 40.0))
    assert {path.name for path in tmp_path.iterdir()} == {"job", target.name}


def test_a_damaged_or_missing_checkpoint_is_explained_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*; name the folder"):
        checkpoint.read(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="There is no checkpoint in "):
        checkpoint.read(tmp_path / "empty")
    found = trained(tmp_path / "job")
    described = found.folder / "job.json"
    whole = described.read_text()
    instead = rf"; continue from the newest whole one with --resume {tmp_path / 'job'}\.$"
    for damage in ("{", "[]", '{"format": 99}', whole.replace('"version": 10', '"version": 11')):
        described.write_text(damage)
        with pytest.raises(CheckpointError, match=r"is damaged: job\.json cannot be read: .*" + instead):
            checkpoint.read(found.folder)
    old = {name: value for name, value in json.loads(whole).items() if name not in ("digest", "parts")}
    described.write_text(json.dumps(old | {"format": 2, "shards": 3}))
    with pytest.raises(CheckpointError, match=r"shard-2\.safetensors cannot be read: No such file"):
        checkpoint.read(found.folder)
    described.write_text(whole)
    part = found.folder / "shard-1.safetensors"
    part.write_bytes(part.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"shard-1\.safetensors has \d+ bytes instead of \d+" + instead):
        checkpoint.read(found.folder)


def test_an_incomplete_checkpoint_is_ignored(tmp_path: Path) -> None:
    found = trained(tmp_path)
    part = checkpoint.part_of(tmp_path, found.version + 1)
    part.mkdir()
    (part / "shard-0.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path) == found


def test_the_job_continues_if_the_folder_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with job("asp", shards=1, workers=1, saving=CheckpointPlan(blocked / "inside", updates=2)) as running:
        assert running.work(lambda where: work(where, 20)) == [20.0]
        running.finish()


def test_a_folder_of_an_earlier_run_is_refused(tmp_path: Path) -> None:
    """The new run would mistake those checkpoints for its own, and remove its own as older ones."""
    import asyncio

    from paceline.policies import make
    from paceline.serve.coordinator.config import ServerConfig
    from paceline.serve.server import Server

    trained(tmp_path)

    async def serve(resume: Path | None) -> None:
        Server(lambda: make("asp"), ServerConfig(shards=2, saving=CheckpointPlan(tmp_path, updates=3)), resume=resume)

    with pytest.raises(CheckpointError, match="has checkpoints of an earlier run: continue it with --resume"):
        asyncio.run(serve(None))
    asyncio.run(serve(tmp_path))


def test_a_full_disk_does_not_keep_the_job_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_shard", full)
    with job("asp", shards=1, workers=1, saving=CheckpointPlan(tmp_path, updates=2)) as running:
        assert running.work(lambda where: work(where, 20)) == [20.0]
        running.finish()
    assert list(tmp_path.iterdir()) == []


def test_an_export_loads_strictly_with_batch_norm_and_its_count(tmp_path: Path) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))

    def train(where: str) -> None:
        net = model()
        data = torch.utils.data.TensorDataset(torch.randn(36, 4), torch.randint(0, 2, (36,)))
        with paceline.join(net, torch.optim.Adam(net.parameters()), connect=where) as session:
            for x, y in session.batches(data, batch_size=4):
                loss = torch.nn.functional.cross_entropy(net(x), y)
                loss.backward()
                session.step(loss)

    with job("bsp", shards=2, workers=2, saving=CheckpointPlan(tmp_path / "job", updates=100)) as running:
        running.work(train, train)
        running.finish()
    export(tmp_path / "job", tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state["1.num_batches_tracked"].dtype == torch.int64
    assert int(state["1.num_batches_tracked"]) == 5, "two workers train on nine batches in five rounds"
    assert float(state["1.running_var"].mean()) != 1.0
    model().load_state_dict(state)
