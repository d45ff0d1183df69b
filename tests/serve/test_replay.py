"""A recorded run is replayed: the simulator makes the same decisions, and the weights are the same, bit for bit."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.observe.observer import Recorder
from paceline.observe.trace import Applied
from paceline.policies import make, names
from paceline.serve import replay
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.server import Server, ServerError
from paceline.serve.shard import recording
from paceline.simulate.journal_replay import replay_journal
from paceline.train.session import join
from serve.workers import work
from train.jobs import job


def train(where: str, **options: Any) -> Any:
    """Train a small network under Adam, with real gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    x, y = torch.randn(60, 5), torch.randint(0, 2, (60,))
    with join(model, torch.optim.Adam(model.parameters(), lr=0.01), connect=where, **options) as session:
        for a, b in session.batches(torch.utils.data.TensorDataset(x, y), batch_size=5, epochs=2):
            loss = torch.nn.functional.cross_entropy(model(a), b)
            loss.backward()
            session.step(loss)


@pytest.mark.parametrize("policy", [name for name in names() if not make(name).keeps])
def test_a_replay_makes_the_same_decisions(policy: str, tmp_path: Path) -> None:
    """The real coordinator decided with real times and timers. The simulator's driver must decide the same."""
    with job(policy, shards=2, workers=3, record=tmp_path) as running:
        running.work(*[lambda where: work(where, 90)] * 3)
        running.finish()
    (journal,) = replay.journals(tmp_path)
    again: list[Any] = []
    count, difference = replay_journal(journal.read_text().splitlines(), Recorder(again.append))
    assert difference is None
    assert count > 90 / 4
    first = [event for event in running.events if isinstance(event, Applied)]
    assert [event for event in again if isinstance(event, Applied)] == first, (
        "times, versions and staleness must be the same"
    )


def test_a_replay_gives_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    with job("r2sp:weights=mean", shards=2, workers=3, record=tmp_path) as running:
        running.work(*[train] * 3)
        running.finish()
    parts = replay.weights(tmp_path)
    assert len(parts) == 2
    assert all(part.same and part.whole and part.version == 24 and part.updates == 24 for part in parts)


@pytest.mark.parametrize("policy", ["r2sp:weights=mean", "bsp:weights=mean"])
def test_a_replay_of_local_steps_gives_the_same_weights(policy: str, tmp_path: Path) -> None:
    with job(policy, shards=2, workers=3, record=tmp_path, update_codec="topk:0.1") as running:
        running.work(*[partial(train, local_steps=2)] * 3)
        running.finish()
    parts = replay.weights(tmp_path)
    assert len(parts) == 2
    assert all(part.same and part.whole and part.updates >= 12 for part in parts)


def test_a_replay_of_compared_models_gives_the_same_weights(tmp_path: Path) -> None:
    """A recording does not say which weights each model began from. Only the comparison needs them."""
    with job("fl-r2sp:groups=1,fraction=1,as_printed=true", shards=2, workers=3, record=tmp_path) as running:
        running.work(*[train] * 3)
        running.finish()
    parts = replay.weights(tmp_path)
    assert len(parts) == 2
    assert all(part.same and part.whole and part.version > 0 for part in parts)


def test_a_changed_recording_is_noticed(tmp_path: Path) -> None:
    with job("ssp", shards=1, workers=2, record=tmp_path) as running:
        running.work(*[lambda where: work(where, 40)] * 2)
        running.finish()
    (journal,) = replay.journals(tmp_path)
    lines = journal.read_text().splitlines()
    # Under SSP, an update that arrives may lead to no decision, so which line has one depends on the timing.
    at = next(at for at, line in enumerate(lines) if at >= 5 and json.loads(line).get("decided"))
    lines[at] = json.dumps(json.loads(lines[at]) | {"decided": []})
    _, difference = replay_journal(lines)
    assert difference is not None
    assert difference.line == at + 1
    (recorded,) = tmp_path.glob("shard-*.rec")
    data = bytearray(recorded.read_bytes())
    at = data.index(b"RecordedUpdate") + 71  # somewhere in the first gradient
    data[at] ^= 1
    recorded.write_bytes(data)
    assert not replay.weights(tmp_path)[0].same
    recorded.write_bytes(data[:-10])
    assert not replay.weights(tmp_path)[0].whole


def test_a_recording_may_begin_from_a_checkpoint(tmp_path: Path) -> None:
    from paceline.model import checkpoint
    from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan

    with job("asp", shards=1, saving=CheckpointPlan(tmp_path / "job", updates=5)) as running:
        running.work(lambda where: work(where, 40))
        running.finish()
    found = checkpoint.newest(tmp_path / "job")
    with job("asp", shards=1, restored=found, record=tmp_path / "record") as running:
        running.work(lambda where: work(where, 40, epochs=2))
        running.finish()
    (path,) = (tmp_path / "record").glob("*.rec")
    done = recording.replay(path)
    assert done.digest == done.expected
    assert (done.version, done.updates) == (20, 10)


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(replay.ReplayError, match="There is no recording in"):
        replay.journals(tmp_path)


@pytest.mark.parametrize(
    ("policy", "streamed", "instead"),
    [
        ("r2sp", True, "leave --apply at whole"),
        ("bsp:pipeline=true", False, "leave pipeline=true out"),
        ("bsp", True, None),  # bsp is never streamed
        ("r2sp", False, None),
    ],
)
def test_streamed_updates_cannot_be_recorded(policy: str, streamed: bool, instead: str | None, tmp_path: Path) -> None:
    async def configure() -> None:
        Server(lambda: make(policy), ServerConfig(record=tmp_path, streamed=streamed))

    if instead is None:
        asyncio.run(configure())
        return
    with pytest.raises(ServerError, match=f"^Streamed updates cannot be recorded yet: {instead}.$"):
        asyncio.run(configure())
