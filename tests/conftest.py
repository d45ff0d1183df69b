"""The order of the tests, and the sample of the fault matrix.

Fast tests run first. Those marked slow run when all the others have had their turn.

`--matrix-sample N` keeps N of the selected tests that are marked matrix, drawn by chance. The seed is printed, and
`--matrix-seed` draws the same sample again.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

# One thread of torch in each process, before anything imports it: the tests run side by side already, and threads that
# wait for each other on busy cores spin. A test that takes 9 seconds so took 41.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell that starts tests in the background has them, and all that they start, ignore Ctrl-C; and some test just that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix-sample", type=int, metavar="N", help="of the tests marked matrix, run only N")
    parser.addoption("--matrix-seed", type=int, metavar="SEED", help="draw the same sample as the run with this seed")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed. A worker of xdist takes that of the process which started it, so all draw the same sample."""
    if config.option.matrix_sample is not None and config.option.matrix_seed is None:
        given: dict[str, int] = getattr(config, "workerinput", {})
        config.option.matrix_seed = given.get("matrix_seed", random.SystemRandom().randrange(1_000_000))


@pytest.hookimpl(optionalhook=True)  # there may be no xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["matrix_seed"] = node.config.option.matrix_seed


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed at once, so that it is known even if the run never ends."""
    options, terminal = session.config.option, session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal and options.matrix_sample is not None:  # xdist's workers have no terminal
        again = f"pytest -m matrix --matrix-sample {options.matrix_sample} --matrix-seed {options.matrix_seed}"
        terminal.write_line(f"The sample of the matrix has seed {options.matrix_seed}. To run it again: {again}")


@pytest.hookimpl(trylast=True)  # when -m and -k have had their say
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.matrix_sample is not None:
        matrix = [item for item in items if item.get_closest_marker("matrix")]
        left_out = {item.nodeid for item in matrix} - matrix_sample([item.nodeid for item in matrix], config)
        config.hook.pytest_deselected(items=[item for item in matrix if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def matrix_sample(names: list[str], config: pytest.Config) -> set[str]:
    """Draw the sample, which depends on the seed and on the names, and not on their order."""
    count = min(config.option.matrix_sample, len(names))
    return set(random.Random(config.option.matrix_seed).sample(sorted(names), count))
