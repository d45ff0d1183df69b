"""The trackers against the real libraries: the logged values are read back with the library's own reader.

A library that is not installed is skipped. `make test-metrics` runs all of these tests in an environment of their own.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrics.test_background import drive
from paceline.metrics.background import BackgroundTracker, Tracker
from paceline.metrics.trackers import MlflowTracker, TensorBoardTracker, WandbTracker

pytestmark = pytest.mark.filterwarnings("ignore")  # of these libraries
NAMES = {"loss", "batch_size", "staleness", "samples_per_second", "waiting_share", "members", "accuracy"}


def logged(tracker: Tracker) -> list[str]:
    """Log a job of five updates, which goes back to version 3 in between. Return the warnings."""
    said: list[str] = []
    log = BackgroundTracker(tracker, "digits-asp", {"workers": 1, "script": "a|b<script>.py"}, said.append)
    log.wait_until_begun(120)
    log.described(0.0, 1000, "SGD(lr=0.1)")
    drive(log, 5)
    log.measured(11.0, 0, "accuracy", 0.75)
    log.applied(12.0, 3, (0,), (3,), (0,), (1,))
    log.close()
    return said


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for run in ("digits-asp", "digits-asp-2"):
        assert logged(TensorBoardTracker(str(tmp_path))) == []
        read = accumulators.EventAccumulator(str(tmp_path / run)).Reload()
        assert set(read.Tags()["scalars"]) == NAMES
        loss = [(each.step, each.value) for each in read.Scalars("loss")]
        assert loss == [(n, pytest.approx(1 / n)) for n in range(1, 6)]
        assert [each.value for each in read.Scalars("accuracy")] == [0.75]
        text = read.Tensors("parameters/text_summary")[-1].tensor_proto.string_val[0].decode()
        assert "| workers | 1 |" in text
        assert "| optimizer | SGD(lr=0.1) |" in text
        assert "<script>" not in text


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no store of its own")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert logged(MlflowTracker(uri)) == []
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "digits-asp")
    assert set(run.data.metrics) == NAMES
    assert run.data.params["optimizer"] == "SGD(lr=0.1)"
    assert (run.data.params["workers"], run.data.params["policy"]) == ("1", "asp")
    loss = sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss"))
    assert loss == [(n, pytest.approx(1 / n)) for n in range(1, 6)]


@pytest.mark.slow
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for variable, value in (("MODE", "offline"), ("DIR", tmp_path), ("CACHE_DIR", tmp_path), ("CONFIG_DIR", tmp_path)):
        monkeypatch.setenv(f"WANDB_{variable}", str(value))
    assert logged(WandbTracker("demo")) == []
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    end = time.monotonic() + 60
    while not (found := records_of(file)):  # the process of wandb may still be writing
        assert time.monotonic() < end, "wandb did not complete its file"
        time.sleep(0.1)
    rows, config = found
    assert [(row["version"], row["loss"]) for row in rows if "loss" in row] == [
        (n, pytest.approx(1 / n)) for n in range(1, 6)
    ]
    assert rows[-1]["version"] == 3, "the job went back to a checkpoint"
    assert {name for row in rows for name in row if not name.startswith("_")} >= NAMES
    assert config["optimizer"] == "SGD(lr=0.1)"


def records_of(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    """Return the rows of an offline run, and its configuration, or None if the end of the run is not in the file."""
    from wandb.proto import wandb_internal_pb2

    rows, config = [], dict[str, Any]()
    for data in chunks_of(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        match record.WhichOneof("record_type"):
            case "history":
                items = record.history.item
                rows.append({each.key or each.nested_key[0]: json.loads(each.value_json) for each in items})
            case "run":
                config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
            case "config":
                config |= {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.config.update}
            case "exit":
                return rows, config
    return None


def chunks_of(text: bytes) -> Iterator[bytes]:
    """Yield the records of a file in the log format of LevelDB, after the seven bytes by which wandb begins a file.

    A record is cut at the end of a block. Each part has a checksum, a length and a kind: whole, first, middle, last.
    """
    block, whole, _, last = 1 << 15, 1, 2, 4
    at, record = 7, b""
    while at + 7 <= len(text):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", text, at)
        if at + 7 + length > len(text):
            return  # it is still being written
        record += text[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (whole, last):
            yield record
            record = b""
