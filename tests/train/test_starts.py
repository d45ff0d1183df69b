"""Promises of every start of a round: at the pulled model, ahead of it, or with what is not sent yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from paceline.train import backend, local_steps, overlapped_rounds
from train.generations import served
from train.jobs import job
from train.lessons import OPTIMIZERS, batches_of, model, steps_of, weights
from train.rounds import H, share_samples, train_and_be_given_up, worker_of

F = torch.nn.functional


@dataclass(frozen=True)
class Start:
    codec: str = ""
    options: dict[str, Any] = field(default_factory=dict)


STARTS = {"pulled": Start(), "ahead": Start(options={"ahead": True}), "unsent": Start("float32/4")}


@pytest.fixture(params=STARTS)
def start(request: pytest.FixtureRequest) -> Start:
    return STARTS[request.param]


@pytest.mark.parametrize("codec", ["", "int8", "topk:0.25", "float32/4", "int8/4", "int4/3"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_well_by_turns(codec: str, ahead: bool, overlap: bool) -> None:
    if ahead and "/" in codec:
        pytest.skip("a start ahead needs whole models")
    share_samples("r2sp", codec, ahead=ahead, overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 3, 4, 6, 11])
def test_every_sample_counts_once_if_the_worker_is_given_up(start: Start, at: int, overlap: bool) -> None:
    train_and_be_given_up(at, start.codec, overlap=overlap, **start.options)


def test_weights_that_are_loaded_in_the_middle_are_those_of_the_next_round(start: Start) -> None:
    """Neither a movement from the old weights to them is carried on, nor is anything sent that was not sent before."""
    loaded = model()
    torch.nn.init.constant_(loaded[0].weight, 0.5)
    batches, mine = batches_of(0, 3 * H), model()
    begins: list[Any] = []

    def run(address: str) -> None:
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        with paceline.join(mine, optimizer, connect=address, local_steps=H, **start.options) as session:
            for number, (x, y) in enumerate(batches):
                if number == 2 * H:
                    session.load(loaded.state_dict())
                    begins.append(weights(mine))
                F.cross_entropy(mine(x), y).backward()
                session.step(batch_size=len(x))

    with served("bsp:weights=mean", update_codec=start.codec) as running:
        running.work(run)
    assert torch.equal(begins[0], weights(loaded))
    steps_of(loaded, OPTIMIZERS["sgd"](loaded.parameters()), batches[2 * H :])
    torch.testing.assert_close(weights(mine), weights(loaded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grant_without_a_pull_finds_the_pulled_model(
    start: Start, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a Grant leaves the weights as they are. They must be the pulled ones, and not those of the last start."""
    before: list[Any] = []
    pulled: list[Any] = []
    exchange = backend.exchange

    def noted(client: Any, flat: Any, *arguments: Any, **options: Any) -> None:
        before.append(flat.weights.clone())
        exchange(client, flat, *arguments, **options)
        pulled.append(flat.weights.clone())

    for module in (backend, local_steps, overlapped_rounds):
        monkeypatch.setattr(module, "exchange", noted)
    with job("bsp:weights=mean", update_codec=start.codec) as running:
        running.work(worker_of([batches_of(0, 4 * H)], overlap=overlap, **start.options))
    assert len(pulled) == 4 + bool(start.codec), "four rounds, and what is not sent"
    for found, its in zip(before[1:], pulled, strict=False):
        assert torch.equal(found, its)
