"""Gradients that are pushed while the backward pass computes them: the same training, and errors for other loops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.serve.wire.messages import GradientReady
from paceline.serve.worker.incarnation import Incarnation
from paceline.serve.worker.shard_link import ShardLink
from paceline.serve.worker.streamed_exchange import StreamedExchange
from paceline.train.session import Session, join
from train.jobs import job
from train.lessons import (
    OPTIMIZERS,
    alone,
    check_equals_one_process,
    check_trains,
    data,
    model,
    student,
    weights,
)

POLICIES = ["bsp:pipeline=true", "asp", "r2sp"]
WAIT = 10.0  # seconds to wait for what must happen


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)


# The same training


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_worker_equals_plain_training(policy: str, optimizer: str) -> None:
    x, y = data(24)
    with job(policy, shards=2, streamed=True) as running:
        (result,) = running.work(student(optimizer, x, y, 8, overlap=True))
    torch.testing.assert_close(result, alone(optimizer, x, y, 8), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shards", [1, 3])
def test_pipelined_bsp_by_the_mean_equals_one_process_on_the_joint_batch(shards: int) -> None:
    check_equals_one_process("bsp:weights=mean,pipeline=true", "momentum", shards, overlap=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_four_workers_share_a_dataset(policy: str) -> None:
    check_trains(policy, shards=2, streamed=True, overlap=True)


def test_overlap_has_no_effect_where_updates_are_whole() -> None:
    x, y = data(24)
    with job("r2sp", shards=2) as running:
        (result,) = running.work(student("adam", x, y, 8, overlap=True))
    torch.testing.assert_close(result, alone("adam", x, y, 8), rtol=1e-6, atol=1e-7)


def test_overlap_has_no_effect_alone() -> None:
    x, y = data(24)
    mine = model()
    with join(mine, OPTIMIZERS["adam"](mine.parameters()), overlap=True) as session:
        for _ in range(8):
            for part in (slice(0, 12), slice(12, 24)):  # two backward passes are allowed
                (torch.nn.functional.cross_entropy(mine(x[part]), y[part]) / 2).backward()
            session.step()
    torch.testing.assert_close(weights(mine), alone("adam", x, y, 8))


class Ragged(torch.nn.Module):  # type: ignore[misc]
    """A model with a layer that is not always used, one that is used twice, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.optional = torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 3)

    def forward(self, x: Any, optional: bool) -> Any:
        x = self.norm(torch.tanh(self.first(torch.tanh(self.first(x)))))
        return self.last(self.optional(x) if optional else x)


def ragged_steps(mine: Ragged, step: Callable[[Any], None]) -> None:
    x, y = data(24)
    for count in range(6):
        loss = torch.nn.functional.cross_entropy(mine(x, optional=count % 2 == 0), y)
        loss.backward()
        step(loss)


def test_parameters_without_a_gradient_count_as_zero_and_statistics_are_sent() -> None:
    plain, mine = Ragged(), Ragged()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def step(_: Any) -> None:
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()

    ragged_steps(plain, step)

    def run(address: str) -> None:
        own = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
        with join(mine, own, connect=address, overlap=True) as session:
            ragged_steps(mine, session.step)

    with job("r2sp", shards=2, streamed=True) as running:
        running.work(run)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


# It overlaps


class Gate(torch.autograd.Function):  # type: ignore[misc]
    """The identity. It waits in the backward pass, so that the layers before it have no gradient yet."""

    @staticmethod
    def forward(ctx: Any, x: Any, gate: Callable[[], None]) -> Any:
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *up: Any) -> Any:
        ctx.gate()
        return up[0], None


