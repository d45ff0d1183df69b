"""Workers that make several steps of their own between two exchanges."""

from __future__ import annotations

import atexit
import copy
import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import paceline
from paceline.model.optimizer_spec import SUMS
from paceline.observe.trace import Applied, Arrived, Granted
from paceline.serve.wire.frames import WireError
from paceline.train.local_steps import LocalRounds, LocalStepsBackend
from train.generations import served
from train.jobs import job
from train.lessons import OPTIMIZERS, alone, batches_of, data, model, steps_of, weights
from train.rounds import share_samples, worker_of

F = torch.nn.functional
ROUNDS = 4


def local_sgd(inner: str, batches: list[list[tuple[Any, Any]]], local_steps: int, outer: Any = None) -> Any:
    """Return the weights after local SGD in plain torch: every worker steps alone, then all average their models."""
    shared = model()
    step = outer(shared.parameters()) if outer else torch.optim.SGD(shared.parameters(), lr=1.0)
    workers = [copy.deepcopy(shared) for _ in batches]
    inners = [OPTIMIZERS[inner](worker.parameters()) for worker in workers]
    for start in range(0, len(batches[0]), local_steps):
        for worker, optimizer, its in zip(workers, inners, batches, strict=True):
            worker.load_state_dict(shared.state_dict())
            steps_of(worker, optimizer, its[start : start + local_steps])
        with torch.no_grad():
            for parameter, *theirs in zip(
                shared.parameters(), *(worker.parameters() for worker in workers), strict=True
            ):
                parameter.grad = sum((parameter - each) * (1 / len(theirs)) for each in theirs)
        step.step()
    return weights(shared)


@pytest.mark.parametrize("inner", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 2])
def test_bsp_is_local_sgd_bit_for_bit(inner: str, shards: int) -> None:
    """With two workers the order of the sum does not matter, so no bit may differ."""
    batches = [batches_of(worker, 3 * ROUNDS) for worker in range(2)]
    with job("bsp:weights=mean", shards, workers=2) as running:
        found = running.work(*(worker_of(batches, inner) for _ in batches))
    expected = local_sgd(inner, batches, 3)
    for each in found:
        assert torch.equal(each, expected)


@pytest.mark.parametrize("text", ["sgd:lr=0.7,momentum=0.9,nesterov=true", "adam:lr=0.01"])
def test_the_server_steps_the_outer_optimizer_by_the_differences(text: str) -> None:
    batches = [batches_of(worker, 3 * ROUNDS) for worker in range(3)]

    def outer(parameters: Any) -> Any:
        if text.startswith("adam"):
            return torch.optim.Adam(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)

    with job("bsp:weights=mean", workers=3) as running:
        found = running.work(*(worker_of(batches, "adam", outer=text) for _ in batches))
    expected = local_sgd("adam", batches, 3, outer)
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)


def test_one_local_step_with_sgd_is_plain_bsp() -> None:
    x, y = data(24)
    parts = (slice(0, 8), slice(8, 16), slice(16, 24))
    batches = [[(x[part], y[part])] * 10 for part in parts]
    with job("bsp:weights=mean", workers=3) as running:
        found = running.work(*(worker_of(batches, "sgd", local_steps=1) for _ in parts))
    for each in found:
        torch.testing.assert_close(each, alone("sgd", x, y, 10), rtol=1e-5, atol=1e-6)


