"""The targets of --log: which are known, and which are refused before the job starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paceline.metrics import targets
from paceline.metrics.errors import MetricsError
from paceline.metrics.targets import LogTarget

KNOWN = r"tensorboard:DIR, mlflow:URI or wandb:PROJECT"


@pytest.mark.parametrize(
    ("text", "kind", "place"),
    [
        ("tensorboard:runs", "tensorboard", "runs"),
        ("mlflow:http://host:5000", "mlflow", "http://host:5000"),
        ("mlflow:sqlite:///a.db", "mlflow", "sqlite:///a.db"),
        ("wandb:team/project", "wandb", "team/project"),
    ],
)
def test_a_target_is_a_kind_and_a_place(text: str, kind: str, place: str) -> None:
    assert LogTarget.parse(text) == LogTarget(kind, place)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensorbord:runs", rf"--log must be {KNOWN}, not 'tensorbord:runs'; did you mean tensorboard:runs\."),
        ("runs", rf"--log must be {KNOWN}, not 'runs'\."),
        ("mlflow", rf"--log mlflow needs a tracking URI: {KNOWN}\."),
        ("wandb:", rf"--log wandb needs a project: {KNOWN}\."),
    ],
)
def test_another_text_is_answered_with_the_known_targets(text: str, message: str) -> None:
    with pytest.raises(MetricsError, match=f"^{message}$"):
        LogTarget.parse(text)


def test_a_tracking_server_that_does_not_answer_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        targets.CHECKS["mlflow"](f"http://127.0.0.1:{port}")
    message = rf"^--log mlflow: http://127\.0\.0\.1:{port} does not answer \(.*\); start it, or correct its address\.$"
    with pytest.raises(MetricsError, match=message):
        targets.CHECKS["mlflow"](f"http://127.0.0.1:{port}")


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    targets.CHECKS["tensorboard"](str(tmp_path / "new" / "folder"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(MetricsError, match="cannot be written to; name another one"):
        targets.CHECKS["tensorboard"](str(tmp_path / "file"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
def test_a_folder_that_cannot_be_made_is_refused_even_for_root() -> None:
    with pytest.raises(MetricsError, match=r"^--log tensorboard: the folder '/proc/x' cannot be written to; "):
        targets.CHECKS["tensorboard"]("/proc/x")


def test_wandb_needs_a_key_unless_it_is_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(MetricsError, match=r"needs a key: run `wandb login`, or set WANDB_MODE=offline\.$"):
        targets.CHECKS["wandb"]("demo")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password none\n")
    targets.CHECKS["wandb"]("demo")
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    targets.CHECKS["wandb"]("demo")
    with pytest.raises(MetricsError, match="must be PROJECT or ENTITY/PROJECT"):
        targets.CHECKS["wandb"]("a/b/c")
