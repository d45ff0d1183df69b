"""Real training under the virtual clock: time is simulated, gradients are not.

Every gradient is computed from the weights that its worker would have pulled at that virtual moment, with the worker's
own samples. It is applied in the order and with the staleness that the policy produces. So the samples that a policy
costs show up beside the seconds that it saves.

Gradients are computed when an Apply needs one of them: then all that are due are computed together (`gradients`).
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from paceline.job.identity import Identity, identity_of
from paceline.model.correction import chosen, momentum_of
from paceline.model.optimizer_spec import SUMS
from paceline.model.similarity import products
from paceline.model.slice import Slice
from paceline.observe.observer import Observer
from paceline.policies import Apply, Keep, Policy, Update, WorkerId
from paceline.simulate.cluster import Cluster
from paceline.simulate.cluster_spec import ClusterSpec
from paceline.simulate.gradients import GradientJob, Gradients, flat, load
from paceline.simulate.local_training import LocalTraining
from paceline.simulate.task import CurvePoint, Goal, Task, TrainingError, TrainingOutcome, device_named
from paceline.workloads.augmentation import Crops, draw, samples_of
from paceline.workloads.networks import accuracy, loss, make

DIVERGED_FACTOR = 1e3  # a loss above this many times that of the first round, or NaN, ends the run
CALIBRATION_SAMPLES = 2048  # samples for the statistics of batch norm before a test
TEST_BATCH = 1000  # samples in one batch of a test


class Training:
    """The model behind a simulated cluster: what pulls return, what workers compute, and what Applies change."""

    def __init__(
        self,
        task: Task,
        workers: int,
        mixes: bool = False,
        goal: Goal | None = None,
        compares: bool = False,
        shares: Shares | None = None,
        limit: float = math.inf,
    ) -> None:
        """shares: the samples of each worker. By default samples are dealt out evenly. limit: of the updates."""
        self.task, self._mixes, self._goal, self._compares = task, mixes, goal, compares
        self._correct = chosen(task.correct, task.optimizer)
        self.momentum = momentum_of(task.optimizer)
        self._device = device_named(task.device)
        self._data = task.data.to(self._device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed)
            self._network = make(task.network, task.data)
        self._tested = copy.deepcopy(self._network).to(self._device)
        self._gradients = Gradients(self._network, loss, self._fetch, self._device, task.together, task.precision)
        layout, local = self._gradients.layout, task.local
        # After local training, workers push the change of their model, and the server adds it.
        self._local_training = (
            LocalTraining(
                self._gradients.network, self._gradients.scorer, self._fetch, local, task.optimizer, task.together
            )
            if local
            else None
        )
        self.slice = Slice(layout, 0, layout.size, SUMS if local else task.optimizer, self._device)
        self.slice.weights.copy_(flat(self._network))
        self.samples = shares or Shares.dealt(len(task.data.labels), workers, task.seed)
        self._crops = Crops(self._data) if task.augment else None
        self._variants = torch.Generator().manual_seed(task.seed)
        self.version = 0
        self._newest: torch.Tensor | None = None  # a copy of the newest weights, if a worker has pulled them unchanged
        self._pulled: dict[WorkerId, torch.Tensor] = {}  # worker → the weights that it has pulled
        self._turns: dict[WorkerId, int] = {}  # worker → Applies in a round, according to its last Grant
        self._computing: dict[WorkerId, GradientJob] = {}
        self._arrived: dict[Identity, GradientJob] = {}
        self._kept: dict[int, Identity] = {}  # slot → the update in it
        self._due: list[GradientJob] = []  # jobs whose gradient is not computed yet
        self._local_optimizers: dict[WorkerId, Slice] = {}  # worker → its own optimizer, if models are mixed
        # The outcome
        self.outcome = TrainingOutcome("", goal)
        self.over: Literal["goal", "diverged", "rounds"] | None = None
        self._limit = limit
        self.seen = 0  # samples that have changed the model
        self._window: deque[float] = deque(maxlen=workers)
        self._in_round = 0
        self._first_loss: float | None = None
        self._low_updates = 0  # number of updates in a row with a low enough loss

    # Events of the cluster

    def grant(self, worker: WorkerId, staleness: int | None) -> None:
        """Note a Grant to a worker.

        staleness: the staleness that the policy expects of the worker's next update, counted from now.
        """
        self._turns[worker] = 1 if staleness is None else staleness + 1

    def pull(self, worker: WorkerId, staleness: int | None) -> None:
        """Give a worker the weights as they are now, or as they are predicted to be when its update is applied.

        staleness: that of the update which the worker will compute from them, if it is known.
        """
        if self._correct != "none" and staleness:
            self._pulled[worker] = self.slice.ahead(staleness, self._correct)
        else:
            if self._newest is None:
                self._newest = self.slice.weights.clone()
            self._pulled[worker] = self._newest

    def compute(self, worker: WorkerId, batch: int) -> None:
        """Let a worker begin to compute with the weights that it has pulled."""
        local = self.task.local
        samples = self.samples.take(worker, local.steps * local.batch if local else batch)
        if self._crops:
            samples = draw(samples, self._variants)
        samples = samples.to(self._device)
        job = GradientJob(self._pulled[worker], samples.view(local.steps, local.batch) if local else samples)
        self._computing[worker] = job
        self._due.append(job)

    def loss(self, worker: WorkerId) -> float | None:
        """Return the loss of what a worker has computed; None for local training."""
        job = self._computing[worker]
        if self._local_training:  # local training is computed when it is needed
            return None
        if job.gradient is None:
            self._gradients.compute(self._due)
            self._due = []
        return job.loss

    def arrive(self, update: Identity) -> None:
        """Note that the update of a worker has arrived."""
        self._arrived[update] = self._computing.pop(update.worker)

    def drop(self, worker: WorkerId) -> None:
        """Forget the gradient that a worker is computing or pushing."""
        job = self._computing.pop(worker, None)
        if job in self._due:
            self._due.remove(job)

    def keep(self, keep: Keep) -> None:
        """Keep an update in a slot. It replaces the update that was there."""
        old = self._kept.get(keep.slot)
        if old:
            self._arrived.pop(old, None)
        self._kept[keep.slot] = identity_of(keep.update)

    def discard(self, update: Update) -> None:
        """Forget an update that has arrived."""
        job = self._arrived.pop(identity_of(update), None)
        if job in self._due:
            self._due.remove(job)

    def apply(self, apply: Apply, time: float) -> list[float]:
        """Make the next version of the model. Return the cosines of the updates, if the policy compares them."""
        if self.over:
            return []
        kept = set(self._kept.values())
        jobs = []
        for update in apply.updates:
            key = identity_of(update)
            jobs.append(self._arrived[key] if key in kept else self._arrived.pop(key))
        rate = self.task.rate(self.seen / len(self.task.data.labels))
        self._compute_pushed(apply, jobs, rate)
        pushed = [job.gradient for job in jobs if job.gradient is not None]
        compared = self._compares and len(jobs) > 1
        cosines = products(pushed, apply.weights).cosines() if compared else []
        if apply.mix is None:
            turns = max(self._turns.get(update.worker, 1) for update in apply.updates)
            self.slice.step(pushed, apply.weights, [1.0 if self._local_training else rate], self._correct, turns)
        else:
            models = [job.model for job in jobs if job.model is not None]
            self.slice.mix(models, apply.weights, apply.mix)
        self._newest = None
        for update, job in zip(apply.updates, jobs, strict=True):
            self._count(update, job, time)
        self.version += 1
        return cosines

    def _compute_pushed(self, apply: Apply, jobs: list[GradientJob], rate: float) -> None:
        """Compute the gradients or models of these jobs, if they are not there yet."""
        if any(job.gradient is None for job in jobs):
            if self._local_training:
                # A GPU computes many at once, so it computes all that are due, even if some are never used.
                due = self._due if self._device.type == "cuda" else [job for job in jobs if job.gradient is None]
                self._local_training.compute(due, rate)
                for job in due:
                    assert job.model is not None
                    job.gradient = job.weights - job.model
                self._due = [job for job in self._due if job.gradient is None]
            else:
                self._gradients.compute(self._due)
                self._due = []
        if self._mixes:
            for update, job in zip(apply.updates, jobs, strict=True):
                if job.model is None:
                    job.model = self._local_step(update.worker, job)

    def _local_step(self, worker: WorkerId, job: GradientJob) -> torch.Tensor:
        """Return the model that a worker makes of its weights, by one step of its own optimizer."""
        if worker not in self._local_optimizers:
            layout = self._gradients.layout
            self._local_optimizers[worker] = Slice(layout, 0, layout.size, self.task.optimizer, self._device)
        local = self._local_optimizers[worker]
        local.weights.copy_(job.weights)
        assert job.gradient is not None
        local.step([job.gradient], [1.0], [self.task.rate(self.seen / len(self.task.data.labels))])
        return local.weights.clone()

    # The outcome

    def _count(self, update: Update, job: GradientJob, time: float) -> None:
        outcome, goal = self.outcome, self._goal
        outcome.updates += 1
        outcome.staleness += (self.version - update.base_version - outcome.staleness) / outcome.updates
        self.seen += update.batch_size
        self._window.append(job.loss)
        mean = sum(self._window) / len(self._window)
        self._in_round += 1
        whole = len(self._window) == self._window.maxlen
        tested: float | None = None
        if whole and self._in_round >= len(self._window):
            self._in_round = 0
            self._first_loss = self._first_loss or mean
            if goal and goal.kind == "accuracy" and (len(outcome.curve) + 1) % goal.every == 0:
                _, tested = self.test()
            outcome.curve.append(CurvePoint(time, self.seen, mean, tested))
        if not math.isfinite(mean) or (self._first_loss and mean > DIVERGED_FACTOR * self._first_loss):
            self.over = "diverged"
        elif goal and goal.kind == "loss" and whole:
            outcome.best = goal.nearer(outcome.best, mean)
            self._low_updates = self._low_updates + 1 if mean <= goal.value else 0
            if self._low_updates >= goal.hold * len(self._window):
                self._reach(CurvePoint(time, self.seen, mean))
        elif goal and tested is not None:
            outcome.best = goal.nearer(outcome.best, tested)
            if tested >= goal.value:
                self._reach(CurvePoint(time, self.seen, mean, tested))
        if outcome.updates >= self._limit and not self.over:
            self.over = "rounds"

    def _reach(self, point: CurvePoint) -> None:
        self.outcome.reached, self.over = point, "goal"

    def test(self) -> tuple[float, float]:
        """Return the loss and the accuracy of the newest weights on the test set.

        The statistics of batch norm are computed from training samples with these weights ("precise" batch norm; Wu and
        Johnson 2021). There are no running statistics, which could be as stale as an update. If training images are
        cropped, so are these: crops with black borders have other statistics, and the network has learned with those.
        """
        network, data = self._tested, self._data
        load(network, self.slice.weights)
        norms = [layer for layer in network.modules() if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)]
        with torch.no_grad():
            if norms:
                network.train()
                for norm in norms:
                    norm.reset_running_stats()
                    norm.momentum = None  # a plain mean over the following batches
                for inputs in torch.split(self._calibration_inputs(), 256):
                    network(data.prepared(inputs))
            network.eval()
            losses, right = 0.0, 0.0
            for inputs, labels in zip(
                *(torch.split(each, TEST_BATCH) for each in (data.test_inputs, data.test_labels)), strict=True
            ):
                output = network(data.prepared(inputs))
                losses += float(loss(output, labels)) * len(labels)
                right += float(accuracy(output, labels)) * len(labels)
        return losses / len(data.test_labels), right / len(data.test_labels)

    def _calibration_inputs(self) -> torch.Tensor:
        """Return the inputs from which every test computes the statistics of batch norm."""
        first = min(CALIBRATION_SAMPLES, len(self._data.labels))
        if not self._crops:
            return self._data.inputs[:first]
        variants = draw(torch.arange(first), torch.Generator().manual_seed(self.task.seed))
        return self._crops.images(variants.to(self._device))

    def _fetch(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data = self._data
        if self._crops:
            return data.prepared(self._crops.images(samples)), data.labels[samples_of(samples)]
        return data.prepared(data.inputs[samples]), data.labels[samples]


class Shares:
    """The samples of each worker. A worker goes through its share in a new random order each time."""

    def __init__(self, shares: Sequence[torch.Tensor], seed: int) -> None:
        self._shares = list(shares)
        seeds = [(seed * 1_000_003 + worker + 1) % 2**63 for worker in range(len(shares))]  # torch takes no larger ones
        self._random = [torch.Generator().manual_seed(each) for each in seeds]
        self._upcoming = [torch.empty(0, dtype=torch.int64) for _ in shares]

    @classmethod
    def dealt(cls, samples: int, workers: int, seed: int) -> Shares:
        """Return shares of equal size, shuffled and dealt out."""
        if samples < workers:
            raise TrainingError(f"There are {samples} samples for {workers} workers; each worker needs at least one.")
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
        return cls([order[worker::workers] for worker in range(workers)], seed)

    def take(self, worker: WorkerId, count: int) -> torch.Tensor:
        """Return the next samples of a worker."""
        left = self._upcoming[worker]
        while len(left) < count:
            share = self._shares[worker]
            left = torch.cat([left, share[torch.randperm(len(share), generator=self._random[worker])]])
        self._upcoming[worker] = left[count:]
        return left[:count]


def train(
    spec: ClusterSpec,
    policy: Policy,
    task: Task,
    goal: Goal | None = None,
    rounds: int = 1000,
    budget: float = math.inf,
    streamed: bool = False,
    name: str = "",
    progress: Callable[[TrainingOutcome], None] | None = None,
    shares: Shares | None = None,
    observer: Observer | None = None,
) -> TrainingOutcome:
    """Train on a simulated cluster until the goal is reached, or for `rounds` rounds or `budget` virtual seconds.

    Return the outcome, even after Ctrl-C. `progress` is called with the outcome as it grows. `observer` observes all
    events. shares: the samples of each worker. By default they are dealt out evenly.
    """
    if task.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # TF32, which torch uses for convolutions anyway
    workers = len(spec.workers)
    # A cluster counts the updates that arrive, and a round consists of updates that changed the model. A ring applies
    # an update when its turn comes, and other policies discard some. So the cluster may run longer, up to a limit.
    # With local training, a round is over when the clients have answered.
    limit, at_most = (math.inf, rounds) if task.local else (rounds * workers, 2 * rounds + 2)
    training = Training(task, workers, policy.mixes, goal, policy.compares, shares, limit)
    cluster = Cluster(spec, policy, rounds, task.seed, streamed, observer, training, at_most)
    outcome = training.outcome
    outcome.policy = name or type(policy).__name__.lower()
    if math.isfinite(budget):
        cluster.clock.at(budget, lambda _: cluster.stop())

    def look(_: float) -> None:
        if progress:
            progress(outcome)

    try:
        result = cluster.run(look)
        outcome.report = result.report
        outcome.ended = training.over or ("budget" if cluster.clock.now >= budget else "rounds")
        if outcome.ended != "diverged":
            outcome.tested = training.test()
    except KeyboardInterrupt:
        outcome.ended = "interrupted"
    return outcome
