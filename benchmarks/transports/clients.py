"""The client side of each transport: `exchange` pushes the gradient and receives the new weights.

An exchange ends when the weights are in a given buffer, as they must be in a model. So a transport that returns its own
memory pays for the copy.
"""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch

from benchmarks import environment
from benchmarks.transports.load import RATE, Buffers, ServedModel, as_bytes, description
from benchmarks.transports.peers import fill, rpc_exchange
from paceline.serve.worker.client import Client

STOPPING = 10.0  # seconds before a serving process that does not end is killed
PATIENCE = timedelta(seconds=60)


class Transport(Protocol):
    """A connection to a serving process."""

    def exchange(self) -> None: ...

    def close(self) -> None: ...


class _Peer:
    """A serving process. It ends when its standard input is closed."""

    def __init__(self, name: str, elements: int, port: int | None = None) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.transports.peers", name, str(elements)]
        if port is not None:
            command.append(str(port))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())

    def port(self) -> int:
        """Wait for the port that the process prints, and return it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConnectionError("The serving process did not start.")
        return int(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Tcp:
    """A bare socket."""

    def __init__(self, name: str, buffers: Buffers) -> None:
        self._gradient, self._weights = as_bytes(buffers.gradient), as_bytes(buffers.weights)
        self._peer = _Peer(name, buffers.gradient.numel())
        self._socket = socket.create_connection(("127.0.0.1", self._peer.port()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self) -> None:
        self._socket.sendall(self._gradient)
        if not fill(self._socket, self._weights):
            raise ConnectionError("The serving process closed the connection.")

    def close(self) -> None:
        self._socket.close()
        self._peer.close()


class Paceline:
    """A real worker's client, with a real coordinator and a real shard under asp."""

    def __init__(self, buffers: Buffers) -> None:
        self._gradient, self._weights = as_bytes(buffers.gradient), as_bytes(buffers.weights)
        elements = buffers.gradient.numel()
        self._peer = _Peer("paceline", elements)
        self._client = Client(("127.0.0.1", self._peer.port()), description(elements).as_json())
        buffers.weights.zero_()
        self._client.begin(self._weights)

    def exchange(self) -> None:
        self._client.exchange(
            self._gradient,
            self._weights,
            batch_size=1,
            compute_seconds=0.0,
            rates=(RATE,),
        )

    def close(self) -> None:
        self._client.close()
        self._peer.close()


class Gloo:
    """send and recv of torch.distributed with gloo."""

    def __init__(self, buffers: Buffers) -> None:
        dist: Any = importlib.import_module("torch.distributed")  # imported dynamically, because it is not fully typed
        self._buffers, self._dist = buffers, dist
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        self._peer = _Peer("gloo", buffers.gradient.numel(), store.port)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=PATIENCE)

    def exchange(self) -> None:
        self._dist.send(self._buffers.gradient, 1)
        self._dist.recv(self._buffers.weights, 1)

    def close(self) -> None:
        self._dist.destroy_process_group()
        self._peer.close()


class Zmq:
    """A ZeroMQ pair."""

    def __init__(self, buffers: Buffers) -> None:
        import zmq

        self._buffers = buffers
        self._peer = _Peer("pyzmq", buffers.gradient.numel())
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.connect(f"tcp://127.0.0.1:{self._peer.port()}")

    def exchange(self) -> None:
        self._socket.send(as_bytes(self._buffers.gradient), copy=False)
        frame = self._socket.recv(copy=False)
        self._buffers.weights.copy_(torch.frombuffer(frame.buffer, dtype=torch.float32))

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._peer.close()


class Ray:
    """A call of a Ray actor's method."""

    def __init__(self, buffers: Buffers) -> None:
        import ray

        self._buffers, self._ray = buffers, ray
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self._actor: Any = ray.remote(_Actor).remote(buffers.gradient.numel())

    def exchange(self) -> None:
        answer = self._ray.get(self._actor.call.remote(self._buffers.gradient.numpy()))
        self._buffers.weights.numpy()[:] = answer

    def close(self) -> None:
        self._ray.shutdown()


class _Actor:
    def __init__(self, elements: int) -> None:
        self._model = ServedModel(elements)

    def call(self, gradient: Any) -> Any:
        self._model.step(torch.frombuffer(gradient, dtype=torch.float32))
        return self._model.weights.numpy()


class TorchRpc:
    """A call over torch.distributed.rpc."""

    def __init__(self, buffers: Buffers) -> None:
        rpc: Any = importlib.import_module("torch.distributed.rpc")
        self._buffers, self._rpc = buffers, rpc
        port = _free_port()
        self._peer = _Peer("torch_rpc", buffers.gradient.numel(), port)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        rpc.init_rpc("worker", rank=0, world_size=2, rpc_backend_options=options)

    def exchange(self) -> None:
        self._buffers.weights.copy_(self._rpc.rpc_sync("server", rpc_exchange, (self._buffers.gradient,)))

    def close(self) -> None:
        self._rpc.shutdown()
        self._peer.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


#: Opens each transport.
OPEN: dict[str, Any] = {
    "tcp": partial(Tcp, "tcp"),
    "tcp_with_apply": partial(Tcp, "tcp_with_apply"),
    "paceline": Paceline,
    "gloo": Gloo,
    "pyzmq": Zmq,
    "ray": Ray,
    "torch_rpc": TorchRpc,
}
