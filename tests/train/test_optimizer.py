"""A wrapped optimizer behaves like any optimizer: common code around step() works over a server as in one process."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from paceline.observe.trace import Arrived
from paceline.train.backend import AssignedSamples, LocalBackend
from paceline.train.optimizer import PacedOptimizer
from train.jobs import Job, job

F = torch.nn.functional


@pytest.fixture
def running() -> Iterator[Job]:
    with job("bsp:weights=mean") as up:
        yield up


@pytest.fixture
def wrap(running: Job) -> Iterator[Callable[..., PacedOptimizer]]:
    """Return `paceline.wrap` for this job. All workers leave the job at the end of the test."""
    made: list[PacedOptimizer] = []

    def wrapped(net: Any, inner: Any, connect: str | None = running.address) -> PacedOptimizer:
        made.append(paceline.wrap(net, inner, connect=connect))
        return made[-1]

    yield wrapped
    for optimizer in made:
        optimizer.close()


def model(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    # No bias before the norm: its gradient is zero except for rounding errors, which Adam would amplify.
    layers = torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    return torch.nn.Sequential(*layers).to(dtype)


def data(batches: int, size: int = 12) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(batches)
    ]


def sgd(net: Any) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def groups(net: Any) -> Any:
    """Return an optimizer with two groups, the second without weight decay, as is usual for transformers."""
    decayed = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in net.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.02}], lr=0.01)


Loop = Callable[[Any, Any], None]
Make = Callable[[Any], Any]
Wrap = Callable[..., PacedOptimizer]


def plain(net: Any, optimizer: Any) -> None:
    for x, y in data(6):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def zeroed_after(net: Any, optimizer: Any) -> None:
    for x, y in data(6):
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def accumulated(net: Any, optimizer: Any) -> None:
    for step, (x, y) in enumerate(data(6)):
        (F.cross_entropy(net(x), y) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def clipped(net: Any, optimizer: Any) -> None:
    for x, y in data(6):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()


def with_a_closure(net: Any, optimizer: Any) -> None:
    for x, y in data(6):

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        with torch.no_grad():
            assert float(optimizer.step(closure).detach()) > 0


def autocast_and_scaled(net: Any, optimizer: Any) -> None:
    """The first scale is so large that gradients overflow and steps are skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    for x, y in data(24):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**40


def scheduled(net: Any, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for x, y in data(6):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(scheduler.base_lrs[0] / 8)


LOOPS: list[Loop] = [plain, zeroed_after, accumulated, clipped, with_a_closure, autocast_and_scaled, scheduled]


@pytest.mark.parametrize("make", [sgd, groups])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_one_worker_over_a_server_equals_one_process(wrap: Wrap, loop: Loop, make: Make) -> None:
    """The same loop gives the same weights and statistics."""
    ours, theirs = model(), model()
    loop(theirs, make(theirs))
    optimizer = wrap(ours, make(ours))
    loop(ours, optimizer)
    for name, expected in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], expected, rtol=1e-5, atol=1e-6)
    before = model()
    assert not torch.allclose(ours[0].weight, before[0].weight)
    assert not torch.allclose(ours[1].running_mean, before[1].running_mean)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_alone_it_steps_like_the_wrapped_optimizer(loop: Loop) -> None:
    ours, theirs = model(), model()
    loop(theirs, sgd(theirs))
    loop(ours, paceline.wrap(ours, sgd(ours)))
    for name, expected in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], expected)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_model_of_another_type_trains(wrap: Wrap, dtype: str) -> None:
    net = model(getattr(torch, dtype))
    optimizer = wrap(net, sgd(net))
    losses = []
    x, y = data(1)[0]
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x.to(getattr(torch, dtype))), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_gradients_of_two_bytes_train_nearly_alike(wrap: Wrap, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = model(), model()
    plain(theirs, sgd(theirs))
    monkeypatch.setenv("PACELINE_GRADIENTS", wire)
    plain(ours, wrap(ours, sgd(ours)))
    torch.testing.assert_close(ours[0].weight, theirs[0].weight, rtol=0.02, atol=0.005)
    assert not torch.equal(ours[0].weight, theirs[0].weight)  # otherwise they were not sent in two bytes


def test_a_scheduler_of_the_wrapped_optimizer_works(wrap: Wrap) -> None:
    """It is created before wrapping. Warnings are errors here, so the scheduler must notice the steps."""
    ours, theirs = model(), model()
    inner, reference = sgd(ours), sgd(theirs)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.1) for each in (inner, reference)]
    optimizer = wrap(ours, inner)
    for x, y in data(3):
        for net, stepping in ((ours, optimizer), (theirs, reference)):
            stepping.zero_grad()
            F.cross_entropy(net(x), y).backward()
            stepping.step()
        for scheduler in schedulers:
            scheduler.step()
    torch.testing.assert_close(ours[0].weight, theirs[0].weight)


