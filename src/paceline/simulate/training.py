"""Real training under the virtual clock: time is simulated, gradients are not.

Every gradient is computed with the very weights that its worker would have pulled at that virtual moment, from its own
samples, and applied in the order and with the staleness that the policy really produced. So what a scheme costs in
samples shows beside what it saves in seconds.

Gradients wait until an Apply needs one of them; then all that are due are computed together (`gradients.py`).
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
from paceline.workloads.networks import accuracy, loss, make

DIVERGED = 1e3  # times the loss of the first round: beyond it, or at NaN, nothing will come of it
CALIBRATED = 2048  # samples that batch norm's statistics are taken from before a test
TESTED = 1000  # samples tested at once


class Training:
    """The model behind a simulated cluster: what pulls give, what workers compute, what Applies change."""

    def __init__(
        self,
        task: Task,
        workers: int,
        mixes: bool = False,
        goal: Goal | None = None,
        compares: bool = False,
        shares: Shares | None = None,
    ) -> None:
        """shares: whose samples are which, where they are not simply dealt out."""
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
        # After local training what is pushed is how far the model has come: the server adds it up.
        self._locals = (
            LocalTraining(
                self._gradients.network, self._gradients.judge, self._fetch, local, task.optimizer, task.together
            )
            if local
            else None
        )
        self.slice = Slice(layout, 0, layout.size, SUMS if local else task.optimizer, self._device)
        self.slice.weights.copy_(flat(self._network))
        self.samples = shares or Shares.dealt(len(task.data.labels), workers, task.seed)
        self.version = 0
        self._newest: torch.Tensor | None = None  # a copy of the weights, if anybody has pulled them as they are
        self._held: dict[WorkerId, torch.Tensor] = {}  # by who pulled them
        self._turns: dict[WorkerId, int] = {}  # Applies in a round, as the last Grant told
        self._computing: dict[WorkerId, GradientJob] = {}
        self._arrived: dict[Identity, GradientJob] = {}
        self._kept: dict[int, Identity] = {}  # slot → the update there
        self._due: list[GradientJob] = []  # without a gradient so far
        self._local: dict[WorkerId, Slice] = {}  # where models are mixed: what workers step with by themselves
        # What it comes to
        self.outcome = TrainingOutcome("", goal)
        self.over: Literal["goal", "diverged"] | None = None
        self.seen = 0  # samples that changed the model
        self._window: deque[float] = deque(maxlen=workers)
        self._in_round = 0
        self._first: float | None = None
        self._below = 0  # updates in a row after which the loss was low enough

    # What the cluster tells

    def grant(self, worker: WorkerId, staleness: int | None) -> None:
        """It may go on; staleness: that the policy expects of its next update, counted from now."""
        self._turns[worker] = 1 if staleness is None else staleness + 1

    def pull(self, worker: WorkerId, staleness: int | None) -> None:
        """It is given the weights as they are now; staleness: of the update it will make of them, if that is known."""
        if self._correct != "none" and staleness:
            self._held[worker] = self.slice.ahead(staleness, self._correct)
        else:
            if self._newest is None:
                self._newest = self.slice.weights.clone()
            self._held[worker] = self._newest

    def compute(self, worker: WorkerId, batch: int) -> None:
        """It begins to compute."""
        local = self.task.local
        samples = self.samples.take(worker, local.steps * local.batch if local else batch).to(self._device)
        job = GradientJob(self._held[worker], samples.view(local.steps, local.batch) if local else samples)
        self._computing[worker] = job
        self._due.append(job)

    def loss(self, worker: WorkerId) -> float | None:
        """Of what it has computed."""
        job = self._computing[worker]
        if self._locals:  # what clients train by themselves is computed when it is needed
            return None
        if job.gradient is None:
            self._gradients.compute(self._due)
            self._due = []
        return job.loss

    def arrive(self, update: Identity) -> None:
        """What it computed is in."""
        self._arrived[update] = self._computing.pop(update.worker)

    def drop(self, worker: WorkerId) -> None:
        """What it was computing will not come."""
        job = self._computing.pop(worker, None)
        if job in self._due:
            self._due.remove(job)

    def keep(self, keep: Keep) -> None:
        old = self._kept.get(keep.slot)
        if old:
            self._arrived.pop(old, None)
        self._kept[keep.slot] = identity_of(keep.update)

    def discard(self, update: Update) -> None:
        job = self._arrived.pop(identity_of(update), None)
        if job in self._due:
            self._due.remove(job)

    def apply(self, apply: Apply, time: float) -> list[float]:
        """Make the next version of the model. Where the policy compares: the updates' cosines with their mean."""
        if self.over:
            return []
        kept = set(self._kept.values())
        jobs = []
        for update in apply.updates:
            key = identity_of(update)
            jobs.append(self._arrived[key] if key in kept else self._arrived.pop(key))
        rate = self.task.rate(self.seen / len(self.task.data.labels))
        self._work(apply, jobs, rate)
        pushed = [job.gradient for job in jobs if job.gradient is not None]
        compared = self._compares and len(jobs) > 1
        cosines = products(pushed, apply.weights).cosines() if compared else []
        if apply.mix is None:
            turns = max(self._turns.get(update.worker, 1) for update in apply.updates)
            self.slice.step(pushed, apply.weights, [1.0 if self._locals else rate], self._correct, turns)
        else:
            models = [job.model for job in jobs if job.model is not None]
            self.slice.mix(models, apply.weights, apply.mix)
        self._newest = None
        for update, job in zip(apply.updates, jobs, strict=True):
            self._count(update, job, time)
        self.version += 1
        return cosines

    def _work(self, apply: Apply, jobs: list[GradientJob], rate: float) -> None:
        """See that what these workers push is there."""
        if any(job.gradient is None for job in jobs):
            if self._locals:
                # A GPU does many at once, so all that are due, though some may come to nothing; a CPU only these.
                due = self._due if self._device.type == "cuda" else [job for job in jobs if job.gradient is None]
                self._locals.compute(due, rate)
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
                    job.model = self._step_at(update.worker, job)

    def _step_at(self, worker: WorkerId, job: GradientJob) -> torch.Tensor:
        """The model that a worker makes of what it pulled, by a step of an optimizer of its own."""
        if worker not in self._local:
            layout = self._gradients.layout
            self._local[worker] = Slice(layout, 0, layout.size, self.task.optimizer, self._device)
        local = self._local[worker]
        local.weights.copy_(job.weights)
        assert job.gradient is not None
        local.step([job.gradient], [1.0], [self.task.rate(self.seen / len(self.task.data.labels))])
        return local.weights.clone()

    # What it comes to

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
            self._first = self._first or mean
            if goal and goal.kind == "accuracy" and (len(outcome.curve) + 1) % goal.every == 0:
                _, tested = self.test()
            outcome.curve.append(CurvePoint(time, self.seen, mean, tested))
        if not math.isfinite(mean) or (self._first and mean > DIVERGED * self._first):
            self.over = "diverged"
        elif goal and goal.kind == "loss" and whole:
            outcome.best = goal.nearer(outcome.best, mean)
            self._below = self._below + 1 if mean <= goal.value else 0
            if self._below >= goal.hold * len(self._window):
                self._reach(CurvePoint(time, self.seen, mean))
        elif goal and tested is not None:
            outcome.best = goal.nearer(outcome.best, tested)
            if tested >= goal.value:
                self._reach(CurvePoint(time, self.seen, mean, tested))

    def _reach(self, point: CurvePoint) -> None:
        self.outcome.reached, self.over = point, "goal"

    def test(self) -> tuple[float, float]:
        """Loss and accuracy on the test set, of the newest weights.

        Batch norm's statistics are taken anew from training samples with these very weights (Wu and Johnson 2021 call
        it precise): there are none that could be as stale as an update.
        """
        network, data = self._tested, self._data
        load(network, self.slice.weights)
        norms = [layer for layer in network.modules() if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)]
        with torch.no_grad():
            if norms:
                network.train()
                for norm in norms:
                    norm.reset_running_stats()
                    norm.momentum = None  # a plain mean over the batches that follow
                for part in torch.split(data.inputs[:CALIBRATED], 256):
                    network(data.prepared(part))
            network.eval()
            losses, right = 0.0, 0.0
            for inputs, labels in zip(
                *(torch.split(each, TESTED) for each in (data.test_inputs, data.test_labels)), strict=True
            ):
                output = network(data.prepared(inputs))
                losses += float(loss(output, labels)) * len(labels)
                right += float(accuracy(output, labels)) * len(labels)
        return losses / len(data.test_labels), right / len(data.test_labels)

    def _fetch(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._data.prepared(self._data.inputs[samples]), self._data.labels[samples]


class Shares:
    """Who gets which samples: each worker has a share of its own, shuffled anew each time it has gone through it."""

    def __init__(self, shares: Sequence[torch.Tensor], seed: int) -> None:
        self._share = list(shares)
        self._chance = [torch.Generator().manual_seed(seed * 1_000_003 + worker + 1) for worker in range(len(shares))]
        self._left = [torch.empty(0, dtype=torch.int64) for _ in shares]

    @classmethod
    def dealt(cls, samples: int, workers: int, seed: int) -> Shares:
        """Shuffled and dealt out, to each as many as to the others."""
        if samples < workers:
            raise TrainingError(f"There are {samples} samples for {workers} workers; give each at least one.")
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
        return cls([order[worker::workers] for worker in range(workers)], seed)

    def take(self, worker: WorkerId, count: int) -> torch.Tensor:
        """The worker's next samples."""
        left = self._left[worker]
        while len(left) < count:
            share = self._share[worker]
            left = torch.cat([left, share[torch.randperm(len(share), generator=self._chance[worker])]])
        self._left[worker] = left[count:]
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
    """Train on a simulated cluster until the goal is reached, or for so many rounds or virtual seconds.

    Interrupted by Ctrl-C, it still says what was reached. `progress` hears of the outcome as it grows, `observer` of
    all that happens. shares: whose samples are which, where they are not simply dealt out.
    """
    if task.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # as torch does with convolutions anyway: TF32
    training = Training(task, len(spec.workers), policy.mixes, goal, policy.compares, shares)
    cluster = Cluster(spec, policy, rounds, task.seed, streamed, observer, training)
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
