"""TCP streams between the servers of a fabric, and the rates that they reach."""

from __future__ import annotations

import socket
import time
from multiprocessing.connection import Connection
from typing import Any

from lab.labs import best
from paceline.lab.fabric import Fabric

RATE = 12.5e6
SIZE = 4_000_000  # bytes of a stream, which takes a third of a second
LEAST = 0.85  # share of the rate that a stream must reach
MOST = 15.0  # seconds that anything may take


def receive(pipe: Connection) -> None:
    """Send the port through the pipe, receive a stream when told to, and send when it began and ended."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        listener.settimeout(MOST)
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
    with peer:
        peer.settimeout(MOST)
        pipe.send("here")
        pipe.recv()
        began, left = time.monotonic(), SIZE
        peer.sendall(b".")
        while left:
            data = peer.recv(min(left, 1 << 16))
            assert data, "the stream ended early"
            left -= len(data)
        pipe.send((began, time.monotonic()))


def send(host: str, port: int) -> None:
    with socket.create_connection((host, port), MOST) as peer:
        peer.recv(1)
        peer.sendall(bytes(SIZE))


def next_from(pipe: Connection) -> Any:
    assert pipe.poll(MOST), "the process sends nothing"
    return pipe.recv()


def streams(fabric: Fabric, *flows: tuple[int, int, int]) -> float:
    """Return the total bytes per second of streams that begin at the same time, until the last one has ended.

    flows: sender, receiver, and port of the receiver.
    """
    pipes, processes = [], []
    for source, target, port in flows:
        ours, theirs = fabric.pipe()
        processes.append(fabric.start(fabric.host(target), receive, theirs))
        listening = next_from(ours)
        processes.append(fabric.start(fabric.host(source), send, fabric.nic_address(target, port), listening))
        assert next_from(ours) == "here"
        pipes.append(ours)
    for pipe in pipes:
        pipe.send("go")
    spans = [next_from(pipe) for pipe in pipes]
    fabric.stop(processes)
    return SIZE * len(flows) / float(max(ended for _, ended in spans) - min(began for began, _ in spans))


def share(fabric: Fabric, nics: float, *flows: tuple[int, int, int]) -> float:
    """Return the share of the rate of `nics` NICs that the streams reach. Check that they never exceed it."""
    return best(lambda: streams(fabric, *flows) / (nics * RATE), LEAST, most=1.05)


def sent_by_nic(fabric: Fabric, *flows: tuple[int, int, int]) -> dict[tuple[int, int], float]:
    """Return the bytes that each NIC has sent, in units of one stream. NICs that have sent none are left out."""
    before = fabric.carried_by_nic()
    streams(fabric, *flows)
    after = fabric.carried_by_nic()
    times = {nic: round((after[nic][0] - before[nic][0]) / SIZE, 1) for nic in before}
    return {nic: count for nic, count in times.items() if count}
