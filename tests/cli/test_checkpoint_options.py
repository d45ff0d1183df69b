"""The options of checkpoints are checked before a job begins."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

pytest.importorskip("msgspec")

from paceline.cli.checkpoint_options import absence_seconds, checkpoint_plan, resumed
from paceline.cli.options import ABSENCE
from paceline.job.leases import EXPECTED_BACK


def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        checkpoint_plan(folder, None, None, None)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = os.mkdir

    def mkdir(path: str, mode: int = 0o777) -> None:
        if Path(path).parent == tmp_path:  # root may write everywhere
            raise PermissionError(errno.EACCES, "Permission denied", path)
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    expected = f"--checkpoint: the folder {str(tmp_path)!r} cannot be written to; name another one.\n"
    assert refusal(tmp_path, capsys) == expected
    assert refusal(tmp_path / "new" / "folder", capsys) == expected, "it could not be made"


def test_a_folder_below_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file", capsys).endswith("is not a folder.\n")
    assert refusal(tmp_path / "file" / "runs", capsys).endswith("file' cannot be written to; name another one.\n")


def test_a_folder_that_does_not_exist_yet_will_do(tmp_path: Path) -> None:
    plan = checkpoint_plan(tmp_path / "new" / "folder", "500", None, None)
    assert plan is not None and plan.updates == 500
    assert not (tmp_path / "new").exists()


def test_resume_auto_begins_anew_only_if_there_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = Path("auto")
    assert resumed(auto, tmp_path / "none") is None
    assert resumed(Path("other"), tmp_path) == Path("other")
    with pytest.raises(SystemExit):
        resumed(auto, None)
    assert capsys.readouterr().err == "--resume auto needs --checkpoint, the folder to look for a checkpoint in.\n"
    (tmp_path / "version-000000005").mkdir()
    with pytest.raises(SystemExit):
        resumed(auto, tmp_path)
    assert "No other checkpoint in" in " ".join(capsys.readouterr().err.split()), "a damaged one is not written over"


def test_absence_is_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert absence_seconds(ABSENCE) == EXPECTED_BACK
    assert absence_seconds("10m") == 600.0
    with pytest.raises(SystemExit):
        absence_seconds("long")
    assert capsys.readouterr().err == "--absence must be a time (30s, 10m, 1h), not 'long'.\n"
