"""Notes and refusals of a job or a lab, before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.job_checks import note_links
from paceline.cli.shared import check_script
from shell import Shell


def test_a_machine_that_cannot_carry_the_links_is_noted_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    note_links(0.97)
    assert not capsys.readouterr().err
    note_links(0.005)
    noted = " ".join(capsys.readouterr().err.split())
    assert noted.startswith("Note: this machine carries only 0.5% of the links' rates")
    assert "Describe slower links" in noted


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--record-updates", "train.py", "--record-updates: 'train.py' is not a folder."),
        ("--record-updates", "/proc/x", "--record-updates: the folder '/proc' cannot be written to; name another one."),
        ("--checkpoint", "/proc/x", "--checkpoint: the folder '/proc' cannot be written to; name another one."),
        ("--trace", "/proc/x.jsonl", "--trace: the folder '/proc' cannot be written to; name another one."),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_job(
    command: str,
    option: str,
    value: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text("raise SystemExit('this script must not be started')\n")
    shell = Shell(tmp_path, capsys, monkeypatch, (command,))
    ended = shell(option, value, *(["train.py"] if command == "run" else []))
    assert (ended.code, ended.out, ended.err) == (2, "", said + "\n")


def test_a_folder_in_place_of_the_script_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_script(str(tmp_path))
    assert capsys.readouterr().err == f"{str(tmp_path)!r} is a folder; name the training script.\n"
