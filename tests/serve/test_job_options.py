"""One serialized configuration goes from `paceline run` to the server's process."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.model import checkpoint
from paceline.policies import PolicyError
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.job_options import JobOptions
from paceline.serve.serve_job import LISTENING, note_new_weights
from paceline.serve.wire.tls import Tls

FULL = JobOptions(
    policy="groups:count=2,inner=(bsp:fraction=0.75)",
    shards=3,
    workers=7,
    host="0.0.0.0",
    port=7000,
    streamed=True,
    correct="predict",
    colocate=True,
    lease=1.5,
    saving=CheckpointPlan(Path("kept"), updates=500),
    resume=Path("earlier"),
    record=Path("recorded"),
    tls=Tls("cert.pem", "key.pem", "ca.pem"),
)


@pytest.mark.parametrize("options", [FULL, JobOptions(policy="bsp")], ids=["all", "defaults"])
def test_options_survive_the_way_to_another_process(options: JobOptions) -> None:
    assert JobOptions.from_json(options.to_json()) == options
    assert b"\n" not in options.to_json(), "they are one line"


def test_no_option_is_lost_on_the_way_to_the_server() -> None:
    config = FULL.server_config(b"token")
    for field in dataclasses.fields(config):
        if field.name in JobOptions.__struct_fields__ and field.name != "tls":  # the server reads these files
            assert getattr(config, field.name) == getattr(FULL, field.name), field.name
    assert config.token == b"token"


def test_a_real_job_uses_the_mean_of_updates_unless_its_policy_names_other_weights() -> None:
    options = JobOptions(policy="r2sp:groups=auto")
    assert options.policy == options.server_config(b"").policy == "r2sp:groups=auto,weights=mean"
    assert options.with_policy("groups").policy == "groups:inner=(bsp:weights=mean),outer=(r2sp:weights=mean)"
    assert options.with_policy("r2sp:weights=sum").policy == "r2sp:weights=sum"
    assert JobOptions.from_json(b'{"policy": "asp"}').policy == "asp:weights=mean"
    assert JobOptions(policy="asp", shards=0).policy == "asp", "without shards nothing is applied"
    with pytest.raises(PolicyError, match="There is no policy 'nope'"):
        JobOptions(policy="nope")


def test_a_resumed_job_says_that_its_weights_were_the_sum_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for saved, warned in (("r2sp", True), ("r2sp:weights=mean", False), ("asp", False)):
        monkeypatch.setattr(
            checkpoint, "read", lambda folder, quick, job={"policy": saved}: checkpoint.Checkpoint(folder, job)
        )
        caplog.clear()
        note_new_weights(JobOptions(policy="r2sp", resume=tmp_path))
        assert ("name weights=sum" in caplog.text) is warned
    note_new_weights(JobOptions(policy="r2sp"))


@pytest.mark.parametrize("wrong", [b"", b"{}", b'{"policy": 3}', b'{"policy": "bsp", "polcy": 1}'])
def test_options_that_cannot_be_read_are_an_error(wrong: bytes) -> None:
    with pytest.raises(ValueError):
        JobOptions.from_json(wrong)


def served(text: bytes) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin
    process.stdin.write(text + b"\n")
    process.stdin.flush()
    return process


def test_the_process_listens_and_stops_at_sigterm() -> None:
    process = served(JobOptions(policy="asp", shards=0).to_json())
    assert process.stdout
    assert process.stdout.readline().decode().startswith(LISTENING)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    process.communicate()


def test_an_error_is_one_line() -> None:
    process = served(json.dumps({"policy": "asp", "shards": 0, "host": "0.0.0.0"}).encode())
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(said.decode().splitlines()) == 1 and b"token" in said
