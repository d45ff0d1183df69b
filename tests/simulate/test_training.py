"""Real gradients under the virtual clock: the outcome follows from the order of updates that the policy makes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from paceline.job.identity import Identity, identity_of
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.observe.driver import Fault
from paceline.policies import Apply, Grant, Keep, Update, make
from paceline.policies.contract import Decisions
from paceline.policies.r2sp import R2SP
from paceline.simulate import load_cluster
from paceline.simulate.cluster import Cluster
from paceline.simulate.cluster_spec import ClusterSpec, Jitter, WorkerSpec
from paceline.simulate.gradients import flat, load
from paceline.simulate.task import Goal, Task, TrainingError, TrainingOutcome, device_named
from paceline.simulate.training import Shares, Training, train
from paceline.simulate.update_schedule import update_schedule
from paceline.workloads import data as sets
from paceline.workloads import networks
from reproduce.conftest import one_thread  # noqa: F401

WORKERS = 4
BATCH = 16
DIGITS = sets.load("digits")


def cluster(
    workers: int = WORKERS, jitter: float = 0.1, link: float = 1e8, faults: tuple[Fault, ...] = ()
) -> ClusterSpec:
    """Return a cluster whose workers compute for 1 s and send the model in 0.1 s."""
    of = WorkerSpec(link, BATCH, float(BATCH), jitter=Jitter("lognormal", jitter) if jitter else Jitter())
    return ClusterSpec("small", 1e7, 1, link, 1e-4, 1e10, 3.0, (of,) * workers, faults=faults)


def sgd(rate: float = 0.05, **settings: Any) -> OptimizerSpec:
    return OptimizerSpec("SGD", ({"lr": rate, **settings},))


def task(network: str = "mlp", optimizer: OptimizerSpec | None = None, **options: Any) -> Task:
    return Task(network, DIGITS, optimizer or sgd(), **options)


class EventRecord:
    """A model that records which worker computed from which version, and what was applied."""

    over, momentum = False, 0.0

    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []

    def grant(self, worker: int, staleness: int | None) -> None:
        self.lines.append(("grant", (worker, staleness)))

    def pull(self, worker: int, staleness: int | None) -> None:
        self.lines.append(("pull", (worker, staleness)))

    def loss(self, worker: int) -> None: ...

    def compute(self, worker: int, batch: int) -> None:
        self.lines.append(("compute", (worker, batch)))

    def arrive(self, update: Identity) -> None:
        self.lines.append(("arrive", update))

    def drop(self, worker: int) -> None: ...
    def keep(self, keep: Keep) -> None:
        self.lines.append(("keep", keep))

    def discard(self, update: Update) -> None: ...

    def apply(self, apply: Apply, time: float) -> list[float]:
        self.lines.append(("apply", apply))
        return []


def by_hand(
    spec: ClusterSpec, policy: str, of: Task, rounds: int, streamed: bool = False
) -> tuple[torch.Tensor, list[float]]:
    """Repeat a run from its record: keep every version, and compute every gradient by itself."""
    record = EventRecord()
    Cluster(spec, make(policy), rounds, of.seed, streamed, model=record).run()
    torch.manual_seed(of.seed)
    network = networks.make(of.network, of.data).train()
    torch.func.replace_all_batch_norm_modules_(network)
    (settings,) = of.optimizer.settings_of_groups
    optimizer = getattr(torch.optim, of.optimizer.name)(network.parameters(), **settings)
    shares = Shares.dealt(len(of.data.labels), len(spec.workers), of.seed)
    has: dict[int, torch.Tensor] = {}
    made: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}  # worker → weights, gradient, loss
    pushed: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, float]] = {}
    losses: list[float] = []
    for kind, what in record.lines:
        if kind == "pull":
            has[what[0]] = flat(network)
        elif kind == "compute":
            worker, batch = what
            newest = flat(network)
            load(network, has[worker])
            samples = shares.take(worker, batch)
            network.zero_grad()
            loss = networks.loss(network(of.data.prepared(of.data.inputs[samples])), of.data.labels[samples])
            torch.autograd.backward(loss)
            gradient = torch.cat([each.grad.reshape(-1) for each in network.parameters() if each.grad is not None])
            made[worker] = (has[worker], gradient, loss.item())
            load(network, newest)
        elif kind == "arrive":
            pushed[what.worker, what.iteration] = made[what.worker]
        elif kind == "apply":
            mine = [pushed[update.worker, update.iteration] for update in what.updates]
            losses += [loss for _, _, loss in mine]
            if what.mix is not None:
                models = [weights - of.rate(0) * gradient for weights, gradient, _ in mine]
                mixed = sum(weight * model for weight, model in zip(what.weights, models, strict=True))
                load(network, (1 - what.mix) * flat(network) + what.mix * mixed)
                continue
            total = sum(weight * gradient for weight, (_, gradient, _) in zip(what.weights, mine, strict=True))
            at = 0
            for parameter in network.parameters():
                parameter.grad = total[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
            optimizer.step()
    return flat(network), losses


def trained(
    spec: ClusterSpec, policy: str, of: Task, rounds: int, streamed: bool = False
) -> tuple[torch.Tensor, TrainingOutcome]:
    made = make(policy)
    training = Training(of, len(spec.workers), made.mixes)
    Cluster(spec, made, rounds, of.seed, streamed, model=training).run()
    return training.slice.weights, training.outcome


ALL = [
    "bsp",
    "bsp:backup=1",
    "bsp:pipeline=true",
    "bsp:weights=mean",
    "asp",
    "ssp:staleness=1",
    "dssp:low=1,high=3",
    "ksync:k=2",
    "kbatch:k=2",
    "r2sp",
    "r2sp:groups=2",
    "r2sp:weights=mean",
    "safa",
]


@pytest.mark.parametrize("policy", ALL)
def test_the_order_of_updates_decides_what_is_learned(policy: str) -> None:
    weights, outcome = trained(cluster(), policy, task(), rounds=8)
    expected, losses = by_hand(cluster(), policy, task(), rounds=8)
    assert torch.allclose(weights, expected, atol=1e-5), (weights - expected).abs().max()
    means = [sum(losses[at : at + WORKERS]) / WORKERS for at in range(0, len(losses) - WORKERS + 1, WORKERS)]
    assert [point.loss for point in outcome.curve] == pytest.approx(means, abs=1e-4)
    assert outcome.updates == len(losses) >= 4 * WORKERS  # some policies discard updates


@pytest.mark.parametrize("policy", ["bsp", "bsp:pipeline=true", "ssp:staleness=1", "r2sp", "safa"])
def test_a_worker_that_rejoins_pushes_an_update_with_the_same_number_as_before(policy: str) -> None:
    """The barrier holds the first update of worker 0. The next incarnation pushes a first update too. Both count."""
    quick = WorkerSpec(1e8, BATCH, float(BATCH))
    workers = (quick, replace(quick, samples_per_second=BATCH / 10))
    faults = (Fault(2.0, 0, "kill"), Fault(3.0, 0, "rejoin"))
    spec = replace(cluster(2, jitter=0.0, faults=faults), workers=workers)
    weights, outcome = trained(spec, policy, task(), rounds=3)
    assert outcome.updates >= 3
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("policy", ["bsp", "asp", "r2sp", "r2sp:groups=2"])
@pytest.mark.parametrize("fault", [Fault(2.5, 1, "kill"), Fault(2.5, 2, "cut", 4.0), Fault(2.0, 0, "pause", 1.0)])
def test_faults_change_the_order_and_nothing_else(policy: str, fault: Fault) -> None:
    spec = cluster(faults=(fault, Fault(9.0, 1, "rejoin")) if fault.kind == "kill" else (fault,))
    of = task(seed=1)  # with seed 0, one input of a ReLU is so near to 0 that rounding decides on some processors
    weights, _ = trained(spec, policy, of, rounds=8)
    expected, _ = by_hand(spec, policy, of, rounds=8)
    assert torch.allclose(weights, expected, atol=1e-5)


@pytest.mark.parametrize("network", ["cnn", "lstm", "resnet20"])
def test_the_order_of_updates_decides_for_other_networks_too(network: str) -> None:
    of = task(network, sgd(0.02, momentum=0.9))
    weights, _ = trained(cluster(2), "r2sp", of, rounds=3)
    expected, _ = by_hand(cluster(2), "r2sp", of, rounds=3)
    assert torch.allclose(weights, expected, atol=1e-4)


@pytest.mark.parametrize("policy", ["asp", "r2sp", "r2sp:weights=mean"])
def test_streamed_workers_continue_from_their_own_versions(policy: str) -> None:
    weights, outcome = trained(cluster(), policy, task(), rounds=8, streamed=True)
    expected, _ = by_hand(cluster(), policy, task(), rounds=8, streamed=True)
    assert torch.allclose(weights, expected, atol=1e-5)
    assert outcome.updates >= 7 * WORKERS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("network", ["mlp", "resnet20"])
@pytest.mark.parametrize("policy", ["bsp", "r2sp", "r2sp:tune_batches=true"])
def test_gradients_side_by_side_on_a_gpu_are_the_same(policy: str, network: str) -> None:
    """The tolerances allow for TF32. Steps are small, so rounding errors do not grow."""
    of = task(network, sgd(0.005), device="cuda")
    together, _ = trained(cluster(), policy, of, rounds=4)
    apart, _ = trained(cluster(), policy, replace(of, together=False), rounds=4)
    on_cpu, _ = trained(cluster(), policy, replace(of, device="cpu"), rounds=4)
    assert torch.allclose(together, apart, atol=1e-4)
    assert torch.allclose(together.cpu(), on_cpu, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_bfloat16_rounds_gradients_and_nothing_else(network: str) -> None:
    exact, _ = trained(cluster(), "r2sp", task(network, device="cuda"), rounds=6)
    of = task(network, device="cuda", precision="bfloat16")
    rounded, _ = trained(cluster(), "r2sp", of, rounds=6)
    apart, _ = trained(cluster(), "r2sp", replace(of, together=False), rounds=6)
    assert rounded.dtype == torch.float32
    assert torch.allclose(rounded, apart, atol=1e-2)
    assert 1e-5 < (rounded - exact).norm() / exact.norm() < 2e-2


def test_bsp_is_plain_large_batch_sgd() -> None:
    """Plain torch, except for the samples: 4 × 16 samples in each step, four times the learning rate."""
    weights, outcome = trained(cluster(), "bsp", task(), rounds=10)
    torch.manual_seed(0)
    network = networks.make("mlp", DIGITS)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05 * WORKERS)
    shares = Shares.dealt(len(DIGITS.labels), WORKERS, 0)
    for point in outcome.curve:
        samples = torch.cat([shares.take(worker, BATCH) for worker in range(WORKERS)])
        optimizer.zero_grad()
        loss = networks.loss(network(DIGITS.prepared(DIGITS.inputs[samples])), DIGITS.labels[samples])
        torch.autograd.backward(loss)
        optimizer.step()
        assert point.loss == pytest.approx(loss.item(), abs=1e-5)
    assert torch.allclose(weights, flat(network), atol=1e-5)
    assert outcome.staleness == 0


@pytest.mark.parametrize("policy", ["asp", "bsp", "r2sp", "ssp:staleness=3"])
def test_one_worker_is_plain_sgd(policy: str) -> None:
    weights, _ = trained(cluster(1), policy, task(optimizer=sgd(momentum=0.9, nesterov=True)), rounds=20)
    torch.manual_seed(0)
    network = networks.make("mlp", DIGITS)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    shares = Shares.dealt(len(DIGITS.labels), 1, 0)
    for _ in range(20):
        samples = shares.take(0, BATCH)
        optimizer.zero_grad()
        loss = networks.loss(network(DIGITS.prepared(DIGITS.inputs[samples])), DIGITS.labels[samples])
        torch.autograd.backward(loss)
        optimizer.step()
    assert torch.allclose(weights, flat(network), atol=1e-4)


@pytest.mark.parametrize("policy", ["bsp", "asp", "r2sp", "r2sp:tune_batches=true"])
@pytest.mark.parametrize("network", ["mlp", "lstm"])
def test_gradients_computed_together_or_one_by_one_are_the_same(policy: str, network: str) -> None:
    spec = cluster()
    unequal = replace(spec, workers=(*spec.workers[:3], replace(spec.workers[3], samples_per_second=2.5 * BATCH)))
    together, _ = trained(unequal, policy, task(network), rounds=6)
    apart, _ = trained(unequal, policy, task(network, together=False), rounds=6)
    assert torch.allclose(together, apart, atol=1e-5)


def test_gradients_that_are_due_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.simulate.gradients import Gradients

    sizes: list[int] = []
    compute = Gradients.compute

    def watched(self: Gradients, jobs: Any) -> None:
        sizes.append(len(jobs))
        compute(self, jobs)

    monkeypatch.setattr(Gradients, "compute", watched)
    trained(cluster(jitter=0.0), "r2sp", task(), rounds=20)
    assert sum(sizes) / len(sizes) > 0.9 * WORKERS  # each from its own weights


def test_a_seed_determines_a_run() -> None:
    first, outcome = trained(cluster(), "asp", task(seed=3), rounds=5)
    again, same = trained(cluster(), "asp", task(seed=3), rounds=5)
    other, _ = trained(cluster(), "asp", task(seed=4), rounds=5)
    assert torch.equal(first, again)
    assert outcome.curve == same.curve
    assert not torch.allclose(first, other, atol=1e-3)


def test_staleness_is_as_calculated() -> None:
    for policy, expected in (("bsp", 0), ("r2sp", 3), ("r2sp:groups=2", 1)):
        of = update_schedule(cluster(jitter=0.0), make(policy), 40)
        assert sum(of.staleness[16:]) / len(of.staleness[16:]) == expected
        _, outcome = trained(cluster(jitter=0.0), policy, task(), rounds=12)
        assert outcome.staleness == pytest.approx(expected, abs=0.5)  # the mean includes the start of the ring


class Versions(EventRecord):
    """Records which version each worker pulled, the predicted staleness, and the true one."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.pulled: dict[int, tuple[int, int | None]] = {}
        self.computing: dict[int, tuple[int, int | None]] = {}
        self.arrived: dict[Identity, tuple[int, int | None]] = {}
        self.predicted: list[tuple[int | None, int]] = []

    def pull(self, worker: int, staleness: int | None) -> None:
        self.pulled[worker] = (self.version, staleness)

    def loss(self, worker: int) -> None: ...

    def compute(self, worker: int, batch: int) -> None:
        self.computing[worker] = self.pulled[worker]

    def arrive(self, update: Identity) -> None:
        self.arrived[update] = self.computing[update.worker]

    def apply(self, apply: Apply, time: float) -> list[float]:
        for update in apply.updates:
            base, predicted = self.arrived[identity_of(update)]
            assert update.base_version == base, "an update names another version than it was computed from"
            self.predicted.append((predicted, self.version - base))
        self.version += 1
        return []


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("policy", ["r2sp", "r2sp:groups=2", "asp", "ssp:staleness=1"])
def test_the_model_has_every_version_before_it_is_pulled(policy: str, streamed: bool) -> None:
    model = Versions()
    Cluster(cluster(), make(policy), 20, 0, streamed, model=model).run()
    assert len(model.predicted) >= 19 * WORKERS