def test_it_is_an_optimizer_with_the_attributes_of_the_wrapped_one() -> None:
    net = model()
    inner = groups(net)
    optimizer = PacedOptimizer(inner, LocalBackend())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults and "AdamW" in repr(optimizer)
    plain(net, optimizer)
    saved = optimizer.state_dict()
    assert saved["state"] and saved.keys() == inner.state_dict().keys()
    saved["param_groups"][0]["lr"] = 0.75
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.75
    with pytest.raises(AttributeError, match="nonsense"):
        optimizer.nonsense  # noqa: B018


@pytest.mark.parametrize("alone", [True, False])
def test_hooks_of_either_optimizer_run_once(running: Job, wrap: Wrap, alone: bool) -> None:
    net = model()
    inner, calls = sgd(net), list[str]()
    inner.register_step_pre_hook(lambda *_: calls.append("inner before"))
    optimizer = wrap(net, inner, connect=None if alone else running.address)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    F.cross_entropy(net(data(1)[0][0]), data(1)[0][1]).backward()
    optimizer.step()
    assert calls == ["inner before", "before", "after"]


def test_parameter_groups_are_added_before_joining(wrap: Wrap) -> None:
    net = model()
    optimizer = wrap(net, sgd(net))
    with pytest.raises(ValueError, match=r"add parameter groups before you call paceline\.join"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def test_the_batch_size_is_given_or_counted() -> None:
    pushed: list[tuple[int, list[int]]] = []
    losses: list[float | None] = []

    class Listening(LocalBackend):
        alone = False

        def exchange(self, computed: Any) -> bool:
            pushed.append((computed.batch_size, list(computed.taken)))
            losses.append(computed.loss)
            return True

    net = torch.nn.Linear(2, 1)
    optimizer = PacedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), Listening())

    def backward() -> None:
        net(torch.ones(1, 2)).sum().backward()

    def samples(number: int, size: int) -> AssignedSamples:
        return AssignedSamples(number, 1, 0, 0, size, size)

    optimizer.step()  # no batch size is known: every gradient counts as 1
    optimizer.batch_size = 16
    optimizer.step()
    optimizer.step(batch_size=5, loss=torch.tensor(2.5, requires_grad=True))
    for number in (1, 2):  # two backward passes, one step
        optimizer.trains_on(samples(number, 8))
        backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.trains_on(samples(3, 4))  # overflows, and the scaler skips the step
    backward()
    optimizer.trains_on(samples(4, 6))
    optimizer.zero_grad()
    backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.trains_on(samples(5, 4))  # overflows too, in a loop that calls zero_grad at its end
    backward()
    optimizer.zero_grad()
    optimizer.trains_on(samples(6, 7))
    backward()
    optimizer.step()
    assert pushed == [(1, []), (16, []), (5, []), (16, [1, 2]), (6, [3, 4]), (7, [5, 6])]
    assert losses == [None, None, 2.5, None, None, None]


def test_the_server_receives_the_batch_size(running: Job, wrap: Wrap) -> None:
    net = model()
    optimizer = wrap(net, sgd(net))
    optimizer.batch_size = 12
    x, y = data(1)[0]
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step(loss=loss)
    arrived = [event for event in running.events if isinstance(event, Arrived)]
    assert [event.batch_size for event in arrived] == [12]


