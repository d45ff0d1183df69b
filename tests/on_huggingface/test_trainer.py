"""The Trainer of transformers in a job: a tiny GPT-2, made from a config."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import EarlyStoppingCallback, Trainer

from forked import ForkedWorkers
from on_huggingface.tiny import Counting, CountingStream, arguments, gpt2
from paceline.huggingface import PacedTrainer, checks
from paceline.huggingface.flow import JobFlow
from paceline.observe.trace import Arrived, Measured
from paceline.serve.environment import CONNECT
from paceline.serve.worker.metrics import checked
from train.generations import served
from train.jobs import Job

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers are threads here. While a Trainer loads random states, it changes a list of torch's that they share."""
    lock, load = threading.Lock(), Trainer._load_rng_state

    def load_alone(self: Any, folder: Any) -> None:
        with lock:
            load(self, folder)

    monkeypatch.setattr(Trainer, "_load_rng_state", load_alone)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.chdir(tmp_path)  # a Trainer without arguments writes into the current directory


@contextmanager
def connected(monkeypatch: pytest.MonkeyPatch, policy: str, workers: int, **options: Any) -> Iterator[Job]:
    with served(policy, workers=workers, **options) as running:
        monkeypatch.setenv(CONNECT, running.address)
        yield running
    monkeypatch.delenv(CONNECT)


def train_together(
    monkeypatch: pytest.MonkeyPatch, policy: str, workers: int, make: Callable[[], Any], **train: Any
) -> tuple[Job, list[Any]]:
    """Train in threads, and return the job and the Trainers, that of the main worker first."""
    with connected(monkeypatch, policy, workers) as running:
        # All are made before one trains, because making one resets a state of Accelerate's that the threads share.
        trainers = [make() for _ in range(workers)]

        def work(trainer: Any) -> None:
            trainer.train(**train)
            trainer.session.close()

        running.work(*[lambda _, trainer=trainer: work(trainer) for trainer in trainers], seconds=240.0)
    return running, sorted(trainers, key=lambda trainer: trainer.session.worker)


def assert_equal(model: Any, expected: Any) -> None:
    for (name, value), other in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.core
def test_three_workers_equal_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """20 steps: two epochs of 120 samples, in batches of 3 × 4 and of 12."""

    def make() -> Any:
        return PacedTrainer(gpt2(), arguments(tmp_path, batch=4), train_dataset=Counting(120))

    _, trainers = train_together(monkeypatch, "bsp:weights=mean", 3, make)
    one: Any = Trainer(gpt2(), arguments(tmp_path, batch=12), train_dataset=Counting(120))
    one.train()
    assert one.state.global_step == 20
    for trainer in trainers:
        assert trainer.state.global_step == 20
        assert_equal(trainer.model, one.model)
    start = gpt2().state_dict()
    assert any((value - start[name]).abs().max() > 0.01 for name, value in one.model.state_dict().items())


@pytest.mark.slow
def test_alone_it_is_a_trainer(tmp_path: Path) -> None:
    losses = []
    for kind in (Trainer, PacedTrainer):
        options = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "train_sampling_strategy": "random"}
        trainer = kind(gpt2(), arguments(tmp_path, batch=4, **options), train_dataset=Counting(40))
        losses.append(trainer.train().training_loss)
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_turns_train_evaluate_once_and_save_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make() -> Any:
        options: dict[str, Any] = {
            "num_train_epochs": 6,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "max_grad_norm": 1.0,
        }
        data = {"train_dataset": Counting(120), "eval_dataset": Counting(16)}
        return PacedTrainer(gpt2(), arguments(tmp_path / "out", **options), **data)

    running, (main, *others) = train_together(monkeypatch, "r2sp:patience=10000,weights=mean", 3, make)
    losses = losses_of(running)
    assert sum(losses[-9:]) < 0.5 * sum(losses[:9])
    evaluated = [event.value for event in running.events if isinstance(event, Measured) and event.kind == "eval_loss"]
    assert len(evaluated) == 6 and evaluated[-1] < evaluated[0]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"checkpoint-{10 * epoch}" for epoch in sorted(range(1, 7), key=str)
    ]
    assert [each.is_world_process_zero() for each in (main, *others)] == [True, False, False]
    for other in others:
        assert math.isnan(other.evaluate()["eval_loss"])
        other.save_model(str(tmp_path / "other"))
        assert_equal(other.model, main.model)
    assert not (tmp_path / "other").exists()
    assert main.evaluate()["eval_loss"] < evaluated[0]
    samples = samples_of(running)
    assert samples.all_done and samples.trained == 720