@pytest.mark.parametrize(("policy", "streamed"), [("r2sp", False), ("r2sp:groups=4", False), ("r2sp", True)])
def test_the_staleness_of_late_pulls_is_predicted_correctly(policy: str, streamed: bool) -> None:
    """AlexNet's pulls wait for the servers' links, so the pulled version is newer than the granted one."""
    model = Versions()
    Cluster(load_cluster("r2sp-a-alexnet"), make(policy), 20, 0, streamed, model=model).run()
    ring = model.predicted[5 * 16 :]
    assert {predicted - true for predicted, true in ring if predicted is not None} == {0}
    if (policy, streamed) == ("r2sp", False):
        assert min(true for _, true in ring) < 15


def test_a_test_does_not_depend_on_earlier_tests() -> None:
    training = Training(task("resnet20"), WORKERS)
    first, weights = training.test(), training.slice.weights.clone()
    training.slice.weights.mul_(3.0)
    assert training.test() != first
    training.slice.weights.copy_(weights)
    assert training.test() == first


def test_the_statistics_of_batch_norm_come_from_training_samples() -> None:
    training = Training(task("resnet20"), WORKERS)
    training.test()
    network, data = training._tested, DIGITS.limited(1024)  # whole batches of 256, so all have the same weight
    first = next(layer for layer in network.modules() if isinstance(layer, torch.nn.BatchNorm2d))
    seen: list[torch.Tensor] = []
    first.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        network.eval()(data.prepared(data.inputs))
    assert first.running_mean is not None
    assert torch.allclose(first.running_mean, seen[0].mean(dim=(0, 2, 3)), atol=2e-2)


