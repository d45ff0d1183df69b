"""Lightning in a job: Trainer(strategy="paceline")."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pl: Any = pytest.importorskip("pytorch_lightning")

from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from forked import ForkedWorkers
from on_lightning.tiny import Circle, trainer_of
from paceline.lightning import PacelineStrategy
from paceline.observe.trace import Arrived
from paceline.serve.environment import CONNECT, WORKERS
from train.generations import served
from train.jobs import Job

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what a script that joins a job replaces in its process."""
    from paceline.lightning.package import RANK_ZERO_FUNCTIONS

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    for function in RANK_ZERO_FUNCTIONS:
        function.rank = 0


@pytest.fixture(autouse=True)
def one_patch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a Trainer asks for data, Lightning patches DataLoader for its whole process. Our workers are threads."""
    from pytorch_lightning.trainer.connectors import data_connector

    patch, patching = data_connector._replace_dunder_methods, threading.RLock()

    @contextmanager
    def alone(*arguments: Any) -> Iterator[None]:
        with patching, patch(*arguments):
            yield

    monkeypatch.setattr(data_connector, "_replace_dunder_methods", alone)


@contextmanager
def connected(monkeypatch: pytest.MonkeyPatch, policy: str, workers: int, **options: Any) -> Iterator[Job]:
    with served(policy, workers=workers, **options) as running:
        monkeypatch.setenv(CONNECT, running.address)
        monkeypatch.setenv(WORKERS, str(workers))
        yield running
    monkeypatch.delenv(CONNECT)
    monkeypatch.delenv(WORKERS)


def fit_together(
    monkeypatch: pytest.MonkeyPatch, policy: str, workers: int, make: Callable[[], tuple[Any, Any]], **fit: Any
) -> tuple[Job, list[Any]]:
    """Fit in threads, and return the job and the Trainers, that of the main worker first."""
    with connected(monkeypatch, policy, workers) as running:

        def work(_: str) -> Any:
            trainer, module = make()
            trainer.fit(module, **fit)
            trainer.strategy.session.close()
            return trainer

        trainers = running.work(*[work] * workers, seconds=120.0)
    return running, sorted(trainers, key=lambda trainer: trainer.strategy.session.worker)


def assert_equal(module: Any, expected: Any) -> None:
    for value, other in zip(module.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize("accumulated", [1, 2])
def test_three_workers_equal_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accumulated: int) -> None:
    """20 batches: two epochs of 120 samples, in batches of 3 × 4 and of 12. One process accumulates alike."""
    options = {"accumulate_grad_batches": accumulated}
    _, trainers = fit_together(monkeypatch, "bsp:weights=mean", 3, lambda: (trainer_of(tmp_path, **options), Circle(4)))
    module, one = Circle(12), trainer_of(tmp_path, strategy="auto", **options)
    one.fit(module)
    assert one.global_step == 20 // accumulated
    for trainer in trainers:
        assert trainer.global_step == one.global_step and trainer.current_epoch == 2
        assert_equal(trainer.lightning_module, module)
    main = trainers[0].lightning_module
    assert main.rates == pytest.approx(module.rates)
    assert main.validated == pytest.approx(module.validated)
    assert [len(each.lightning_module.validated) for each in trainers] == [2, 0, 0]


@pytest.mark.slow
def test_alone_it_is_a_single_device(tmp_path: Path) -> None:
    modules = []
    for strategy in ("auto", "paceline"):
        modules.append(Circle(8))
        options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
        trainer_of(tmp_path, strategy=strategy, **options).fit(modules[-1])
    assert all(torch.equal(a, b) for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True))


@pytest.mark.slow
def test_turns_train_and_the_main_worker_saves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        saving = ModelCheckpoint(monitor="val_loss", dirpath=tmp_path / "saved", filename="{epoch}", save_top_k=-1)
        options = {"callbacks": [saving], "enable_checkpointing": True, "gradient_clip_val": 1.0, "max_epochs": 20}
        return trainer_of(tmp_path, **options, precision="bf16-mixed"), Circle(4)

    running, (main, *others) = fit_together(monkeypatch, "r2sp:patience=10000,weights=mean", 3, make)
    losses = losses_of(running)
    assert sum(losses[-15:]) < 0.85 * sum(losses[:15])
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        f"epoch={n}.ckpt" for n in sorted(range(20), key=str)
    ]
    assert [each.is_global_zero for each in (main, *others)] == [True, False, False]
    assert all(each.test(each.lightning_module) == [] == each.validate() for each in others)
    assert main.test(main.lightning_module, verbose=False)[0]["test_accuracy"] > 0.6
    samples = samples_of(running)
    assert samples.all_done and samples.trained == 2400


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize("validate", ["main", "all"])
def test_early_stopping_ends_all_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, validate: str) -> None:
    """The validation rewards the opposite of what is trained, so it becomes worse at once."""

    def make() -> tuple[Any, Any]:
        stop = EarlyStopping("val_loss", patience=2)
        options = {"callbacks": [stop], "max_epochs": 40}
        return trainer_of(tmp_path, PacelineStrategy(validate=validate), **options), Circle(4, wrong=True)

    running, trainers = fit_together(monkeypatch, "asp:weights=mean", 3, make)
    assert len(trainers[0].lightning_module.validated) < 20
    if validate == "main":
        assert all(each.strategy.epochs.peek() is None for each in trainers[1:])
    assert samples_of(running).trained < 120 * 40
    for other in trainers[1:]:
        assert_equal(other.lightning_module, trainers[0].lightning_module)
        assert bool(other.lightning_module.validated) == (validate == "all")


@pytest.mark.slow
def test_training_continues_from_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(folder: str, epochs: int) -> Callable[[], tuple[Any, Any]]:
        def trainer() -> tuple[Any, Any]:
            saving = ModelCheckpoint(dirpath=tmp_path / folder, filename="{epoch}", save_top_k=-1)
            options = {"callbacks": [saving], "enable_checkpointing": True, "max_epochs": epochs}
            return trainer_of(tmp_path / folder, **options), Circle(4)

        return trainer

    _, (whole, *_) = fit_together(monkeypatch, "bsp:weights=mean", 3, make("whole", 3))
    checkpoint = str(tmp_path / "whole" / "epoch=0.ckpt")
    running, resumed = fit_together(monkeypatch, "bsp:weights=mean", 3, make("again", 3), ckpt_path=checkpoint)
    assert samples_of(running).trained == 240
    for each in resumed:
        assert each.global_step == 30 and each.current_epoch == 3
        assert_equal(each.lightning_module, whole.lightning_module)


@pytest.mark.slow
def test_a_killed_worker_comes_back_and_all_samples_count(tmp_path: Path) -> None:
    """It takes part in the epoch that the job is in, and its learning rate is the job's."""
    options = "{'max_epochs': 40, 'accumulate_grad_batches': 2}"
    with served("bsp:weights=mean", workers=3, lease=600.0) as running, ForkedWorkers("on_lightning.tiny") as workers:

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
    assert samples.all_done and samples.trained == 4000
    assert updates_of(running, 1) > before
    ends = [(tmp_path / f"end-{worker}").read_text().split() for worker in range(3)]
    assert [int(epoch) for epoch, _, _ in ends] == [40] * 3
    assert all(float(rate) < 0.0025 for _, _, rate in ends), "the schedule ends at a tenth of 0.02"