@pytest.mark.slow
@pytest.mark.core
def test_an_early_stop_ends_all_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The best model is that of the first epoch, since the model learns something else than it is tested on."""

    class Backwards(Counting):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.rows = self.rows.flip(1)

    def make() -> Any:
        options: dict[str, Any] = {
            "num_train_epochs": 30,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
        }
        stop = EarlyStoppingCallback(early_stopping_patience=2)
        data = {"train_dataset": Counting(48), "eval_dataset": Backwards(16)}
        return PacedTrainer(gpt2(), arguments(tmp_path, **options), callbacks=[stop], **data)

    running, (main, *others) = train_together(monkeypatch, "asp:weights=mean", 3, make)
    assert main.state.global_step < 60
    assert main.evaluate()["eval_loss"] == pytest.approx(main.state.best_metric)
    assert all(each.epochs.peek() is None for each in others)
    assert samples_of(running).trained < 48 * 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Counting, CountingStream])
def test_each_worker_makes_the_steps_of_max_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Any]
) -> None:
    def make() -> Any:
        return PacedTrainer(gpt2(), arguments(tmp_path, max_steps=7), train_dataset=kind(48))

    running, trainers = train_together(monkeypatch, "bsp:weights=mean", 2, make)
    assert [trainer.state.global_step for trainer in trainers] == [7, 7]
    assert sum(isinstance(event, Arrived) for event in running.events) == 14


@pytest.mark.slow
def test_every_worker_evaluates_for_a_schedule_that_needs_the_metric(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make() -> Any:
        options: dict[str, Any] = {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 1e9, "factor": 0.5},
            "eval_strategy": "epoch",
            "metric_for_best_model": "loss",
            "warmup_steps": 0,
            "num_train_epochs": 3,
        }
        return PacedTrainer(
            gpt2(), arguments(tmp_path, **options), train_dataset=Counting(48), eval_dataset=Counting(8)
        )

    _, trainers = train_together(monkeypatch, "bsp:weights=mean", 2, make)
    for trainer in trainers:
        assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 3
        assert trainer.lr_scheduler.get_last_lr() == [5e-3 * 0.5**3] * 2


@pytest.mark.slow
def test_training_continues_from_a_checkpoint_in_mid_epoch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(folder: str, **options: Any) -> Callable[[], Any]:
        return lambda: PacedTrainer(gpt2(), arguments(tmp_path / folder, **options), train_dataset=Counting(120))

    saving = {"save_strategy": "steps", "save_steps": 7}
    _, (whole, *_) = train_together(monkeypatch, "bsp:weights=mean", 3, make("whole", **saving))
    checkpoint = tmp_path / "whole" / "checkpoint-7"
    _, resumed = train_together(
        monkeypatch, "bsp:weights=mean", 3, make("again"), resume_from_checkpoint=str(checkpoint)
    )
    for each in resumed:
        assert each.state.global_step == 20
        assert_equal(each.model, whole.model)


@pytest.mark.slow
def test_a_killed_worker_comes_back_and_all_samples_count(tmp_path: Path) -> None:
    """The others wait for it. Gradients are accumulated, and the last step of an epoch has fewer batches."""
    options = "{'gradient_accumulation_steps': 2, 'num_train_epochs': 12, 'max_grad_norm': 1.0}"
    with served("bsp:weights=mean", workers=3, lease=600.0) as running, ForkedWorkers("on_huggingface.tiny") as workers:

        def start(worker: int) -> int:
            variables = {CONNECT: running.address, "PACELINE_WORKER": str(worker), "PACELINE_WORKERS": "3"}
            return workers.start([str(tmp_path), "100", options], variables)

        pids = [start(worker) for worker in range(3)]
        workers.wait_until(lambda: updates_of(running, 1) >= 3)
        os.kill(pids[1], signal.SIGKILL)
        assert workers.code(pids[1]) == -signal.SIGKILL
        before = updates_of(running, 1)
        pids[1] = start(1)
        assert [workers.code(pid) for pid in pids] == [0, 0, 0]
    samples = samples_of(running)
    assert samples.all_done and samples.trained == 1200
    assert updates_of(running, 1) > before
    planned = 12 * math.ceil(9 / 2)
    assert [int((tmp_path / f"steps-{worker}").read_text()) for worker in range(3)] == [planned] * 3


def samples_of(running: Job) -> Any:
    return running.coordinator.state.samples


def losses_of(running: Job) -> list[float]:
    losses = [event.loss for event in running.events if isinstance(event, Arrived)]
    assert None not in losses
    return [loss for loss in losses if loss is not None]


def updates_of(running: Job, worker: int) -> int:
    return sum(isinstance(event, Arrived) and event.worker == worker for event in running.events)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"auto_find_batch_size": True}, "leave out auto_find_batch_size"),
        ({"world_size": 2}, r"start the script with `paceline run --workers 2`, not with `torchrun`"),
        ({"n_gpu": 4}, "would use 4 GPUs with DataParallel; start one worker for each GPU"),
        ({"is_fsdp_enabled": True}, "FSDP divides the parameters among processes.*leave out fsdp"),
        ({"is_deepspeed_enabled": True}, "DeepSpeed divides the parameters among processes.*leave out deepspeed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_job_cannot_have(found: dict[str, Any], sentence: str) -> None:
    plain = {"world_size": 1, "n_gpu": 1, "auto_find_batch_size": False}
    flags = {"is_fsdp_enabled": False, "is_deepspeed_enabled": False}
    checks.check(SimpleNamespace(args=SimpleNamespace(**plain), **flags))
    trainer = SimpleNamespace(args=SimpleNamespace(**plain | found), **flags | found)
    with pytest.raises(ValueError, match=sentence):
        checks.check(trainer)


def test_a_refused_setting_of_a_real_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CONNECT, "127.0.0.1:9")
    with pytest.raises(ValueError, match="leave out auto_find_batch_size"):
        PacedTrainer(gpt2(), arguments(tmp_path, auto_find_batch_size=True), train_dataset=Counting(16))


def test_only_metrics_that_a_session_takes_are_reported() -> None:
    metrics = {"eval_loss": 0.5, "l" * 80: 1.0}
    ignored = {"epoch": 1.0, "eval_runtime": 2.0, "l" * 81: 1.0, "eval loss": 1.0, "eval_nan": math.nan, "note": "text"}
    reported: dict[str, float] = {}
    session = SimpleNamespace(optimizer=SimpleNamespace(closed=False), log=lambda **found: reported.update(found))
    flow = JobFlow(SimpleNamespace(session=session, is_in_train=False))
    flow.on_evaluate(None, None, None, metrics=metrics | ignored)
    assert reported == checked(reported) == metrics


def test_a_job_trains_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with connected(monkeypatch, "bsp", 1) as running:

        def work(_: str) -> None:
            trainer: Any = PacedTrainer(gpt2(), arguments(tmp_path, num_train_epochs=1), train_dataset=Counting(8))
            trainer.train()
            with pytest.raises(ValueError, match="a job trains one model once"):
                trainer.train()
            with pytest.raises(ValueError, match="run the search under plain `python`"):
                trainer.hyperparameter_search()
            trainer.session.close()

        running.work(work)


def test_workers_of_several_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CONNECT, "127.0.0.1:9")
    monkeypatch.setenv("PACELINE_RANKS", "2")
    with pytest.raises(ValueError, match="leave out --ranks-per-worker"):
        PacedTrainer(gpt2(), arguments(tmp_path), train_dataset=Counting(16))