def test_only_the_versions_in_use_are_kept() -> None:
    training = Training(task(), WORKERS)
    versions: list[weakref.ref[torch.Tensor]] = []
    pull = training.pull

    def watched(worker: int, staleness: int | None) -> None:
        pull(worker, staleness)
        versions.append(weakref.ref(training._pulled[worker]))
        if len(versions) % 20:
            return
        gc.collect()
        alive = {id(each()) for each in versions if each() is not None}
        assert len(alive) <= 2 * WORKERS  # the version that each worker has, and that of its last update

    training.pull = watched  # type: ignore[method-assign]
    Cluster(cluster(), make("r2sp"), 20, model=training).run()
    assert len(versions) >= 19 * WORKERS


# Goals


def test_a_loss_goal_is_reached_when_it_has_held() -> None:
    goal = Goal("loss", 1.0, hold=5)
    outcome = train(cluster(), make("r2sp"), task(), goal, rounds=400, name="r2sp")
    assert outcome.ended == "goal" and outcome.reached is not None
    below = [point.loss <= 1.0 for point in outcome.curve]
    assert all(below[-4:]) and outcome.reached.loss <= 1.0
    assert outcome.reached.seconds >= outcome.curve[-1].seconds
    free = train(cluster(), make("r2sp"), task(), None, rounds=len(outcome.curve) + 5)
    assert free.curve[: len(outcome.curve)] == outcome.curve


