"""An uncaught error of paceline is one sentence for the user, and an exit code for `paceline run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.serve.environment import LAUNCHED, LOST, REFUSAL, REFUSED
from paceline.serve.environment import address as address_of
from paceline.serve.wire.frames import WireError
from paceline.serve.worker import uncaught
from paceline.serve.worker.endings import Refusal

#: A script that joins, and then ends with the error of its first argument.
SCRIPT = """
import sys
from paceline.serve.environment import address
from paceline.serve.wire.frames import WireError
from paceline.serve.worker import uncaught
from paceline.serve.worker.endings import Refusal

uncaught.shorten()
match sys.argv[1]:
    case "lost":
        raise WireError("The server is lost.")
    case "refused":
        raise Refusal("The data differs.")
    case "wrong":
        address("nowhere")
    case "own":
        raise ValueError("The script's own.")
    case "interrupt":
        raise KeyboardInterrupt
"""


def run(tmp_path: Path, kind: str, **variables: str) -> tuple[int, str]:
    """Return the exit code and the standard error of the script."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    known = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    ran = subprocess.run(
        [sys.executable, script, kind], env=known | variables, capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("lost", LOST, "The server is lost."),
        ("refused", LOST, "The data differs."),
        ("wrong", REFUSED, "A server's address is written host:port, not 'nowhere'. (train.py, line 15)"),
    ],
)
def test_an_error_of_paceline_is_one_sentence(kind: str, code: int, said: str, tmp_path: Path) -> None:
    assert run(tmp_path, kind) == (1, f"{said}\n")
    assert run(tmp_path, kind, **{LAUNCHED: "1"}) == (code, f"\n{REFUSAL}{said}\n"), "the launcher gets it"
    code, shown = run(tmp_path, kind, PACELINE_TRACEBACK="1")
    assert shown.startswith("Traceback") and code == 1


def test_the_scripts_own_error_keeps_its_traceback(tmp_path: Path) -> None:
    for variables in ({}, {LAUNCHED: "1"}):
        code, shown = run(tmp_path, "own", **variables)
        assert code == 1
        assert shown.startswith("Traceback") and shown.endswith("ValueError: The script's own.\n")


def test_an_interrupted_worker_says_so_in_one_line(tmp_path: Path) -> None:
    assert run(tmp_path, "interrupt") == (-2, "Interrupted; this worker leaves the job.\n")


def raised(what: object) -> BaseException:
    """Return the error that a call raises, with its traceback."""
    with pytest.raises(Exception) as caught:
        what()  # type: ignore[operator]
    return caught.value


def test_only_errors_that_paceline_raises_are_shortened() -> None:
    assert uncaught.sentence(raised(lambda: address_of("no")))
    assert not uncaught.sentence(raised(lambda: address_of(None))), "an error of another kind is a bug"  # type: ignore[arg-type]
    assert not uncaught.sentence(raised(lambda: int("no"))), "raised by the script"
    assert uncaught.sentence(Refusal("The update\nwas refused.")) == "The update was refused."
    assert uncaught.sentence(WireError("No server.")) == "No server."


def test_a_bug_of_paceline_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError that no `raise` statement of paceline raises says nothing to a user."""
    monkeypatch.setattr(uncaught, "PACKAGE", str(Path(__file__).parent))
    assert not uncaught.sentence(raised(lambda: int("no")))


def test_the_hook_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: object) -> None: ...

    monkeypatch.setattr(sys, "excepthook", other)
    monkeypatch.setattr(uncaught, "_show_traceback", None)
    for _ in range(2):
        uncaught.shorten()
    assert uncaught._show_traceback is other
