"""Many clients at one server: all do their rounds, and every pulled model is checked."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

import torch
from benchmarks.crowd import bare_server as bare
from benchmarks.crowd import clients as crowd
from benchmarks.crowd.load import CrowdError, Load


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fl-r2sp:groups=4", "fl-r2sp:groups=4,filter=false"])
def test_a_small_crowd_does_its_rounds(policy: str) -> None:
    load = Load(clients=50, rounds=2, bytes=40_000)
    result = crowd.serve(load, policy)
    assert result.least >= 2 and result.exchanges >= 100
    assert result.versions >= 4, "each of four groups must change the model"
    assert result.cpu_seconds > 0
    coordinator, shard = result.memory
    for process in (coordinator, shard):
        assert process.empty <= process.connected <= process.peak
    assert shard.peak <= shard.connected + crowd.thread_bytes(load) + crowd.bound(load, policy)


def test_bare_sockets_exchange_the_same_bytes() -> None:
    result = bare.exchange(Load(clients=20, rounds=3, bytes=100_000))
    assert (result.exchanges, result.least) == (60, 3)


def test_a_model_that_does_not_match_the_pushes_is_noticed() -> None:
    made = crowd._Crowd(Load(clients=3, rounds=1, bytes=4000), 0, 0, lambda _line: None)
    made._check(torch.zeros(1000), 0, 0)
    made._check(made._change * -0.25, 1, 1)
    made._check(made._change * -0.75, 3, 2)
    with pytest.raises(CrowdError, match="granted version 3 and sent version 2"):
        made._check(made._change * -0.5, 2, 3)
    wrong = made._change * -0.75
    wrong[500] += 0.01
    with pytest.raises(CrowdError, match="does not match the pushes"):
        made._check(wrong, 3, 3)


def test_the_memory_bound_of_fl_r2sp() -> None:
    load = Load(clients=2000, rounds=1, bytes=1_000_000)
    received = (1 << 28) // 1_000_000
    assert crowd.bound(load, "fl-r2sp:groups=125") == 1_000_000 * (1 + 125 * 12 + received + 125)
    assert crowd.bound(load, "fl-r2sp:groups=125,filter=false") == 1_000_000 * (1 + 125 + received + 125)
    bases = 125 + 125 * 4  # of each group, and of the four late clients of each
    assert crowd.bound(load, "fl-r2sp:groups=125,moves=model") == 1_000_000 * (1 + 125 * 12 + received + 125 + bases)
    unfiltered = crowd.bound(load, "fl-r2sp:groups=125,moves=model,filter=false")
    assert unfiltered == crowd.bound(load, "fl-r2sp:groups=125,filter=false")
    with pytest.raises(CrowdError, match="only for fl-r2sp"):
        crowd.bound(load, "asp")


def test_an_invalid_load_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        Load(bytes=10)