def test_an_accuracy_goal_is_tested_every_few_rounds() -> None:
    outcome = train(cluster(), make("bsp"), task(), Goal("accuracy", 0.9, every=5), rounds=400)
    assert outcome.ended == "goal" and outcome.reached is not None and outcome.reached.accuracy is not None
    assert outcome.reached.accuracy >= 0.9
    tested = [at for at, point in enumerate(outcome.curve) if point.accuracy is not None]
    assert tested == list(range(4, len(outcome.curve), 5))
    assert outcome.tested is not None and outcome.tested[1] >= 0.85


def test_a_goal_that_is_not_reached_has_no_point() -> None:
    outcome = train(cluster(), make("bsp"), task(), Goal("loss", 0.001), rounds=5)
    assert (outcome.ended, outcome.reached) == ("rounds", None)
    assert outcome.best == pytest.approx(min(point.loss for point in outcome.curve))


def test_a_budget_of_virtual_time_ends_a_run() -> None:
    outcome = train(cluster(), make("asp"), task(), rounds=1000, budget=7.0)
    assert outcome.ended == "budget" and outcome.reached is None
    assert 5.0 < outcome.curve[-1].seconds <= 7.0


def test_a_run_that_diverges_is_stopped() -> None:
    outcome = train(cluster(), make("bsp"), task(optimizer=sgd(1e4)), Goal("loss", 0.1), rounds=100)
    assert (outcome.ended, outcome.reached, outcome.tested) == ("diverged", None, None)
    assert len(outcome.curve) < 100