def samples_of(running: Job) -> Any:
    return running.coordinator.state.samples


def losses_of(running: Job) -> list[float]:
    losses = [event.loss for event in running.events if isinstance(event, Arrived)]
    assert None not in losses
    return [loss for loss in losses if loss is not None]


def updates_of(running: Job, worker: int) -> int:
    return sum(isinstance(event, Arrived) and event.worker == worker for event in running.events)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"devices": 2}, "write devices=1, and start a worker for each device"),
        ({"num_nodes": 2}, "leave it out, and start the job with `paceline run`"),
        ({"reload_dataloaders_every_n_epochs": 1}, "leave out reload_dataloaders_every_n_epochs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_a_job_cannot_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setenv(CONNECT, "127.0.0.1:9")
    with pytest.raises(ValueError, match=sentence):
        trainer_of(tmp_path, **options).fit(Circle(4))


def test_several_optimizers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Two(Circle):
        def configure_optimizers(self) -> Any:
            self.automatic_optimization = False
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]

    monkeypatch.setenv(CONNECT, "127.0.0.1:9")
    with pytest.raises(ValueError, match="returns 2 optimizers, and a job has one"):
        trainer_of(tmp_path).fit(Two(4))


def test_a_schedule_that_needs_the_validation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Plateau(Circle):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    with connected(monkeypatch, "bsp", 1) as running:

        def work(_: str) -> None:
            trainer = trainer_of(tmp_path)
            with pytest.raises(ValueError, match="needs its metric in every worker"):
                trainer.fit(Plateau(4))
            trainer.strategy.session.close()

        running.work(work)


def test_manual_optimization(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Manual(Circle):
        def __init__(self, batch: int) -> None:
            super().__init__(batch)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.cross_entropy(self.net(x), y))
            optimizer.step()

    _, trainers = fit_together(monkeypatch, "bsp:weights=mean", 2, lambda: (trainer_of(tmp_path), Manual(6)))
    module = Manual(12)
    trainer_of(tmp_path, strategy="auto").fit(module)
    for trainer in trainers:
        assert trainer.global_step == 20
        assert_equal(trainer.lightning_module, module)


def test_a_job_trains_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with connected(monkeypatch, "bsp", 1) as running:

        def work(_: str) -> None:
            trainer = trainer_of(tmp_path, max_epochs=1)
            trainer.fit(Circle(8))
            with pytest.raises(ValueError, match="a job trains one model once"):
                trainer.fit(Circle(8))
            trainer.strategy.session.close()

        running.work(work)


def test_workers_of_several_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CONNECT, "127.0.0.1:9")
    monkeypatch.setenv("PACELINE_RANKS", "2")
    with pytest.raises(ValueError, match="leave out --ranks-per-worker"):
        trainer_of(tmp_path).fit(Circle(4))
