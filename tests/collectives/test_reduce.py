"""Schedules carried out on gloo: several ranks in threads of one process, and DDP in processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")

import torch

from paceline.collectives import reduce
from paceline.collectives.algorithms import AlgorithmError
from paceline.collectives.hook import hips
from paceline.collectives.reduce import AllReduce, CollectiveError
from paceline.collectives.topology import BCube, DCell, Topology, Torus

DDP = Path(__file__).with_name("ddp.py")


def on_all(
    net: Topology,
    do: Callable[[AllReduce, int], Any],
    of_rank: Callable[[int], dict[str, Any]] = lambda rank: {},
    **options: Any,
) -> list[Any]:
    """Run `do` on every rank, each in a thread. Return what the ranks return or raise."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    results: list[Any] = [None] * net.servers

    def run(rank: int) -> None:
        try:
            reduce = AllReduce(net, rank, store, timeout=30.0, **options, **of_rank(rank))
            results[rank] = do(reduce, rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(net.servers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def summed(elements: int) -> Callable[[AllReduce, int], torch.Tensor]:
    def do(reduce: AllReduce, rank: int) -> torch.Tensor:
        found = reduce(torch.arange(elements) * (rank + 1.0))
        reduce.close()
        return found

    return do


@pytest.mark.parametrize(
    "net", [BCube(2, 2), Torus([2, 2]), Torus([3]), BCube(2, 3), DCell(2, 2)], ids=lambda net: net.name
)
@pytest.mark.parametrize("algorithm", ["hips", "ring", "mesh", "ps"])
def test_every_rank_has_the_sum(net: Topology, algorithm: str) -> None:
    for elements in (0, 1, 1003):
        expected = torch.arange(elements) * (net.servers * (net.servers + 1) / 2)
        for found in on_all(net, summed(elements), algorithm=algorithm, stages=["mesh"]):
            assert torch.equal(found, expected)


def test_no_rank_begins_before_all_have_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that closes early would cut the connections that a slower rank is making."""
    net = BCube(2, 2)
    seen: list[str] = []
    make_group = reduce.gloo

    def note(store: Any, *rest: Any) -> Any:
        if threading.current_thread().name == "slow":  # only the ranks of its own groups wait for it
            time.sleep(0.1)
        group = make_group(store, *rest)
        seen.append("connected")
        return group

    def begin(each: AllReduce, rank: int) -> None:
        seen.append("begins")
        each.close()

    def of_rank(rank: int) -> dict[str, Any]:
        threading.current_thread().name = "slow" if rank == 3 else "quick"
        return {}

    monkeypatch.setattr(reduce, "gloo", note)
    on_all(net, begin, of_rank, algorithm="hips", stages=["ring"])
    assert seen == ["connected"] * (len(seen) - net.servers) + ["begins"] * net.servers


def test_all_ranks_hear_which_rank_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank(rank: int) -> dict[str, Any]:
        threading.current_thread().name = f"rank {rank}"
        return {}

    def no_cable(*_: Any) -> object:
        if threading.current_thread().name == "rank 3":
            raise RuntimeError("there is no cable")
        return object()

    monkeypatch.setattr(reduce, "gloo", no_cable)
    found = on_all(BCube(2, 2), summed(1), of_rank, algorithm="hips", stages=["ring"])
    assert all(isinstance(each, CollectiveError) for each in found)
    assert all("Rank 3 could not connect to its peers: there is no cable." in str(each) for each in found), found


@pytest.mark.parametrize("net", [Torus([3, 3]), Torus([4, 2]), Torus([4, 3])], ids=lambda net: net.name)
def test_rings_over_all_nics(net: Topology) -> None:
    expected = torch.arange(1000) * (net.servers * (net.servers + 1) / 2)
    for found in on_all(net, summed(1000), algorithm="rings"):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "net",
    [BCube(2, 2).with_rates([8e9, 1e9]), BCube(2, 2).with_rates([1e12, 1e6]), Torus([3, 2])],
    ids=lambda net: net.name,
)
def test_processes_with_unequal_shares(net: Topology) -> None:
    for elements in (3, 1003):
        expected = torch.arange(elements) * (net.servers * (net.servers + 1) / 2)
        for found in on_all(net, summed(elements), algorithm="hips"):
            assert torch.equal(found, expected)


def test_ranks_must_have_the_same_rates() -> None:
    """The rates decide the shares, so ranks with other rates would send other elements."""
    net, store = BCube(2, 2), torch.distributed.HashStore()  # type: ignore[attr-defined]
    errors: list[Any] = []

    def run(rank: int) -> None:
        try:
            AllReduce(net.with_rates([8e9, 1e9 + rank]), rank, store, timeout=30.0)
        except CollectiveError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(net.servers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == net.servers and all("all must run the same" in each for each in errors)


def test_many_tensors_are_under_way_together() -> None:
    def do(reduce: AllReduce, rank: int) -> list[float]:
        futures = [reduce.start(torch.full((size,), float(rank)), divide=4.0) for size in range(1, 40)]
        return [float(future.wait().sum()) for future in futures]

    for found in on_all(BCube(2, 2), do, stages=["ring", "mesh"]):
        assert found == [size * 1.5 for size in range(1, 40)]


def test_all_ranks_hear_of_a_nic_that_one_rank_does_not_have() -> None:
    found = on_all(BCube(2, 2), summed(3), of_rank=lambda rank: {"nics": {0: "eth77" if rank == 2 else "lo"}})
    for error in found:
        assert isinstance(error, CollectiveError)
        assert str(error).startswith("Rank 2: There is no NIC 'eth77' here; there are lo")


def test_ranks_that_run_different_collectives_get_an_error() -> None:
    found = on_all(BCube(2, 2), summed(3), of_rank=lambda rank: {"stages": ["mesh" if rank == 1 else "ring"]})
    assert all(isinstance(error, CollectiveError) and "all must run the same" in str(error) for error in found)


def test_a_closed_all_reduce_starts_nothing() -> None:
    def do(reduce: AllReduce, rank: int) -> str:
        reduce(torch.ones(3))
        reduce.close()
        with pytest.raises(CollectiveError) as error:
            reduce(torch.ones(3))
        return str(error.value)

    assert on_all(BCube(2, 1), do) == ["This all-reduce is closed."] * 2


def test_half_precision_does_not_overflow_if_the_mean_does_not() -> None:
    def do(reduce: AllReduce, rank: int) -> torch.Tensor:
        return reduce.start(torch.full((7,), 30000.0, dtype=torch.float16), divide=4.0).wait()

    for found in on_all(BCube(2, 2), do):
        assert torch.equal(found, torch.full((7,), 30000.0, dtype=torch.float16))


def test_a_tensor_that_cannot_be_added_up_is_refused_and_does_no_harm() -> None:
    def do(reduce: AllReduce, rank: int) -> float:
        for tensor in (torch.ones(4, 4).t()[:2], torch.ones(3, requires_grad=True)):
            with pytest.raises(CollectiveError, match="must be contiguous"):
                reduce(tensor)
        return float(reduce(torch.ones(2, 2)).sum())

    assert on_all(BCube(2, 1), do) == [8.0, 8.0]


def test_a_rank_that_fails_releases_its_peers_and_they_release_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also works if the store is unreachable: rank 3 is not a peer of rank 0."""
    monkeypatch.setattr(AllReduce, "_announce_failure", lambda self: None)

    def do(reduce: AllReduce, rank: int) -> float:
        began = time.monotonic()
        if rank == 0:
            reduce._fail("by hand")
        with pytest.raises(CollectiveError):
            reduce(torch.ones(1000))
        return time.monotonic() - began

    assert max(on_all(BCube(2, 2), do)) < 10  # less than their timeout of 30 s


@pytest.mark.parametrize("action", ["recv", "send"])
def test_a_transfer_that_fails_when_it_is_begun_names_the_rank(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that gloo already knows to be closed fails at once, not when the transfer is awaited."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("[pair.cc:1] Connection closed by peer")

    def do(reduce: AllReduce, rank: int) -> float:
        if rank == 0:
            group = SimpleNamespace(recv=Mock(), send=Mock(), size=lambda: 0)
            setattr(group, action, refuse)
            reduce._groups = dict.fromkeys(reduce._groups, group)
        return float(reduce(torch.ones(1000)).sum())

    for found in on_all(BCube(2, 1), do):
        assert re.search(r"could not (receive from|send to) rank \d, which has died or does not answer", str(found))
        assert isinstance(found, CollectiveError)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CollectiveError, match="init_process_group first"):
        hips(BCube(2, 2))
    with pytest.raises(CollectiveError, match="has 4 servers; there is no rank 4"):
        AllReduce(BCube(2, 2), 4, None)
    with pytest.raises(AlgorithmError, match="name 2 stages"):
        AllReduce(BCube(2, 2), 0, None, stages=["ring"] * 3)


def job(*arguments: str) -> list[dict[str, Any]]:
    """Return what the ranks of a DDP job print."""
    done = subprocess.run([sys.executable, str(DDP), *arguments], capture_output=True, text=True, timeout=150)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, pytest.param(9, marks=pytest.mark.matrix)])