def test_an_interrupted_run_returns_its_outcome() -> None:
    def interrupt(outcome: TrainingOutcome) -> None:
        if len(outcome.curve) >= 3:
            raise KeyboardInterrupt

    outcome = train(cluster(), make("r2sp"), task(), rounds=1000, progress=interrupt)
    assert outcome.ended == "interrupted" and 3 <= len(outcome.curve) < 30


def test_the_learning_rate_decays_by_epochs() -> None:
    of = task(optimizer=sgd(0.1), decay=((2, 0.1), (3, 0.5)))
    assert [of.rate(epochs) for epochs in (0, 1.9, 2, 3.5)] == pytest.approx([0.1, 0.1, 0.01, 0.005])
    halted = task(decay=((0.5, 0.0),))
    a, _ = trained(cluster(), "bsp", halted, rounds=14)
    b, _ = trained(cluster(), "bsp", halted, rounds=20)
    assert torch.equal(a, b)  # 12 rounds are half an epoch of digits


# Corrections


@pytest.mark.parametrize("correct", ["predict", "round", "full"])
def test_without_staleness_there_is_nothing_to_correct(correct: Any) -> None:
    of = task(optimizer=sgd(momentum=0.9))
    plain, _ = trained(cluster(), "bsp", of, rounds=6)
    corrected, _ = trained(cluster(), "bsp", replace(of, correct=correct), rounds=6)
    assert torch.equal(plain, corrected)