def test_a_policy_that_mixes_models_gets_models() -> None:
    """The only worker's model is the mixture, so this is plain training."""
    batches, same = batches_of(0, 3 * ROUNDS), model()
    with job("safa") as running:
        (found,) = running.work(worker_of([batches], "adam"))
    steps_of(same, OPTIMIZERS["adam"](same.parameters()), batches)
    torch.testing.assert_close(found, weights(same), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp", "r2sp", "r2sp:groups=2", "ksync:k=2", "safa"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_samples_of_all_local_steps_count_once_an_epoch(policy: str, streamed: bool) -> None:
    if streamed and policy in ("bsp", "ksync:k=2", "safa"):
        pytest.skip("cannot be streamed")
    running = share_samples(policy, streamed=streamed)
    arrived = [event for event in running.events if isinstance(event, Arrived)]
    assert {event.batch_size for event in arrived} <= set(range(1, 13))
    assert max(event.batch_size for event in arrived) == 12
    assert all(event.loss is not None for event in arrived)


def test_a_worker_that_is_lost_loses_only_its_steps_since_its_last_exchange() -> None:
    x, y = data(96)
    dataset = torch.utils.data.TensorDataset(x, y)

    def run(address: str, dies_after: int = 10**9) -> None:
        mine = model()
        session = paceline.join(mine, torch.optim.SGD(mine.parameters(), lr=0.05), connect=address, local_steps=4)
        for steps, (inputs, targets) in enumerate(session.batches(dataset, batch_size=4, epochs=4), start=1):
            loss = F.cross_entropy(mine(inputs), targets)
            loss.backward()
            session.step(loss)
            if steps == dies_after:
                atexit.unregister(session.close)
                backend: Any = session._backend
                backend._client._incarnation.end(WireError("killed"))
                return
            time.sleep(0.05)  # the lost worker is given up while the other one still trains
        session.finish()
        session.close()

    with job("asp:weights=mean", workers=2, lease=0.5) as running:
        running.work(lambda address: run(address, dies_after=6), run)
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
    applied = sum(len(event.workers) for event in running.events if isinstance(event, Applied))
    assert applied == 4 * 96 // 4 // 4, "four of the six steps of the lost worker count, and two are made again"


def test_tuned_batches_are_divided_among_the_local_steps() -> None:
    x, y = data(96)
    dataset = torch.utils.data.TensorDataset(x, y)
    sizes: list[int] = []

    def run(address: str) -> None:
        mine = model()
        with paceline.join(mine, OPTIMIZERS["sgd"](mine.parameters()), connect=address, local_steps=2) as session:
            for inputs, targets in session.batches(dataset, batch_size=8, epochs=2):
                sizes.append(len(inputs))
                loss = F.cross_entropy(mine(inputs), targets)
                loss.backward()
                session.step(loss)

    with job("r2sp:tune_batches=true", workers=1) as running:
        running.work(run)
    assert sizes == [8] * 24


@pytest.mark.parametrize("overlap", [False, True])
def test_a_round_has_as_many_samples_as_the_policy_wants(overlap: bool) -> None:
    """The tuner learns nothing from a round with another number of samples."""
    x, y = data(1800)
    dataset = torch.utils.data.TensorDataset(x, y)

    def run(address: str) -> None:
        mine = model()
        inner = OPTIMIZERS["sgd"](mine.parameters())
        with paceline.join(mine, inner, connect=address, local_steps=5, overlap=overlap) as session:
            for inputs, targets in session.batches(dataset, batch_size=8):
                time.sleep(len(inputs) * (0.004 if session.worker else 0.001))  # the second worker is slower
                F.cross_entropy(mine(inputs), targets).backward()
                session.step(batch_size=len(inputs))

    with job("r2sp:tune_batches=true", workers=2) as running:
        running.work(run, run)
    granted: dict[int, list[int | None]] = {0: [], 1: []}
    arrived: dict[int, list[int]] = {0: [], 1: []}
    for event in running.events:
        if isinstance(event, Granted):
            granted[event.worker].append(event.batch_size)
        elif isinstance(event, Arrived):
            arrived[event.worker].append(event.batch_size)
    wanted = [each or 40 for each in granted[0]]
    if overlap:  # a round is begun with the Grant of the round before
        wanted = [40, *wanted]
    whole = len(arrived[0]) - 2  # at the end of the data rounds are shorter
    differing = [(want, got) for want, got in zip(wanted[:whole], arrived[0], strict=False) if want != got]
    assert len(differing) <= 4 * overlap, "a Grant that changes in the middle of a round changes its last steps"


@pytest.mark.parametrize("wanted", [3, 5, 40, 41, 43, 44, 1003])
def test_the_steps_of_a_round_share_its_samples(wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = object.__new__(LocalStepsBackend)
    backend._local, backend._made = LocalRounds(5, SUMS), []
    monkeypatch.setattr(LocalStepsBackend, "_granted_round", lambda _: wanted)
    sizes = []
    for _ in range(5):
        sizes.append(backend.granted_batch)
        backend._made.append(None)
    assert sum(sizes) == max(5, wanted), "a step has one sample at least"
    assert max(sizes) - min(sizes) <= 1


def test_weights_that_are_loaded_before_the_first_step_are_those_of_the_job() -> None:
    loaded = model()
    torch.nn.init.constant_(loaded[0].weight, 0.5)
    batches = batches_of(0, 3)
    mine = model()

    def run(address: str) -> None:
        with paceline.join(mine, OPTIMIZERS["sgd"](mine.parameters()), connect=address, local_steps=3) as session:
            mine.load_state_dict(loaded.state_dict())
            for x, y in batches:
                F.cross_entropy(mine(x), y).backward()
                session.step(batch_size=len(x))

    with served("bsp:weights=mean") as running:
        running.work(run)
    steps_of(loaded, OPTIMIZERS["sgd"](loaded.parameters()), batches)
    torch.testing.assert_close(weights(mine), weights(loaded), rtol=1e-6, atol=1e-7)


def test_an_own_loop_and_several_groups_of_parameters() -> None:
    mine = model()
    groups = [{"params": mine[0].parameters(), "lr": 0.05}, {"params": mine[2].parameters(), "weight_decay": 0.01}]
    same = copy.deepcopy(mine)
    theirs = [{"params": same[0].parameters(), "lr": 0.05}, {"params": same[2].parameters(), "weight_decay": 0.01}]
    batches = batches_of(0, 5)

    def run(address: str) -> Any:
        optimizer = paceline.wrap(mine, torch.optim.AdamW(groups, lr=0.01), connect=address, local_steps=2)
        optimizer.batch_size = 4
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for x, y in batches:
            steps_of(mine, optimizer, [(x, y)])
            schedule.step()
        state = optimizer.state_dict()
        optimizer.finish()
        optimizer.close()
        return state

    with job("bsp:weights=mean") as running:
        (state,) = running.work(run)
    plain = torch.optim.AdamW(theirs, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    for batch in batches:
        steps_of(same, plain, [batch])
        schedule.step()
    torch.testing.assert_close(weights(mine), weights(same), rtol=1e-6, atol=1e-6)
    assert state["state"][0]["step"] == 5, "the state of the worker's own optimizer is its own"
    assert [event.batch_size for event in running.events if isinstance(event, Arrived)] == [8, 8, 4]


def test_without_a_server_the_steps_are_those_of_plain_torch() -> None:
    mine, same, batches = model(), model(), batches_of(0, 4)
    with paceline.join(mine, OPTIMIZERS["adam"](mine.parameters()), local_steps=3) as session:
        steps_of(mine, session.optimizer, batches)
    steps_of(same, OPTIMIZERS["adam"](same.parameters()), batches)
    assert torch.equal(weights(mine), weights(same))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local_steps": 0}, "local_steps must be a whole number of at least 1; got 0."),
        ({"local_steps": 2.5}, "local_steps must be a whole number of at least 1; got 2.5."),
        ({"local_steps": True}, "local_steps must be a whole number of at least 1; got True."),
        ({"outer": "sgd:lr=1"}, "outer= is the server's optimizer for local steps; pass local_steps= with it."),
        ({"local_steps": 2, "outer": "sdg:lr=1"}, "There is no optimizer 'sdg'; there are SGD, "),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    mine = model()
    with pytest.raises(ValueError) as refused:
        paceline.join(mine, OPTIMIZERS["sgd"](mine.parameters()), **options)
    assert str(refused.value).startswith(said)