def test_computed_gradients_are_pushed_applied_and_returned_while_the_rest_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = model()
    first, activation, last = mine
    returned = threading.Event()
    receive = StreamedExchange.receive

    def receiving(self: StreamedExchange, part: ShardLink, channel: Any) -> None:
        raise_if_over = self._raise_if_over

        def received(message: Any) -> None:
            raise_if_over(message)
            returned.set()

        self._raise_if_over = received
        receive(self, part, channel)

    monkeypatch.setattr(StreamedExchange, "receive", receiving)
    before = weights(mine).clone()
    same: list[bool] = []

    def gate() -> None:
        assert returned.wait(WAIT), "no weights returned during the backward pass"
        time.sleep(0.05)  # let more of them arrive
        same.append(torch.equal(weights(mine), before))
        assert first.weight.grad is None

    x, y = data(12)

    def run(address: str) -> None:
        with join(mine, OPTIMIZERS["sgd"](mine.parameters()), connect=address, overlap=True) as session:
            session.optimizer.batch_size = len(x)
            hidden = Gate.apply(activation(first(x)), gate)
            torch.nn.functional.cross_entropy(last(hidden), y).backward()
            session.step()

    with job("r2sp", shards=2, streamed=True) as running:
        running.work(run)
    assert same == [True], "returned weights must not change the model before the step"
    torch.testing.assert_close(weights(mine), alone("sgd", x, y, 1))


# Loops that are refused


@pytest.fixture
def session() -> Iterator[Session]:
    mine = model()
    with job("r2sp", shards=1, streamed=True) as running:
        joined = join(mine, OPTIMIZERS["sgd"](mine.parameters()), connect=running.address, overlap=True)
        joined.optimizer.batch_size = 12
        yield joined
        joined.close()


def backward(session: Session) -> None:
    x, y = data(12)
    torch.nn.functional.cross_entropy(session.model(x), y).backward()


def test_a_second_backward_before_the_step_is_refused(session: Session) -> None:
    backward(session)
    with pytest.raises(ValueError, match="one backward"):
        backward(session)


def test_a_clipped_gradient_is_refused(session: Session) -> None:
    backward(session)
    torch.nn.utils.clip_grad_norm_(session.model.parameters(), 1e-3)
    with pytest.raises(ValueError, match="clipped"):
        session.step()


def test_a_gradient_cannot_be_discarded(session: Session) -> None:
    backward(session)
    with pytest.raises(ValueError, match="cannot be discarded"):
        session.optimizer.zero_grad()


def test_a_batch_size_that_comes_too_late_is_refused(session: Session) -> None:
    backward(session)
    with pytest.raises(ValueError, match="must be known before"):
        session.step(batch_size=5)


def test_a_session_cannot_finish_during_a_push(session: Session) -> None:
    backward(session)
    with pytest.raises(ValueError, match="followed by a step"):
        session.finish()


@pytest.mark.parametrize("end", ["finish", "close"])
def test_after_the_session_the_script_can_use_the_model_freely(session: Session, end: str) -> None:
    backward(session)
    session.step()
    getattr(session, end)()
    for _ in range(2):
        backward(session)  # without a step
    assert all(parameter.grad is not None for parameter in session.model.parameters())
    assert not any(thread.name == "paceline push" for thread in threading.enumerate())


def test_the_gradient_is_announced_before_its_weights_have_returned(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waited for the returned weights first would leave the coordinator waiting for the announcement."""
    announced = threading.Event()
    say, receive = Incarnation._say, StreamedExchange.receive

    def saying(self: Incarnation, note: Any, message: Any) -> None:
        say(self, note, message)
        if isinstance(message, GradientReady):
            announced.set()

    def receiving(self: StreamedExchange, part: ShardLink, channel: Any) -> None:
        assert announced.wait(WAIT), "the worker waits for returned weights first"
        receive(self, part, channel)

    monkeypatch.setattr(Incarnation, "_say", saying)
    monkeypatch.setattr(StreamedExchange, "receive", receiving)
    backward(session)
    session.step()
    torch.testing.assert_close(weights(session.model), alone("sgd", *data(12), 1))


def test_an_error_in_the_backward_pass_ends_the_worker_at_once_and_the_others_continue() -> None:
    x, y = data(24)

    def fails() -> None:
        raise RuntimeError("out of memory")

    def failing(address: str) -> str:
        mine = model()
        first, activation, last = mine
        try:
            with join(mine, OPTIMIZERS["sgd"](mine.parameters()), connect=address, overlap=True) as session:
                session.optimizer.batch_size = len(x)
                last(Gate.apply(activation(first(x)), fails)).sum().backward()
        except RuntimeError as error:
            return str(error)
        return "no error"

    with job("r2sp", shards=2, workers=2, streamed=True) as running:
        began = time.monotonic()
        other = student("sgd", x, y, 8, overlap=True)
        error, _ = running.work(failing, other)
    assert "out of memory" in error
    assert time.monotonic() - began < WAIT
