"""SECURITY.md: every test that it names exists, and every "cannot" names one. Nothing that arrives can run code."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paceline"
PAGE = (ROOT / "SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
#: Modules and functions that can run code while they read data.
RUN_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "eval", "exec", "pickle_load"}


def rows() -> list[tuple[str, str]]:
    """The rows of the tables whose heading is "cannot": what cannot be done, and the test."""
    tables = re.findall(r"^\| cannot \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert len(tables) >= 5
    found = [
        tuple(cell.strip() for cell in line.strip("|").split("|")) for table in tables for line in table.splitlines()
    ]
    return [(first, second) for first, second in found]


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_a_test_that_the_page_names_exists(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == test]
    assert functions, f"{file} has no {test}"
    skips = [ast.unparse(mark) for mark in functions[0].decorator_list if "skip" in ast.unparse(mark)]
    assert not skips, f"{test} may be skipped"


def test_every_promise_names_a_test() -> None:
    for promise, test in rows():
        assert re.fullmatch(r"`tests/[\w/]+\.py::\w+`", test), f"{promise!r} names no test"


def arriving() -> list[Path]:
    """The files that read what comes from a peer or from a checkpoint."""
    return sorted(
        [*(SOURCE / "serve").rglob("*.py"), *(SOURCE / "model").rglob("*.py"), *(SOURCE / "job").rglob("*.py")]
    )


@pytest.mark.parametrize("path", arriving(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_that_arrives_can_run_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names: set[str] = set()
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {str(node.module).split(".")[0]}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            names = {called} | ({"pickle_load"} if called in ("torch.load", "numpy.load", "np.load") else set())
        assert not names & RUN_CODE, f"{path.name}, line {getattr(node, 'lineno', 0)}"


def test_an_audit_without_its_database_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for options, code in (((), 1), (("--if-reachable",), 0)):
        command = [sys.executable, str(ROOT / "scripts" / "audit.py"), "--database", nowhere, *options]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == code
        assert "no package was audited" in ran.stdout
