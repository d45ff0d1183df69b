"""A Ray cluster of one node. The actors of the tests can import the modules of the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# Ray's processes inherit this environment.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore the warnings of Ray, in the tests of this folder."""
    item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a cluster with the module's CLUSTER_CPUS, or 8."""
    import ray

    cpus = getattr(request.module, "CLUSTER_CPUS", 8)
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
