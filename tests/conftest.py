"""The order of the tests, and the sample of the fault matrix.

Tests marked slow run after all others.

`--matrix-sample N` keeps N of the selected tests that are marked matrix, drawn at random. It prints the seed.
`--matrix-seed` repeats a draw. `--pairs` and `--pairs-seed` choose the jobs with two random faults (tests/faults).
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from typing import Any

import pytest

# One torch thread in each process, set before torch is imported. The tests already run in parallel, and threads that
# wait for each other on busy cores spin: a test of 9 seconds took 41.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell that starts pytest in the background makes it and its children ignore SIGINT. Some tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix-sample", type=int, metavar="N", help="of the tests marked matrix, run only N")
    parser.addoption("--pairs", type=int, default=300, metavar="N", help="of the pairs of random faults, have N")
    parser.addoption("--pairs-seed", type=int, default=0, metavar="SEED", help="the seed of the first pair")
    parser.addoption("--matrix-seed", type=int, metavar="SEED", help="draw the same sample as the run with this seed")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed. Workers of xdist take the seed of the main process, so that all draw the same sample."""
    if config.option.matrix_sample is not None and config.option.matrix_seed is None:
        given: dict[str, int] = getattr(config, "workerinput", {})
        config.option.matrix_seed = given.get("matrix_seed", random.SystemRandom().randrange(1_000_000))


@pytest.hookimpl(optionalhook=True)  # xdist may be missing
def pytest_configure_node(node: Any) -> None:
    node.workerinput["matrix_seed"] = node.config.option.matrix_seed


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed at the start, so that it is known even if the run hangs."""
    options, terminal = session.config.option, session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal and options.matrix_sample is not None:  # workers of xdist have no terminal
        again = f"pytest -m matrix --matrix-sample {options.matrix_sample} --matrix-seed {options.matrix_seed}"
        terminal.write_line(f"The matrix sample has the seed {options.matrix_seed}. Repeat it with: {again}")


@pytest.hookimpl(trylast=True)  # after the parameters are known
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Do not make the tests of a function that the sample certainly leaves out.

    The fault matrix has 14,000 tests, and each process of xdist would spend seconds on making them. A sample of N has
    at most the first N of a function in the order of the draw. -m may select by other marks, so tests with different
    marks are counted apart. -k and names of tests on the command line select by name: then all tests are made.
    """
    options, calls = metafunc.config.option, getattr(metafunc, "_calls", [])  # without this private list, all are made
    if (
        options.matrix_sample is None
        or options.keyword
        or any("::" in each for each in options.file_or_dir)
        or not calls
    ):
        return
    shared = {mark.name for mark in metafunc.definition.iter_markers()}
    alike: dict[frozenset[str], list[str]] = {}
    for call in calls:
        marks = frozenset(shared | {mark.name for mark in call.marks})
        alike.setdefault(marks, []).append(f"{metafunc.definition.nodeid}[{call.id}]")
    for marks, names in alike.items():
        if "matrix" in marks:
            names[:] = matrix_sample(names, config=metafunc.config, least=1)
    kept = {name for names in alike.values() for name in names}
    metafunc._calls = [call for call in calls if f"{metafunc.definition.nodeid}[{call.id}]" in kept]


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.matrix_sample is not None:
        matrix = [item for item in items if item.get_closest_marker("matrix")]
        left_out = {item.nodeid for item in matrix} - set(matrix_sample([item.nodeid for item in matrix], config))
        config.hook.pytest_deselected(items=[item for item in matrix if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def matrix_sample(names: list[str], config: pytest.Config, least: int = 0) -> list[str]:
    """Draw the sample. It depends on the seed and on the names of the tests, but not on their order.

    A hash gives each name its place in the draw. So a name that is drawn from all is also drawn from any part of them.
    """

    def place(name: str) -> bytes:
        return hashlib.blake2b(f"{config.option.matrix_seed} {name}".encode()).digest()

    return sorted(names, key=place)[: max(config.option.matrix_sample, least)]
