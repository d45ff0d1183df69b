"""The server side of each transport, as a process: `python -m benchmarks.transports.peers TRANSPORT ELEMENTS [PORT]`.

A peer prints its port, if it chooses one. It ends when its standard input is closed or its client disconnects.
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
    """Send the received bytes back."""
    buffer = as_bytes(torch.zeros(elements))
    with _accept() as sock:
        while fill(sock, buffer):
            sock.sendall(buffer)


def tcp_with_apply(elements: int, _port: int) -> None:
    """Receive the whole gradient, make the step, and send all weights."""
    model = ServedModel(elements)
    buffer, weights = as_bytes(model.gradient), as_bytes(model.weights)
    with _accept() as sock:
        while fill(sock, buffer):
            model.step(model.gradient)
            sock.sendall(weights)


def paceline(_elements: int, _port: int) -> None:
    """Run a real coordinator in this process, and a real shard in another."""

    async def serve() -> None:
        async with Server(lambda: make("asp"), ServerConfig()) as server:
            _print_port(server.port)
            await asyncio.to_thread(sys.stdin.read)

    event_loop.run(serve())


def gloo(elements: int, port: int) -> None:
    """Serve with send and recv of torch.distributed."""
    dist: Any = importlib.import_module("torch.distributed")  # imported dynamically, because it is not fully typed
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=PATIENCE)
    model = ServedModel(elements)
    with contextlib.suppress(RuntimeError):  # raised when the client disconnects
        while True:
            dist.recv(model.gradient, 0)
            model.step(model.gradient)
            dist.send(model.weights, 0)


def pyzmq(elements: int, _port: int) -> None:
    """Serve with a ZeroMQ pair, without copies where possible."""
    import zmq

    model = ServedModel(elements)
    with zmq.Context() as context, context.socket(zmq.PAIR) as sock:
        sock.linger = 0
        _print_port(sock.bind_to_random_port("tcp://127.0.0.1"))
        wait = zmq.Poller()
        wait.register(sock, zmq.POLLIN)
        wait.register(sys.stdin, zmq.POLLIN)
        while sys.stdin.fileno() not in dict(wait.poll()):
            frame = sock.recv(copy=False)
            model.step(torch.frombuffer(frame.buffer, dtype=torch.float32))
            sock.send(as_bytes(model.weights), copy=False)


def torch_rpc(_elements: int, port: int) -> None:
    """Serve torch.distributed.rpc calls, with the gradient as argument and the weights as result."""
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc("server", rank=1, world_size=2, rpc_backend_options=options)
    rpc.shutdown()  # waits until the client shuts down


def rpc_exchange(gradient: torch.Tensor) -> torch.Tensor:
    """Apply a gradient and return the weights: the function that torch RPC calls."""
    model = _model(gradient.numel())
    model.step(gradient)
    return model.weights


@cache
def _model(elements: int) -> ServedModel:
    return ServedModel(elements)


PEERS = {peer.__name__: peer for peer in (tcp, tcp_with_apply, paceline, gloo, pyzmq, torch_rpc)}


def fill(sock: socket.socket, buffer: memoryview) -> bool:
    """Receive bytes until the buffer is full. Return False if the other side closed the connection."""
    while len(buffer):
        count = sock.recv_into(buffer, min(len(buffer), CHUNK))
        if count == 0:
            return False
        buffer = buffer[count:]
    return True


def _accept() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _print_port(listener.getsockname()[1])
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _print_port(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


def main() -> None:
    name, elements, *port = sys.argv[1:]
    with contextlib.suppress(ConnectionError, KeyboardInterrupt):
        PEERS[name](int(elements), int(port[0]) if port else 0)


if __name__ == "__main__":
    main()