def test_predicted_weights_follow_the_momentum() -> None:
    """Two workers take turns, with staleness 1. Pulled weights are one step ahead, by momentum alone."""
    of = task(optimizer=sgd(0.05, momentum=0.9), correct="predict")
    training = Training(of, 2)
    pull = training.pull

    def watched(worker: int, staleness: int | None) -> None:
        pull(worker, staleness)
        state = list(training.slice._optimizer.state.values())
        if staleness and state:
            expected = training.slice.weights - 0.05 * 0.9 * state[0]["momentum_buffer"]
            assert torch.allclose(training._pulled[worker], expected, atol=1e-7)
            seen.append(staleness)

    seen: list[int] = []
    training.pull = watched  # type: ignore[method-assign]
    Cluster(cluster(2, jitter=0.0), make("r2sp"), 10, model=training).run()
    assert len(seen) > 10 and set(seen) == {1}


@pytest.mark.slow
def test_corrected_staleness_costs_hardly_any_samples() -> None:
    """Sixteen workers take turns, with momentum. Except at the start of the ring, the losses are those of BSP."""
    of = task(optimizer=sgd(0.01, momentum=0.9))
    spec = cluster(16, jitter=0.05, link=1e9)
    bsp = train(spec, make("bsp"), of, rounds=40)
    none = train(spec, make("r2sp"), of, rounds=40)
    full = train(spec, make("r2sp"), replace(of, correct="full"), rounds=40)
    ours, theirs, worse = ([point.loss for point in each.curve[8:]] for each in (full, bsp, none))
    assert sum(ours) / len(ours) < 1.15 * sum(theirs) / len(theirs)
    assert sum(worse) / len(worse) > 1.5 * sum(theirs) / len(theirs)


# The order of updates


def test_runs_with_the_same_order_learn_the_same() -> None:
    spec = cluster()
    orders = {
        policy: update_schedule(spec, make(policy), 10).order for policy in ("bsp", "bsp:pipeline=true", "r2sp", "asp")
    }
    assert orders["bsp"] == orders["bsp:pipeline=true"]
    assert len(set(orders.values())) == 3
    plain, _ = trained(spec, "bsp", task(), rounds=10)
    piped, _ = trained(spec, "bsp:pipeline=true", task(), rounds=10)
    assert torch.allclose(plain, piped, atol=1e-6)
    assert (
        update_schedule(cluster(jitter=0.3), make("bsp"), 10).order == orders["bsp"]
    )  # jitter does not change the order of a barrier
    assert update_schedule(spec, make("bsp:weights=mean"), 10).order != orders["bsp"]


