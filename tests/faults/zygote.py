"""A warm process that has imported torch and paceline, has made an optimizer step, and has one thread.

It forks a director for every scenario that arrives over its socket, so that no test waits for an import.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import msgspec
import torch

from faults.director import Director, die_with_parent
from faults.scenario import Scenario
from paceline import policies
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice


def warm() -> None:
    """Do everything that is slow the first time."""
    torch.set_num_threads(1)
    part = Slice(Layout((Tensor("w", (2,)),)), 0, 2, OptimizerSpec("SGD", ({"lr": 1.0},)))
    part.step([torch.zeros(2)], [1.0], [1.0])
    for name in policies.names():
        policies.policy_class(name)


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent()
    warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps directors that end
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            listener.close()
            _direct(client)
            os._exit(0)
        client.close()


def _direct(client: socket.socket) -> None:
    """Run the scenario that the client sends, and answer with its outcome."""
    with client.makefile("rwb") as stream:
        scenario = msgspec.json.decode(stream.readline(), type=Scenario)
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            outcome = Director(scenario, Path(folder)).run()
        stream.write(msgspec.json.encode(outcome) + b"\n")


if __name__ == "__main__":
    main()
