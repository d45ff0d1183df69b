"""Weights and optimizer state that a script loads after it has joined are not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import paceline
from paceline.serve import replay
from paceline.train.session import join
from train.generations import served
from train.lessons import OPTIMIZERS, data, model, weights

#: These loops know their parts of the data, and one of them loads other settings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The batches of this loop"),
    pytest.mark.filterwarnings("ignore:The server has the settings that the optimizer had"),
]
EXACT = {"rtol": 1e-5, "atol": 1e-6}


def trained(steps: int = 5, optimizer: str = "momentum") -> tuple[Any, Any]:
    """Return the state of a model and of its optimizer after some steps of plain torch."""
    mine, (x, y) = model(), data(32)
    plain = OPTIMIZERS[optimizer](mine.parameters())
    for _ in range(steps):
        torch.nn.functional.cross_entropy(mine(x), y).backward()
        plain.step()
        plain.zero_grad()
    return mine.state_dict(), plain.state_dict()


def continued(state: Any, optimizer_state: Any, steps: int, x: Any, y: Any, optimizer: str = "momentum") -> Any:
    """Return the weights after some more steps of plain torch."""
    mine = model()
    plain = OPTIMIZERS[optimizer](mine.parameters())
    mine.load_state_dict(state)
    if optimizer_state:
        plain.load_state_dict(optimizer_state)
    for _ in range(steps):
        torch.nn.functional.cross_entropy(mine(x), y).backward()
        plain.step()
        plain.zero_grad()
    return weights(mine)


def stepping(
    part: slice,
    steps: int,
    *,
    optimizer: str = "momentum",
    after_join: Callable[[Any, Any], None] = lambda mine, paced: None,
) -> Callable[[str], Any]:
    """Return a worker with a loop of its own, which calls `after_join` and then trains on a part of the data."""
    mine, (x, y) = model(), data(32)

    def run(address: str) -> Any:
        inner = OPTIMIZERS[optimizer](mine.parameters())
        paced = paceline.wrap(mine, inner, connect=address)
        after_join(mine, inner)
        for _ in range(steps):
            torch.nn.functional.cross_entropy(mine(x[part]), y[part]).backward()
            inner.step()
            inner.zero_grad()
        paced.finish()
        result = weights(mine)
        paced.close()
        return result

    return run


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_that_all_workers_load_after_joining_are_trained_on(shards: int) -> None:
    state, _ = trained()
    x, y = data(32)

    def load(mine: Any, _: Any) -> None:
        mine.load_state_dict(state)

    parts = (slice(0, 16), slice(16, 32))
    with served("bsp:weights=mean", shards, workers=2) as running:
        results = running.work(*(stepping(part, 4, after_join=load) for part in parts))
    expected = continued(state, None, 4, x, y)
    for result in results:
        torch.testing.assert_close(result, expected, **EXACT)


def test_weights_that_only_the_main_worker_loads_reach_the_others() -> None:
    state, _ = trained()
    joined = threading.Barrier(2)

    seen: dict[bool, Any] = {}

    def worker(main: bool) -> Callable[[str], Any]:
        mine, (x, y) = model(), data(32)

        def run(address: str) -> None:
            session = join(mine, torch.optim.SGD(mine.parameters(), lr=0.0), connect=address)
            joined.wait()
            if session.is_main:
                mine.load_state_dict(state)
            for inputs, targets in session.batches(torch.utils.data.TensorDataset(x, y), batch_size=8, epochs=1):
                torch.nn.functional.cross_entropy(mine(inputs), targets).backward()
                session.step()
            session.finish()
            seen[main] = weights(mine)
            session.close()

        return run

    with served("asp", workers=2) as running:
        running.work(worker(True), worker(False))
    for result in seen.values():
        torch.testing.assert_close(result, torch.cat([each.flatten() for each in state.values()]))


def test_a_worker_that_comes_later_takes_the_weights_of_the_job_with_a_warning() -> None:
    state, _ = trained()
    x, y = data(32)
    with served("asp") as running:
        first_model = model()
        first = torch.optim.SGD(first_model.parameters(), lr=0.1)
        paced = paceline.wrap(first_model, first, connect=running.address)
        torch.nn.functional.cross_entropy(first_model(x), y).backward()
        first.step()
        late_model = model()
        late = torch.optim.SGD(late_model.parameters(), lr=0.0)
        other = paceline.wrap(late_model, late, connect=running.address)
        late_model.load_state_dict(state)
        torch.nn.functional.cross_entropy(late_model(x), y).backward()
        with pytest.warns(UserWarning, match="continues with its own"):
            late.step()
        torch.testing.assert_close(weights(late_model), weights(first_model))
        torch.nn.functional.cross_entropy(late_model(x), y).backward()
        late.step()
        other.close()
        paced.close()


def test_weights_that_change_after_the_first_step_are_refused() -> None:
    x, y = data(32)
    with served("asp") as running:
        mine = model()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        paced = paceline.wrap(mine, optimizer, connect=running.address)
        for attempt in range(2):
            torch.nn.functional.cross_entropy(mine(x), y).backward()
            if attempt:
                mine.load_state_dict(trained()[0])
                with pytest.raises(ValueError, match=r"session\.load\(state_dict\)"):
                    optimizer.step()
            else:
                optimizer.step()
        paced.close()


def test_weights_that_are_swapped_and_swapped_back_change_nothing() -> None:
    x, y = data(32)
    with served("asp") as running:
        mine = model()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        paced = paceline.wrap(mine, optimizer, connect=running.address)
        for _ in range(2):
            torch.nn.functional.cross_entropy(mine(x), y).backward()
            own = {name: value.clone() for name, value in mine.state_dict().items()}
            mine.load_state_dict(trained()[0])  # an average of the weights is tested, say
            mine.load_state_dict(own)
            optimizer.step()
        assert running.coordinator.state.version == 2
        paced.close()


@pytest.mark.parametrize("policy", ["bsp:weights=mean", "r2sp:weights=mean", "asp"])
def test_load_gives_all_workers_other_weights_in_mid_training_and_keeps_the_momentum(policy: str) -> None:
    state, _ = trained()
    x, y = data(32)
    loaded = threading.Barrier(2)

    def worker(number: int) -> Callable[[str], Any]:
        mine = model()

        def run(address: str) -> Any:
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
            session = join(mine, optimizer, connect=address)
            for step in range(6):
                if step == 3:
                    loaded.wait()
                    session.load(state)
                    loaded.wait()
                    if session.is_main:
                        torch.testing.assert_close(weights(mine), torch.cat([v.flatten() for v in state.values()]))
                        assert optimizer.state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0
                    for group in optimizer.param_groups:
                        group["lr"] = 0.0
                torch.nn.functional.cross_entropy(mine(x), y).backward()
                session.step()
            session.finish()
            result = weights(mine)
            session.close()
            return result

        return run

    with served(policy, workers=2) as running:
        for result in running.work(worker(0), worker(1)):
            torch.testing.assert_close(result, torch.cat([each.flatten() for each in state.values()]))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("when", ["before joining", "after joining"])
def test_a_loaded_optimizer_state_continues_with_its_momentum(optimizer: str, shards: int, when: str) -> None:
    state, optimizer_state = trained(optimizer=optimizer)
    x, y = data(32)

    def load(mine: Any, inner: Any) -> None:
        mine.load_state_dict(state)
        inner.load_state_dict(optimizer_state)

    def worker(part: slice) -> Callable[[str], Any]:
        if when == "after joining":
            return stepping(part, 4, optimizer=optimizer, after_join=load)
        mine = model()

        def run(address: str) -> Any:
            inner = OPTIMIZERS[optimizer](mine.parameters())
            load(mine, inner)
            paced = paceline.wrap(mine, inner, connect=address)
            for _ in range(4):
                torch.nn.functional.cross_entropy(mine(x[part]), y[part]).backward()
                inner.step()
                inner.zero_grad()
            paced.finish()
            result = weights(mine)
            paced.close()
            return result

        return run

    with served("bsp:weights=mean", shards, workers=2) as running:
        results = running.work(worker(slice(0, 16)), worker(slice(16, 32)))
    expected = continued(state, optimizer_state, 4, x, y, optimizer)
    for result in results:
        torch.testing.assert_close(result, expected, **EXACT)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("streamed", [False, True])
def test_state_dict_brings_the_servers_state_in_the_form_of_torch(optimizer: str, streamed: bool) -> None:
    _, expected = trained(optimizer=optimizer)
    mine, (x, y) = model(), data(32)
    with served("asp", 2, streamed=streamed) as running:
        inner = OPTIMIZERS[optimizer](mine.parameters())
        paced = paceline.wrap(mine, inner, connect=running.address)
        for _ in range(5):
            torch.nn.functional.cross_entropy(mine(x), y).backward()
            inner.step()
            inner.zero_grad()
        during = inner.state_dict()
        paced.finish()
        paced.close()
        after = paced.state_dict()
    for found in (during, after):
        assert found["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
        assert found["state"].keys() == expected["state"].keys()
        for number, values in expected["state"].items():
            assert found["state"][number].keys() == values.keys()
            for key, value in values.items():
                torch.testing.assert_close(found["state"][number][key], value, **EXACT)


def test_state_that_is_loaded_later_replaces_that_of_the_server() -> None:
    _, optimizer_state = trained()
    mine, (x, y) = model(), data(32)
    with served("asp") as running:
        inner = OPTIMIZERS["momentum"](mine.parameters())
        paced = paceline.wrap(mine, inner, connect=running.address)
        for _ in range(2):
            torch.nn.functional.cross_entropy(mine(x), y).backward()
            inner.step()
            inner.zero_grad()
        before = {name: value.clone() for name, value in mine.state_dict().items()}
        inner.load_state_dict(optimizer_state)
        torch.nn.functional.cross_entropy(mine(x), y).backward()
        inner.step()
        torch.testing.assert_close(weights(mine), continued(before, optimizer_state, 1, x, y), **EXACT)
        paced.close()


def test_state_with_other_settings_is_refused() -> None:
    mine = model()
    with served("asp") as running:
        inner = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.5)
        paced = paceline.wrap(mine, inner, connect=running.address)
        with pytest.raises(ValueError, match=r"momentum=0\.9.*momentum=0\.5"):
            inner.load_state_dict(trained()[1])
        paced.step()
        paced.close()


def test_a_recorded_job_that_began_again_replays_bit_for_bit(tmp_path: Path) -> None:
    state, optimizer_state = trained()

    def load(mine: Any, inner: Any) -> None:
        mine.load_state_dict(state)
        inner.load_state_dict(optimizer_state)

    with served("asp", record=tmp_path) as running:
        running.work(stepping(slice(0, 32), 3, after_join=load))
    parts = [part for part in replay.weights(tmp_path) if part.updates]
    assert [part.updates for part in parts] == [3]
    assert all(part.same and part.whole for part in parts)


def test_a_gradient_that_is_pushed_early_waits_for_loaded_weights() -> None:
    state, optimizer_state = trained()
    mine, (x, y) = model(), data(32)
    with served("asp", streamed=True) as running:
        inner = OPTIMIZERS["momentum"](mine.parameters())
        paced = paceline.wrap(mine, inner, connect=running.address, overlap=True)
        mine.load_state_dict(state)
        inner.load_state_dict(optimizer_state)
        for _ in range(3):
            torch.nn.functional.cross_entropy(mine(x), y).backward()
            inner.step()
            inner.zero_grad()
        paced.finish()
        torch.testing.assert_close(weights(mine), continued(state, optimizer_state, 3, x, y), **EXACT)
        paced.close()


@pytest.mark.parametrize("change", ["copy", "data", "moved"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_are_noticed_however_they_are_set(change: str, dtype: str) -> None:
    mine = torch.nn.Linear(3, 2).to(getattr(torch, dtype))
    with served("asp") as running:
        inner = torch.optim.SGD(mine.parameters(), lr=0.0)
        paced = paceline.wrap(mine, inner, connect=running.address)
        with torch.no_grad():
            if change == "copy":
                mine.bias.copy_(torch.tensor([5.0, 6.0]))
            elif change == "data":
                mine.bias.data.fill_(5.0)
            else:
                mine.bias.data = torch.tensor([5.0, 6.0], dtype=mine.bias.dtype)
        mine(torch.ones(1, 3, dtype=mine.bias.dtype)).sum().backward()
        inner.step()
        paced.finish()
        assert mine.bias[0].item() == 5.0
        paced.close()