def test_an_optimizer_that_is_not_torchs_own_is_refused(wrap: Wrap) -> None:
    class Mine(torch.optim.SGD):  # type: ignore[misc, name-defined]
        pass

    net = model()
    with pytest.raises(ValueError, match=r"Mine is not torch\.optim's own"):
        wrap(net, Mine(net.parameters(), lr=0.1))


def test_a_step_after_the_session_is_refused(running: Job) -> None:
    net = model()
    with paceline.join(net, sgd(net), connect=running.address) as session:
        pass
    with pytest.raises(ValueError, match="The session is over"):
        session.step(1.0)


def test_a_loop_that_forgets_the_sessions_optimizer_trains_in_the_job(running: Job) -> None:
    net = model()
    optimizer = sgd(net)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with paceline.join(net, optimizer, connect=running.address) as session:
        after = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for x, y in data(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            before.step()
            after.step()
        assert running.coordinator.state.version == 3
        assert session.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)
    with pytest.raises(ValueError, match="The session is over"):
        optimizer.step()


def test_a_scaler_steps_the_scripts_own_optimizer(running: Job) -> None:
    net = model()
    optimizer = sgd(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    paced = paceline.wrap(net, optimizer, connect=running.address)
    for step, (x, y) in enumerate(data(3)):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y) * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert running.coordinator.state.version == 2, "the step that overflowed is skipped"
    paced.close()


def test_data_that_nobody_divides_is_reported_once_by_the_main_worker() -> None:
    def forgets(address: str) -> None:
        net = model()
        with paceline.join(net, sgd(net), connect=address) as session:
            assert isinstance(session.is_main, bool)  # a script that prints in one process does not divide its data
            steps(net, session.optimizer)

    # Both workers are threads of this process, which has one list of warnings.
    with job("bsp", workers=2) as running, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        running.work(forgets, forgets)
    reported = [str(warning.message) for warning in caught if "trains on all" in str(warning.message)]
    assert len(reported) == 1 and "each worker trains on all the data" in reported[0]


@pytest.mark.parametrize("asks", [lambda session: session.rank, lambda session: session.world_size])
def test_a_script_that_divides_its_data_itself_is_not_warned(asks: Callable[[Any], int]) -> None:
    def divides(address: str) -> None:
        net = model()
        with paceline.join(net, sgd(net), connect=address) as session:
            asks(session)
            steps(net, session.optimizer)

    with job("bsp", workers=2) as running:
        running.work(divides, divides)  # a warning would be an error


def test_a_scheduler_that_changes_momentum_is_reported_once(wrap: Wrap) -> None:
    net = model()
    optimizer = wrap(net, sgd(net))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    with pytest.warns(UserWarning, match="these changes have no effect: momentum") as caught:
        for _ in range(3):
            steps(net, optimizer, 1)
            schedule.step()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def steps(net: Any, optimizer: Any, count: int = 2) -> None:
    for x, y in data(count):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def test_a_loop_of_ones_own_can_follow_tuned_batches() -> None:
    """A Trainer has batches of its own. It reads the batch size that the policy wants after each step."""
    grown = threading.Event()

    def follow(seconds: float) -> Callable[[str], list[int]]:
        def run(where: str) -> list[int]:
            net = model()
            optimizer = paceline.wrap(net, sgd(net), connect=where)
            sizes: list[int] = []
            while not grown.is_set() and len(sizes) < 100:
                sizes.append(optimizer.granted_batch or 8)
                if sizes[-1] > sizes[0]:
                    grown.set()
                x, y = data(1, sizes[-1])[0]
                time.sleep(seconds * sizes[-1] / 8)
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step(batch_size=sizes[-1])
            optimizer.close()
            return sizes

        return run

    with job("bsp:tune_batches=true", workers=2) as running:
        fast, slow = running.work(follow(0.02), follow(0.2))
    assert fast[0] == slow[0] == 8
    assert slow[-1] == 8 < fast[-1] <= 32
