"""The options of checkpoints are checked before a job begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("msgspec")

from paceline.cli.checkpoint_options import checkpoint_plan


def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        checkpoint_plan(folder, None, None, None)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    expected = f"--checkpoint: the folder {str(tmp_path)!r} cannot be written to.\n"
    assert refusal(tmp_path, capsys) == expected
    assert refusal(tmp_path / "new" / "folder", capsys) == expected, "it could not be made"


def test_a_folder_below_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file", capsys).endswith("is not a folder.\n")
    assert refusal(tmp_path / "file" / "runs", capsys).endswith("file' cannot be written to.\n")


def test_a_folder_that_does_not_exist_yet_will_do(tmp_path: Path) -> None:
    plan = checkpoint_plan(tmp_path / "new" / "folder", "500", None, None)
    assert plan is not None and plan.updates == 500
    assert not (tmp_path / "new").exists()