def test_gradients_equal_those_of_plain_ddp(ranks: int) -> None:
    found = job(str(ranks))
    assert sorted(each["rank"] for each in found) == list(range(ranks))
    assert all(each["worst"] <= 1e-6 for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, pytest.param(9, marks=pytest.mark.matrix)])
def test_all_ranks_notice_a_rank_that_dies(ranks: int) -> None:
    found = job(str(ranks), "kill")
    assert sorted(each["rank"] for each in found) == list(range(ranks - 1))
    assert all("has died or does not answer; start the job again" in each["error"] for each in found)
    assert max(each["seconds"] for each in found) < 10


@pytest.mark.matrix
@pytest.mark.slow
def test_all_ranks_notice_the_death_of_the_rank_that_hosts_the_store() -> None:
    found = job("4", "behead")
    assert sorted(each["rank"] for each in found) == [1, 2, 3]
    assert all("has died or does not answer" in each["error"] for each in found)
    assert max(each["seconds"] for each in found) < 10


@pytest.mark.slow
def test_all_ranks_notice_a_rank_that_hangs_after_the_timeout() -> None:
    found = job("4", "hang")
    assert sorted(each["rank"] for each in found) == [0, 1, 2]
    assert all("does not answer" in each["error"] for each in found)
    assert max(each["seconds"] for each in found) < 15


@pytest.mark.matrix
@pytest.mark.slow
def test_all_ranks_notice_a_stop_of_the_rank_that_hosts_the_store() -> None:
    found = job("4", "stop")
    assert sorted(each["rank"] for each in found) == [1, 2, 3]
    assert all("does not answer" in each["error"] for each in found)
    assert max(each["seconds"] for each in found) < 15