def test_the_predicted_staleness_is_part_of_the_order() -> None:
    """Where staleness is corrected, workers pull weights that are predicted for it."""

    class Silent(R2SP):
        def arrived(self, update: Update, now: float) -> Decisions:
            decisions = super().arrived(update, now)
            return [replace(each, expected_staleness=None) if isinstance(each, Grant) else each for each in decisions]

    spec = cluster(jitter=0.0)
    predicted, silent = update_schedule(spec, R2SP(), 10), update_schedule(spec, Silent(), 10)
    assert predicted.seconds == silent.seconds and predicted.staleness == silent.staleness
    assert predicted.order != silent.order


def test_a_schedule_has_the_times_of_the_run() -> None:
    of = update_schedule(cluster(), make("r2sp"), 12)
    outcome = train(cluster(), make("r2sp"), task(), rounds=12)
    whole = len(of.seconds) // WORKERS  # the last updates of a ring have arrived, and are applied later
    ends = [of.seconds[(at + 1) * WORKERS - 1] for at in range(whole)]
    assert whole >= 11
    assert [point.seconds for point in outcome.curve[:whole]] == pytest.approx(ends)
    assert of.mean_staleness == pytest.approx(outcome.staleness, rel=0.05)


# Samples


def test_every_sample_is_used_once_before_any_is_used_again() -> None:
    shares = Shares.dealt(103, 4, seed=1)
    first = [shares.take(worker, 25).tolist() for worker in range(4)]
    assert len({sample for share in first for sample in share}) == 100
    second = shares.take(0, 60).tolist()  # crosses the end of the share twice
    whole = set(first[0]) | set(second)
    assert len(whole) == 26 and all((first[0] + second).count(each) in (3, 4) for each in whole)
    assert Shares.dealt(103, 4, seed=1).take(2, 25).tolist() == first[2]
    assert Shares.dealt(103, 4, seed=2).take(2, 25).tolist() != first[2]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TrainingError, match="3 samples for 4 workers"):
        Shares.dealt(3, 4, 0)
    with pytest.raises(TrainingError, match="no device 'gpu'"):
        device_named("gpu")
    with pytest.raises(TrainingError, match="cpu or cuda"):
        device_named("meta")
    if not torch.cuda.is_available():
        with pytest.raises(TrainingError, match="no CUDA device"):
            device_named("cuda")
    assert TrainingOutcome("x", None).best is None


@pytest.mark.parametrize("policy", ["bsp", "r2sp", "r2sp:groups=2", "asp", "ssp:staleness=1", "bsp:backup=1"])
@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_a_training_has_as_many_rounds_as_were_asked_for(policy: str, rounds: int) -> None:
    """A ring applies an update when its turn comes, so the last ones had arrived and were never applied."""
    outcome = train(cluster(), make(policy), task(), None, rounds)
    assert len(outcome.curve) == rounds
    assert outcome.ended == "rounds"


def test_augmented_images_depend_on_the_seed_alone() -> None:
    augmented = replace(task(), augment=True)
    one, again = (train(cluster(), make("r2sp"), augmented, None, 4) for _ in range(2))
    assert one.curve == again.curve
    assert one.curve != train(cluster(), make("r2sp"), task(), None, 4).curve


def test_a_test_of_augmented_training_sees_crops_too() -> None:
    """Clean images have other means than crops with black borders, and batch norm would be off by the difference."""
    plain, augmented = (Training(replace(task(), augment=each), WORKERS) for each in (False, True))
    inputs = [each._calibration_inputs().float() for each in (plain, augmented)]
    assert inputs[0].shape == inputs[1].shape
    assert inputs[1].mean() < 0.8 * inputs[0].mean()
    assert torch.equal(inputs[1], augmented._calibration_inputs().float())
