"""The serving side of each transport, as a process: `python -m benchmarks.transports.peers TRANSPORT ELEMENTS [PORT]`.

A peer prints the port it listens at, if it chooses one, and ends when its standard input does or its caller hangs up.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import sys
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from benchmarks.transports.load import ServedModel, as_bytes
from paceline.policies import make
from paceline.serve.coordinator import event_loop
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.server import Server
from paceline.serve.wire.frames import CHUNK

PATIENCE = timedelta(seconds=60)


def tcp(elements: int, _port: int) -> None:
    """Send back what was received. Nothing else."""
    place = as_bytes(torch.zeros(elements))
    with _caller() as sock:
        while fill(sock, place):
            sock.sendall(place)


def tcp_with_apply(elements: int, _port: int) -> None:
    """Receive all of it, make the step, send all of it."""
    model = ServedModel(elements)
    place, weights = as_bytes(model.gradient), as_bytes(model.weights)
    with _caller() as sock:
        while fill(sock, place):
            model.step(model.gradient)
            sock.sendall(weights)


def paceline(_elements: int, _port: int) -> None:
    """The real coordinator, here, and a real shard in a process of its own."""

    async def serve() -> None:
        async with Server(lambda: make("asp"), ServerConfig()) as server:
            _say(server.port)
            await asyncio.to_thread(sys.stdin.read)

    event_loop.run(serve())


def gloo(elements: int, port: int) -> None:
    """torch.distributed's send and recv."""
    dist: Any = importlib.import_module("torch.distributed")  # not all of it has types
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=PATIENCE)
    model = ServedModel(elements)
    with contextlib.suppress(RuntimeError):  # the caller has hung up
        while True:
            dist.recv(model.gradient, 0)
            model.step(model.gradient)
            dist.send(model.weights, 0)


def pyzmq(elements: int, _port: int) -> None:
    """A ZeroMQ pair that does not copy where it can help it."""
    import zmq

    model = ServedModel(elements)
    with zmq.Context() as context, context.socket(zmq.PAIR) as sock:
        sock.linger = 0
        _say(sock.bind_to_random_port("tcp://127.0.0.1"))
        wait = zmq.Poller()
        wait.register(sock, zmq.POLLIN)
        wait.register(sys.stdin, zmq.POLLIN)
        while sys.stdin.fileno() not in dict(wait.poll()):
            frame = sock.recv(copy=False)
            model.step(torch.frombuffer(frame.buffer, dtype=torch.float32))
            sock.send(as_bytes(model.weights), copy=False)


def torch_rpc(_elements: int, port: int) -> None:
    """torch.distributed.rpc: a call with the gradient as its argument, and the weights as its result."""
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc("server", rank=1, world_size=2, rpc_backend_options=options)
    rpc.shutdown()  # waits until the caller shuts down too


def called(gradient: torch.Tensor) -> torch.Tensor:
    """What torch RPC calls."""
    model = _model(gradient.numel())
    model.step(gradient)
    return model.weights


@cache
def _model(elements: int) -> ServedModel:
    return ServedModel(elements)


PEERS = {peer.__name__: peer for peer in (tcp, tcp_with_apply, paceline, gloo, pyzmq, torch_rpc)}


def fill(sock: socket.socket, place: memoryview) -> bool:
    """Receive until the place is full; False when the other side has hung up."""
    while len(place):
        count = sock.recv_into(place, min(len(place), CHUNK))
        if count == 0:
            return False
        place = place[count:]
    return True


def _caller() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _say(listener.getsockname()[1])
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _say(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


def main() -> None:
    name, elements, *port = sys.argv[1:]
    with contextlib.suppress(ConnectionError, KeyboardInterrupt):
        PEERS[name](int(elements), int(port[0]) if port else 0)


if __name__ == "__main__":
    main()
