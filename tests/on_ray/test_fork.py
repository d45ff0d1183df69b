"""Processes that a fork server starts are like those that Python starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")

from paceline.ray import fork_server

SCRIPT = """
import json, os, random, sys
import numpy
numbers = [random.random(), numpy.random.rand()]
found = {"modules": list(sys.modules), "numbers": numbers, "arguments": sys.argv, "path": sys.path}
found |= {"folder": os.getcwd(), "parent": os.getppid(), "is_leader": os.getpgrp() == os.getpid()}
found["variable"] = os.environ.get("OF_THE_TASK")
with open(sys.argv[1] + ".part", "w") as file:
    json.dump(found, file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


def forked(folder: Path, name: str) -> dict[str, Any]:
    """Return what a process finds that the fork server of this folder has started."""
    script, answer = folder / "script.py", folder / name
    script.write_text(SCRIPT)
    environment = {**os.environ, "OF_THE_TASK": name, "PYTHONPATH": str(folder / "modules")}
    task = {"arguments": [str(script), str(answer)], "environment": environment, "folder": str(folder)}
    fork_server.ask(str(folder / "socket"), task)
    ends = time.monotonic() + 30.0
    while not answer.exists():
        assert time.monotonic() < ends
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def test_forked_processes_have_their_own_arguments_environment_and_random_numbers(tmp_path: Path) -> None:
    one, other = forked(tmp_path, "one"), forked(tmp_path, "other")
    os.kill(one["parent"], signal.SIGTERM)
    assert one["parent"] == other["parent"] != os.getpid()  # one server
    assert (one["variable"], other["variable"]) == ("one", "other")
    assert one["arguments"] == [str(tmp_path / "script.py"), str(tmp_path / "one")]
    assert one["folder"] == str(tmp_path)
    assert str(tmp_path / "modules") in one["path"]
    assert "torch" in one["modules"]
    assert all(first != second for first, second in zip(one["numbers"], other["numbers"], strict=True))
    assert one["is_leader"]  # Ray ends the process group of a worker that it has lost, and no other must be in it


def test_without_a_fork_server_the_file_runs_as_usual(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    launcher = [sys.executable, "-I", "-S", fork_server.__file__]
    for options in (["plain"], [f"--object-store-name={tmp_path}/missing/socket"]):
        run = subprocess.run([*launcher, str(script), *options], capture_output=True, text=True, check=False)
        assert (run.returncode, run.stdout) == (3, f"{options}\n")
