"""A federation on real links: the time of its clients' pulls, and its recovery when a client and the server are killed.

    sudo python benchmarks/federation_lab.py [--rounds 12] 2> log

24 client processes, each on a host with a 50 Mbit/s link, share a server with 400 Mbit/s; the model has 1 MB. Clients
really train, and then sleep for as long as a device of their own would take, because two cores are not 24 devices.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from paceline.federated.client import FederatedClient, plain_sgd
from paceline.federated.client_data import ClientData, share_of, tested
from paceline.federated.partition import Skew
from paceline.lab.host_process import Command
from paceline.lab.namespaces import Lab
from paceline.lab.shaping import SPARSE
from paceline.model import checkpoint
from paceline.serve.wire.frames import Channel
from paceline.serve.wire.messages import Push

CLIENTS, GROUPS = 24, 4
CLIENT_RATE, SERVER_RATE = 50e6 / 8, 400e6 / 8  # bytes per second
UNITS = 3500  # in the hidden layer, for a model of 1.05 MB
COMPUTE = 2.0  # seconds of a round on a device, without a log-normal delay (as in the paper: μ = -2, σ = 1)
STEPS = 4
BSP, FL = "bsp:fraction=0.75,weights=mean", f"fl-r2sp:groups={GROUPS}"
VICTIM, DIES_IN = 5, 4  # the client that is killed, and the round whose update it then pushes
PATIENCE = 300.0  # seconds before a run is given up


class SlowData:
    """A client's data, read as slowly as a device would compute."""

    def __init__(self, share: ClientData, seed: int) -> None:
        self.dataset, self._share, self._chance = share.dataset, share, random.Random(seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self._share:
            time.sleep((COMPUTE + self._chance.lognormvariate(-2, 1)) / STEPS)
            yield batch


def take_part(pipe: Any, address: str, token: bytes, number: int, rounds: int) -> None:
    """Run a client in its own process. It reports each round; the victim also reports the start of its last push."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    share = share_of(number, CLIENTS, "digits", None, Skew(0.0), 0, 16, 0)
    layers = (torch.nn.Flatten(), torch.nn.Linear(64, UNITS), torch.nn.ReLU(), torch.nn.Linear(UNITS, 10))
    model = torch.nn.Sequential(*layers)
    client = FederatedClient(
        model,
        SlowData(share, number),
        connect=address,
        steps=STEPS,
        optimizer=plain_sgd(0.05),
        client=number,
        token=token,
        progress=lambda done, loss: pipe.send((done, client.pull_seconds, loss)),
    )
    send: Callable[..., None] = Channel.send

    def send_and_report(channel: Channel, message: Any, *payload: Any) -> None:
        if isinstance(message, Push) and client.rounds == DIES_IN - 1:
            pipe.send("pushing")
        send(channel, message, *payload)

    if number == VICTIM:
        Channel.send = send_and_report  # type: ignore[method-assign, assignment]
    client.run(rounds)
    pipe.send(tested(model, share.data))


@dataclass
class Federation:
    """A server and its clients in a lab, and what the clients have reported."""

    lab: Lab
    folder: Path
    policy: str
    rounds: int
    pulls: dict[int, list[float]] = field(default_factory=dict)  # seconds, by client
    accuracy: dict[int, float] = field(default_factory=dict)
    pushing: bool = False  # whether the victim has begun its last push

    def __post_init__(self) -> None:
        self._secret = secrets.token_hex(16)
        (self.folder / "token").write_text(self._secret)
        (self.folder / "token").chmod(0o600)
        self.server = self._serve("--checkpoint")
        self.clients, self._pipes = {}, {}
        for number in range(CLIENTS):
            ours, theirs = self.lab.pipe()
            where = f"{self.lab.address('server')}:{SPARSE}"
            what = (theirs, where, self._secret.encode(), number, self.rounds)
            self.clients[number] = self.lab.start(f"client{number}", take_part, *what)
            self._pipes[number] = ours
            self.pulls[number] = []
            theirs.close()

    def _serve(self, kept: str) -> Command:
        """Start the server. It checkpoints every version, and its lease is five seconds."""
        command = [sys.executable, "-m", "paceline", "federate", "serve", "-p", self.policy]
        where = [
            "--host",
            self.lab.address("server"),
            "--port",
            str(SPARSE),
            "--token-file",
            str(self.folder / "token"),
            "--insecure",  # the lab's links are private to it
        ]
        how = ["--clients", str(CLIENTS), "--lease", "5", "--checkpoint-every", "1", kept, str(self.folder / "kept")]
        return self.lab.spawn("server", [*command, *where, *how], os.environ)

    @property
    def version(self) -> int:
        """The newest version that has a checkpoint."""
        kept = self.folder / "kept"
        found = checkpoint.newest(kept) if kept.is_dir() else None
        return found.version if found else 0

    def restart(self) -> int:
        """Kill the server and start it again. Return the version that it resumes from."""
        self.server.kill()
        self.server.join()
        resumed_from = self.version
        self.server = self._serve("--resume")
        return resumed_from

    def listen(self, until: Callable[[], bool] = lambda: False) -> None:
        """Receive the clients' reports until a condition holds or all clients have ended."""
        end = time.monotonic() + PATIENCE
        while self._pipes and not until():
            if time.monotonic() > end:
                raise TimeoutError(f"The clients did not finish within {PATIENCE:.0f} s.")
            for number, pipe in list(self._pipes.items()):
                try:
                    while pipe.poll(0.002):
                        self._record(number, pipe.recv())
                except (EOFError, OSError):
                    del self._pipes[number]

    def _record(self, number: int, report: Any) -> None:
        if report == "pushing":
            self.pushing = True
        elif isinstance(report, tuple):
            self.pulls[number].append(report[1])
        else:
            self.accuracy[number] = report

    def settled(self) -> list[float]:
        """Return the seconds of all pulls, without the first two rounds, in which all clients pull at once."""
        return [seconds for pulls in self.pulls.values() for seconds in pulls[2:]]


def without_faults(lab: Lab, policy: str, rounds: int) -> Federation:
    """Run a federation without faults."""
    with tempfile.TemporaryDirectory() as folder:
        run = Federation(lab, Path(folder), policy, rounds)
        run.listen()
        run.server.join(30)
    return run


def with_faults(lab: Lab, policy: str, rounds: int) -> None:
    """Run a federation in which a client is killed during a push, and the server during a round."""
    with tempfile.TemporaryDirectory() as folder:
        run = Federation(lab, Path(folder), policy, rounds)
        run.listen(lambda: run.pushing)
        time.sleep(0.08)  # half of the 0.17 s that a push takes
        lab.cut(f"client{VICTIM}")  # first, or the kernel would send the rest of the push
        run.clients[VICTIM].kill()
        at_death = run.version
        print(f"  client {VICTIM} killed during the push of its round {DIES_IN}; the model was at version {at_death}")
        run.listen(lambda: min(len(pulls) for number, pulls in run.pulls.items() if number != VICTIM) >= rounds // 2)
        before = run.version
        resumed_from = run.restart()
        print(f"  server killed at version {before}, resumed from version {resumed_from}")
        run.listen()
        run.server.join(30)
        others = [number for number in range(CLIENTS) if number != VICTIM]
        done = [len(run.pulls[number]) for number in others]
        print(
            f"  {sum(each == rounds for each in done)} of {len(others)} other clients did all of their {rounds} rounds"
        )
        print(f"  the model reached version {run.version} and {100 * mean(run.accuracy.values()):.1f}% on the test set")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    rates = {"server": SERVER_RATE} | {f"client{number}": CLIENT_RATE for number in range(CLIENTS)}
    with Lab(rates) as lab:
        alone = (64 * UNITS + UNITS + 10 * UNITS + 10) * 4 / CLIENT_RATE
        print(f"a pull of one client alone takes {alone:.3f} s")
        means = {}
        for policy in (BSP, FL):
            run = without_faults(lab, policy, rounds)
            pulls = sorted(run.settled())
            means[policy] = mean(pulls)
            percentile_90 = pulls[9 * len(pulls) // 10]
            accuracy = 100 * mean(run.accuracy.values())
            print(
                f"{policy}: a pull takes {means[policy]:.3f} s on average, {percentile_90:.3f} s at the 90th percentile"
            )
            print(f"  {len(pulls)} pulls; {accuracy:.1f}% on the test set")
        print(f"FL-R²SP's pulls take {means[FL] / means[BSP]:.2f} of BSP's (target ≤ 0.5)")
        print("FL-R²SP with faults:")
        with_faults(lab, FL, rounds)


if __name__ == "__main__":
    main()
