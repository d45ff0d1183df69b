"""Workers that make rounds of local steps, and checks of what comes out. The tests of rounds share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from paceline.observe.trace import Applied, Event, Left, Pulled
from paceline.train.session import join
from train.jobs import Job, job
from train.lessons import OPTIMIZERS, data, loss_on, model, steps_of, weights
from train.test_incarnations import give_up

H = 3  # local steps


def worker_of(
    batches: list[list[tuple[Any, Any]]], inner: str = "momentum", local_steps: int = H, **options: Any
) -> Callable[[str], Any]:
    """Return a worker that trains on the batches of its number, and returns its weights."""
    mine = model()  # not created in the thread, because all threads share torch's random numbers

    def run(address: str) -> Any:
        optimizer = OPTIMIZERS[inner](mine.parameters())
        with join(mine, optimizer, connect=address, local_steps=local_steps, **options) as session:
            for x, y in batches[session.worker]:
                loss = torch.nn.functional.cross_entropy(mine(x), y)
                loss.backward()
                session.step(loss, batch_size=len(x))
        return weights(mine)

    return run


class Replay:
    """The training that the events of a job describe, made in plain torch: with `weights=mean`, on `batches_of`."""

    def __init__(self, batches: list[list[tuple[Any, Any]]]) -> None:
        self.batches = batches
        self.server = [weights(model())]  # the model's versions
        self.workers = [model() for _ in batches]
        self.optimizers = [OPTIMIZERS["momentum"](worker.parameters()) for worker in self.workers]
        self.begun = [weights(worker) for worker in self.workers]  # the weights from which a push is counted
        self.rounds = [0] * len(batches)
        self.members = len(batches)
        self.counted = [self.members] * self.members  # the members of the round of each worker's last update

    def run(self, events: list[Event]) -> Any:
        """Return the last model."""
        for event in events:
            if isinstance(event, Pulled) and self.rounds[event.worker] * H < len(self.batches[event.worker]):
                self.make_round(event.worker, self.server[event.version])
            elif isinstance(event, Applied):
                newest = self.server[-1].clone()
                for worker in event.workers:
                    self.push(worker, newest, 1 / max(self.members, self.counted[worker]))
                    self.counted[worker] = self.members
                self.server.append(newest)
            elif isinstance(event, Left):
                self.members -= 1
        return self.server[-1]

    def make_round(self, number: int, pulled: Any) -> None:
        worker = self.workers[number]
        torch.nn.utils.vector_to_parameters(self.begin(number, pulled).clone(), worker.parameters())
        first = self.rounds[number] * H
        steps_of(worker, self.optimizers[number], self.batches[number][first : first + H])
        self.rounds[number] += 1

    def begin(self, number: int, pulled: Any) -> Any:
        """Return the weights from which a worker begins its next round, and set those from which its push counts."""
        self.begun[number] = pulled
        return pulled

    def push(self, number: int, server: Any, weight: float) -> None:
        """Add to the server's model what a worker pushes."""
        server += weight * (weights(self.workers[number]) - self.begun[number])


def share_samples(policy: str, codec: str = "", streamed: bool = False, **options: Any) -> Job:
    """Let four workers share a small dataset. All samples are trained on, and all end with the server's model.

    The samples are not a multiple of three batches of four workers, so the last round of a worker may be shorter.
    """
    x, y = data(92)
    dataset = torch.utils.data.TensorDataset(x, y)

    def run(address: str) -> Any:
        mine = model()
        inner = torch.optim.AdamW(mine.parameters(), lr=0.01)
        with join(mine, inner, connect=address, local_steps=H, **options) as session:
            for inputs, targets in session.batches(dataset, batch_size=4, epochs=6):
                loss = torch.nn.functional.cross_entropy(mine(inputs), targets)
                loss.backward()
                session.step(loss)
        return loss_on(mine, x, y)

    with job(policy, shards=2, workers=4, update_codec=codec, streamed=streamed) as running:
        losses = running.work(*[run] * 4)
        running.finish()
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
    share = 1.0 if policy == "safa" else 0.9  # SAFA's server keeps old models of its workers in the mixture
    assert max(losses) == min(losses) < share * loss_on(model(), x, y)
    return running


def train_and_be_given_up(at: int, codec: str = "", **options: Any) -> tuple[Job, list[Any]]:
    """Let the only worker be given up in its step number `at`. Every sample counts once.

    Return the job, and the weights before each step.
    """
    x, y = data(48)
    mine, begins = model(), []
    with job("asp:weights=mean", update_codec=codec) as running:
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        with join(mine, optimizer, connect=running.address, local_steps=H, **options) as session:
            batches = session.batches(torch.utils.data.TensorDataset(x, y), batch_size=4, epochs=2)
            for number, (inputs, targets) in enumerate(batches):
                begins.append(weights(mine))
                torch.nn.functional.cross_entropy(mine(inputs), targets).backward()
                if number == at:
                    give_up(running)
                session.step()
        running.finish()
        samples: Any = running.coordinator.samples
        assert samples.all_done
        assert samples.trained == 2 * 48
    return running, begins
