"""Gradients pushed while the backward pass makes them: the same training, and nothing else done to a gradient."""

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
from paceline.serve.worker.streamed_exchange import ShardLink, StreamedExchange
from paceline.train.session import Session, join
from train.jobs import job
from train.lessons import OPTIMIZERS, alone, data, is_one_process, model, student, trains, weights

POLICIES = ["bsp:pipeline=true", "asp", "r2sp"]
WAIT = 10.0  # seconds for what must happen


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)


# The same training


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_worker_is_plain_training(policy: str, optimizer: str) -> None:
    x, y = data(24)
    with job(policy, shards=2, streamed=True) as running:
        (result,) = running.work(student(optimizer, x, y, 8, overlap=True))
    torch.testing.assert_close(result, alone(optimizer, x, y, 8), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shards", [1, 3])
def test_pipelined_bsp_by_the_mean_is_one_process_on_the_joint_batch(shards: int) -> None:
    is_one_process("bsp:weights=mean,pipeline=true", "momentum", shards, overlap=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_four_workers_share_a_dataset(policy: str) -> None:
    trains(policy, shards=2, streamed=True, overlap=True)


def test_where_updates_are_whole_it_makes_no_difference() -> None:
    x, y = data(24)
    with job("r2sp", shards=2) as running:
        (result,) = running.work(student("adam", x, y, 8, overlap=True))
    torch.testing.assert_close(result, alone("adam", x, y, 8), rtol=1e-6, atol=1e-7)


def test_alone_it_makes_no_difference() -> None:
    x, y = data(24)
    mine = model()
    with join(mine, OPTIMIZERS["adam"](mine.parameters()), overlap=True) as session:
        for _ in range(8):
            for part in (slice(0, 12), slice(12, 24)):  # two backward passes, and nobody minds
                (torch.nn.functional.cross_entropy(mine(x[part]), y[part]) / 2).backward()
            session.step()
    torch.testing.assert_close(weights(mine), alone("adam", x, y, 8))


class Ragged(torch.nn.Module):  # type: ignore[misc]
    """With a parameter that is not always used, one that is used twice, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.seldom = torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 3)

    def forward(self, x: Any, seldom: bool) -> Any:
        x = self.norm(torch.tanh(self.first(torch.tanh(self.first(x)))))
        return self.last(self.seldom(x) if seldom else x)


def ragged_steps(mine: Ragged, step: Callable[[Any], None]) -> None:
    x, y = data(24)
    for count in range(6):
        loss = torch.nn.functional.cross_entropy(mine(x, seldom=count % 2 == 0), y)
        loss.backward()
        step(loss)


def test_parameters_without_a_gradient_count_as_zero_and_statistics_travel() -> None:
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
    """The identity; in the backward pass it waits, so that the layers before it have no gradient yet."""

    @staticmethod
    def forward(ctx: Any, x: Any, gate: Callable[[], None]) -> Any:
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *up: Any) -> Any:
        ctx.gate()
        return up[0], None


def test_what_is_there_is_pushed_applied_and_returned_while_the_rest_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = model()
    first, activation, last = mine
    back = threading.Event()
    receive = StreamedExchange.receive

    def seen(self: StreamedExchange, part: ShardLink, channel: Any) -> None:
        raise_if_over = self._raise_if_over

        def heard(message: Any) -> None:
            raise_if_over(message)
            back.set()

        self._raise_if_over = heard
        receive(self, part, channel)

    monkeypatch.setattr(StreamedExchange, "receive", seen)
    before = weights(mine).clone()
    same: list[bool] = []

    def gate() -> None:
        assert back.wait(WAIT), "nothing came back during the backward pass"
        time.sleep(0.05)  # for more of it
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
    assert same == [True], "what came back must not touch the model before the step"
    torch.testing.assert_close(weights(mine), alone("sgd", x, y, 1))


# What cannot be


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


def test_a_gradient_is_not_thrown_away(session: Session) -> None:
    backward(session)
    with pytest.raises(ValueError, match="thrown away"):
        session.optimizer.zero_grad()


def test_a_batch_size_that_is_said_too_late_is_refused(session: Session) -> None:
    backward(session)
    with pytest.raises(ValueError, match="known by then"):
        session.step(batch_size=5)


def test_a_job_does_not_end_in_the_midst_of_a_push(session: Session) -> None:
    backward(session)
    with pytest.raises(ValueError, match="followed by a step"):
        session.finish()


@pytest.mark.parametrize("end", ["finish", "close"])
def test_after_its_end_the_model_is_the_scripts_own(session: Session, end: str) -> None:
    backward(session)
    session.step()
    getattr(session, end)()
    for _ in range(2):
        backward(session)  # of nobody's concern, as often as one likes
    assert all(parameter.grad is not None for parameter in session.model.parameters())
    assert not any(thread.name == "paceline push" for thread in threading.enumerate())


def test_the_gradient_is_said_to_be_there_before_all_of_it_is_back(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for what comes back first leaves the coordinator waiting for nothing."""
    said = threading.Event()
    say, receive = Incarnation._say, StreamedExchange.receive

    def saying(self: Incarnation, note: Any, message: Any) -> None:
        say(self, note, message)
        if isinstance(message, GradientReady):
            said.set()

    def receiving(self: StreamedExchange, part: ShardLink, channel: Any) -> None:
        assert said.wait(WAIT), "it waits for what comes back"
        receive(self, part, channel)

    monkeypatch.setattr(Incarnation, "_say", saying)
    monkeypatch.setattr(StreamedExchange, "receive", receiving)
    backward(session)
    session.step()
    torch.testing.assert_close(weights(session.model), alone("sgd", *data(12), 1))


def test_an_error_in_the_backward_pass_ends_it_at_once_and_the_others_go_on() -> None:
    x, y = data(24)

    def fails() -> None:
        raise RuntimeError("out of memory")

    def clumsy(address: str) -> str:
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
        said, _ = running.work(clumsy, other)
    assert "out of memory" in said
    assert time.monotonic() - began < WAIT
