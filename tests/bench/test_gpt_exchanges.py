"""The exchanges of `benchmarks/gpt.py`: its schedules, its rules, its codecs, and the bytes that it counts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from benchmarks.local_steps.arms import arm_of
from benchmarks.local_steps.codecs import EXACT, decoded
from benchmarks.local_steps.data import Data, python_sources
from benchmarks.local_steps.model import elements
from benchmarks.local_steps.rules import RULES, Rule, Server, average
from benchmarks.local_steps.schedules import NOBODY, Exchange
from benchmarks.local_steps.size import SIZES, WORKERS
from benchmarks.local_steps.tables import byte_ratio
from benchmarks.local_steps.training import Training, machine

from paceline.model.codecs import Encoder, decode
from paceline.model.differences import FollowedModel

TINY = SIZES["tiny"]
FIRST = slice(0, 1)  # worker
WHOLE = slice(0, elements(TINY))
ARMS = (
    "sync",
    "groups:2",
    "groups:4+final:1",
    "turns",
    "turns+blend:0.5",
    "turns+pulls:4",
    "turns+first:1+final:2",
    "streaming:4",
    "parts:8",
    "parts:3",
    "turns:4",
    "turns:3",
    "turns+rounds:6",
    "streaming:4+rounds:2",
)


@pytest.fixture(scope="module")
def data() -> Data:
    return python_sources(Path(__file__).parents[2] / "src")


def training(arm: str, data: Data, updates: str = EXACT) -> Training:
    return Training(data, arm_of(arm, TINY), 1.0, updates, 0, machine("cpu", compiled=False))


@pytest.mark.parametrize("arm", ARMS)
def test_every_worker_makes_all_steps_and_pushes_the_whole_model_in_every_round(arm: str) -> None:
    found = arm_of(arm, TINY)
    plan, rounds = found.plan, found.size.rounds
    total = rounds * TINY.local_steps
    for worker in range(WORKERS):
        own = plan.steps[:, worker]
        assert own[own >= 0].tolist() == list(range(total))
        parts: dict[tuple[int, int], list[int]] = {}
        for at in sorted(plan.exchanges):
            for each in plan.exchanges[at]:
                if worker in range(WORKERS)[each.pushing]:
                    parts.setdefault((each.part.start, each.part.stop), []).append(int((own[:at] >= 0).sum()))
        assert sum(stop - start for start, stop in parts) == elements(TINY)
        for steps in parts.values():
            assert steps[-1] == total, "the server gets all steps"
            assert np.diff([0, *steps]).max() <= TINY.local_steps + 1
            assert rounds <= len(steps) <= rounds + 1


def test_turns_are_evenly_staggered() -> None:
    size = replace(TINY, local_steps=50)
    exchanges = arm_of("turns", size).plan.exchanges
    assert [each.pushing.start for at in sorted(exchanges) for each in exchanges[at]] == 4 * list(range(8))
    assert set(np.diff(sorted(exchanges))) == {6, 7}


def test_a_part_is_exchanged_by_all_workers_before_the_next_one() -> None:
    size = replace(TINY, local_steps=64)
    exchanges = arm_of("turns:4", size).plan.exchanges
    begun = [(each.pushing.start, each.part.start) for at in sorted(exchanges)[:24] for each in exchanges[at]]
    assert [worker for worker, _ in begun] == 3 * list(range(8))
    starts = [start for _, start in begun]
    assert all(len(set(starts[part : part + 8])) == 1 for part in (0, 8, 16))
    assert len(set(starts)) == 3
    assert set(np.diff(sorted(exchanges))) == {2}


def test_an_arm_can_have_other_rounds(data: Data) -> None:
    found = training("turns+rounds:6", data).run()
    assert found["steps"] == 6 * TINY.local_steps * WORKERS
    assert training("turns", data).run()["steps"] == TINY.rounds * TINY.local_steps * WORKERS


def test_workers_exchange_different_parts_at_once() -> None:
    exchanges = arm_of("parts:8", TINY).plan.exchanges
    assert len({each.part.start for each in exchanges[1]}) == WORKERS
    assert len({each.part.start for each in arm_of("streaming:8", TINY).plan.exchanges[1]}) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("bsp", "turns+more", "groups:3", "groups:0", "groups:x", "turns+final:4", "turns+pulls:9", "turns+pulls:0"),
        *("streaming:4+final:1", "parts:4+keep:0.5", "parts:0", "parts:9", "parts:4+delayed", "turns+rounds:0"),
    ],
)
def test_an_unknown_arm_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        arm_of(name, TINY)


def test_the_way_back_waits_before_synchronous_rounds(data: Data) -> None:
    ours = training("turns+final:1", data)
    ours.run()
    assert torch.equal(ours.held, ours.server.weights.expand(8, -1))
    assert torch.allclose(ours.server.weights, ours.ends.mean(0), atol=1e-6), "all began the last round with one model"


def test_a_whole_blend_is_the_mean_of_the_newest_end_points(data: Data) -> None:
    ours = training("turns+blend:1", data)
    ours.run()
    assert torch.allclose(ours.server.weights, ours.ends.mean(0), atol=1e-6)
    assert not torch.allclose(ours.server.weights, ours.held.mean(0), atol=1e-4)


def test_a_worker_begins_ahead_and_near_its_end_point(data: Data) -> None:
    ours = training("turns+predict:0.5+keep:0.25", data)
    first = ours.server.weights.clone()
    ours.models[0] += 2.0
    ours.server.weights += 3.0
    ours.exchange(Exchange(FIRST, FIRST, WHOLE))
    moved = 3.0 + 2.0 / WORKERS
    ahead = 1.5 * moved
    assert torch.allclose(ours.models[0], first + ahead + 0.25 * (2.0 - ahead), atol=1e-5)
    assert torch.equal(ours.begins[0], ours.models[0])
    assert torch.equal(ours.copies[0], ours.models[0])
    assert torch.allclose(ours.held[0], ours.server.weights)
    assert torch.equal(ours.models[1], first)


def test_a_pull_between_pushes_adds_the_movement(data: Data) -> None:
    ours = training("turns+pulls:2", data)
    first = ours.server.weights.clone()
    ours.models[0] += 2.0
    ours.server.weights += 3.0
    ours.exchange(Exchange(NOBODY, FIRST, WHOLE))
    assert torch.allclose(ours.models[0], first + 5.0, atol=1e-5)
    assert torch.allclose(ours.begins[0], first + 3.0, atol=1e-5)
    assert torch.equal(ours.copies[0], ours.models[0])
    assert torch.equal(ours.server.weights, first + 3.0)
    ours.exchange(Exchange(FIRST, FIRST, WHOLE))
    assert torch.allclose(ours.server.weights, first + 3.0 + 2.0 / WORKERS, atol=1e-5), "a push without the movement"
    assert torch.equal(ours.models[0], ours.server.weights)


def test_the_rules_of_the_server() -> None:
    """One number, with differences of 1, 2, … that arrive one by one."""
    part, differences = slice(0, 1), [float(each) for each in range(1, 2 * WORKERS + 1)]

    def after(rule: Rule) -> float:
        server = Server(torch.zeros(1), rate=0.5)
        for each in differences:
            rule(server, part, torch.tensor([[each]]))
        return server.weights.item()

    assert after(average) == pytest.approx(0.5 * sum(differences) / 8)
    momentum = weights = 0.0
    for each in differences:
        momentum = 0.9 * momentum + each
        weights += 0.5 * (each + 0.9 * momentum)
    assert after(RULES["naive"]) == pytest.approx(weights)
    first, second = sum(differences[:8]) / 8, sum(differences[8:]) / 8
    by_momentum = 0.9 * first + 0.9 * (0.9 * first + second)
    assert after(RULES["delayed"]) == pytest.approx(0.5 * (first + second + by_momentum))


def test_nesterov_of_all_workers_is_that_of_torch() -> None:
    server, theirs = Server(torch.zeros(3), rate=0.7), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        differences = torch.randn(8, 3)
        RULES["nesterov"](server, slice(0, 3), differences)
        theirs.grad = -differences.mean(0)
        optimizer.step()
    assert torch.allclose(server.weights, theirs, atol=1e-6)


@pytest.mark.parametrize("count", [5, 64, 8192, 100_001])
@pytest.mark.parametrize("name", ["int8", "int4", "topk:0.02"])
def test_numbers_are_decoded_as_by_the_codec(name: str, count: int) -> None:
    values = np.random.default_rng(0).standard_normal((2, count), np.float32)
    values[0, : count // 2] *= 1e-3
    values[1, :64] = 0
    expected = np.empty_like(values)
    for row, into in zip(values, expected, strict=True):
        decode(Encoder(name, count).encode(row.copy().data, "float32", 0, count), name, into)
    found = decoded(torch.from_numpy(values), name).numpy()
    if name.startswith("int"):
        assert np.array_equal(found, expected)
    else:
        assert np.array_equal(found != 0, expected != 0)
        assert np.allclose(found, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_both_ways_are_those_of_a_real_job(name: str, data: Data) -> None:
    ours, size = training("turns", data, updates=name), elements(TINY)
    encoder, followed = Encoder(name, size), FollowedModel(name, size)
    server = ours.server.weights.numpy().copy()
    followed.set(server)
    for at in range(2 * TINY.local_steps):
        ours.step(at)
        if (at + 1) % TINY.local_steps == 0:
            pushed = np.empty(size, np.float32)
            difference = ours.models[0].numpy() - followed.values
            decode(encoder.encode(difference.data, "float32", 0, size), name, pushed)
            server += np.float32(1 / 8) * pushed
            followed.encode(followed.subtract_from(server))
            ours.exchange(Exchange(FIRST, FIRST, WHOLE))
    assert ours.left is not None
    assert np.array_equal(ours.server.weights.numpy(), server)
    assert np.array_equal(ours.left[0].numpy(), encoder.left)
    assert np.array_equal(ours.held[0].numpy(), followed.values)


def test_the_bytes_of_both_ways_are_counted(data: Data) -> None:
    found = training("groups:2", data, updates="int4").run()
    size = elements(TINY)
    one = 2 * math.ceil(size / 64) + math.ceil(size / 2)
    assert found["pushed"] == 4 * 8 * one
    assert found["pulled"] == 4 * 8 * one + 8 * 4 * size, "the first model is exact"
    every_step = 2 * 8 * 32 * 4 * size
    assert byte_ratio(found) == pytest.approx(every_step / (found["pushed"] + found["pulled"]))


def test_pulls_between_pushes_are_counted(data: Data) -> None:
    found, model = training("turns+pulls:2", data).run(), 4 * elements(TINY)
    assert found["pushed"] == 4 * 8 * model
    assert found["pulled"] == (2 * 4 * 8 + 8) * model
    assert found["steps"] == 8 * 32


def test_a_diverged_run_has_no_loss(data: Data) -> None:
    ours = training("turns+naive", data)
    ours.server.rate = 1e3
    assert ours.run()["loss"] is None
