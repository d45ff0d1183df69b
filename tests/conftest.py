"""The order of the tests, and the samples of slow tests and of the fault matrix.

Tests marked slow or core run after all others.

`--sample N` keeps N of the selected tests that are marked matrix and N of those that are marked slow, drawn at random.
It prints the seed, and `--sample-seed` repeats a draw. Tests marked core are always kept. `--pairs` and `--pairs-seed`
choose the jobs with two random faults (tests/faults).
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Collection
from typing import Any

import pytest

try:  # an environment without the development tools may run a part of the tests
    from hypothesis import settings
except ImportError:
    pass
else:  # no deadline: a machine that is busy is no counterexample
    settings.register_profile("paceline", deadline=None)
    settings.load_profile("paceline")

# One torch thread in each process, set before torch is imported. The tests already run in parallel, and threads that
# wait for each other on busy cores spin: a test of 9 seconds took 41.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell that starts pytest in the background makes it and its children ignore SIGINT. Some tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, metavar="N", help="of the tests marked matrix or slow, run only N each")
    parser.addoption("--pairs", type=int, default=300, metavar="N", help="of the pairs of random faults, have N")
    parser.addoption("--pairs-seed", type=int, default=0, metavar="SEED", help="the seed of the first pair")
    parser.addoption("--sample-seed", type=int, metavar="SEED", help="draw the same samples as the run with this seed")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed. Workers of xdist take the seed of the main process, so that all draw the same sample."""
    if config.option.sample is not None and config.option.sample_seed is None:
        given: dict[str, int] = getattr(config, "workerinput", {})
        config.option.sample_seed = given.get("sample_seed", random.SystemRandom().randrange(1_000_000))


@pytest.hookimpl(optionalhook=True)  # xdist may be missing
def pytest_configure_node(node: Any) -> None:
    node.workerinput["sample_seed"] = node.config.option.sample_seed


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed at the start, so that it is known even if the run hangs."""
    options, terminal = session.config.option, session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal and options.sample is not None:  # workers of xdist have no terminal
        again = f"pytest -m 'matrix or slow' --sample {options.sample} --sample-seed {options.sample_seed}"
        terminal.write_line(f"The samples have the seed {options.sample_seed}. Repeat them with: {again}")


@pytest.hookimpl(trylast=True)  # after the parameters are known
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Do not make the tests of a function that the sample certainly leaves out.

    The fault matrix has 14,000 tests, and each process of xdist would spend seconds on making them. A sample of N has
    at most the first N of a function in the order of the draw. -m may select by other marks, so tests with different
    marks are counted apart. -k and names of tests on the command line select by name: then all tests are made.
    """
    options, calls = metafunc.config.option, getattr(metafunc, "_calls", [])  # without this private list, all are made
    if options.sample is None or options.keyword or any("::" in each for each in options.file_or_dir) or not calls:
        return
    shared = {mark.name for mark in metafunc.definition.iter_markers()}
    alike: dict[frozenset[str], list[str]] = {}
    for call in calls:
        marks = frozenset(shared | {mark.name for mark in call.marks})
        alike.setdefault(marks, []).append(f"{metafunc.definition.nodeid}[{call.id}]")
    for marks, names in alike.items():
        if pool(marks):
            names[:] = sample(names, config=metafunc.config, least=1)
    kept = {name for names in alike.values() for name in names}
    metafunc._calls = [call for call in calls if f"{metafunc.definition.nodeid}[{call.id}]" in kept]


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.sample is not None:
        pools: dict[str | None, list[pytest.Item]] = {}
        for item in items:
            pools.setdefault(pool({mark.name for mark in item.iter_markers()}), []).append(item)
        kept = {item.nodeid for item in pools.pop(None, ())}
        for tests in pools.values():
            kept.update(sample([item.nodeid for item in tests], config))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
    items.sort(key=lambda item: any(item.get_closest_marker(mark) for mark in ("slow", "core")))


def pool(marks: Collection[str]) -> str | None:
    """Return which tests a test with these marks is drawn from: matrix or slow. None: it always runs.

    A case of a core test may be one of the matrix.
    """
    return "matrix" if "matrix" in marks else "slow" if "slow" in marks and "core" not in marks else None


def sample(names: list[str], config: pytest.Config, least: int = 0) -> list[str]:
    """Draw a sample. It depends on the seed and on the names of the tests, but not on their order.

    A hash gives each name its place in the draw. So a name that is drawn from all is also drawn from any part of them.
    """

    def place(name: str) -> bytes:
        return hashlib.blake2b(f"{config.option.sample_seed} {name}".encode()).digest()

    return sorted(names, key=place)[: max(config.option.sample, least)]
