"""What a shard sends to a worker from several threads: at once if the kernel takes it, and otherwise in a queue."""

from __future__ import annotations

import socket
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.serve.shard.worker_connection import FROM_WORKER, WorkerConnection
from paceline.serve.wire.frames import Channel, ConnectionClosed, MessageDecoder
from paceline.serve.wire.messages import Hello, Pull, UpdatedPiece

ELEMENTS, THREADS, PIECES = 1 << 15, 3, 40


class Served:
    """A shard's connection to a worker, in a thread of its own, and the worker's end of it."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            caller = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
        self.worker = Channel(caller, MessageDecoder(UpdatedPiece))
        self.channel = Channel(ours, FROM_WORKER)
        slices = [SimpleNamespace(weights=torch.zeros(ELEMENTS), trained_elements=ELEMENTS)]
        updates = SimpleNamespace(
            store=SimpleNamespace(slices=slices), full_duplex=True, connected=lambda *_: None, pull=self._began
        )
        shard = SimpleNamespace(await_setup=lambda: updates, relay_of=lambda _: None, push_admission=None)
        self.connection = WorkerConnection(cast(Any, shard), self.channel, Hello(0, 1, b""), 0)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _began(self, *_: Any) -> None:
        self._ready.set()

    def begin(self) -> None:
        """Wait until the connection answers messages."""
        self.worker.send(Pull(0))
        assert self._ready.wait(10)

    def _run(self) -> None:
        with pytest.raises(ConnectionClosed):
            self.connection.run()

    def end(self) -> None:
        """Let the worker end its side of the connection, and wait until the shard has noticed."""
        self.worker.finish()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def served() -> Any:
    served = Served()
    served.begin()
    yield served
    served.end()
    served.worker.close()
    served.channel.close()


def test_frames_of_several_threads_arrive_whole_and_in_order_though_the_worker_reads_late(served: Served) -> None:
    sent: list[tuple[int, int]] = []

    def send(thread: int) -> None:
        for piece in range(PIECES):
            body = torch.full((ELEMENTS,), float(PIECES * thread + piece))
            served.connection.send(UpdatedPiece(thread, piece), body, partial(sent.append, (thread, piece)))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)  # nobody waits for the worker, which has read nothing so far
        assert not thread.is_alive()
    assert len(sent) < THREADS * PIECES, "the kernel has taken everything, so nothing was queued"
    received: dict[int, list[int]] = {number: [] for number in range(THREADS)}
    buffer = torch.empty(ELEMENTS)
    for _ in range(THREADS * PIECES):
        message = served.worker.receive(lambda _message, _size: buffer.numpy().data.cast("B"))
        received[message.iteration].append(message.piece)
        assert bool((buffer == PIECES * message.iteration + message.piece).all())
    assert all(pieces == list(range(PIECES)) for pieces in received.values())
    served.end()
    assert sorted(sent) == [(thread, piece) for thread in range(THREADS) for piece in range(PIECES)]


def test_a_frame_that_the_kernel_takes_at_once_wakes_no_other_thread(served: Served) -> None:
    sent_by: list[int] = []
    served.connection.send(UpdatedPiece(1, 0), torch.zeros(8), lambda: sent_by.append(threading.get_ident()))
    assert sent_by == [threading.get_ident()]


def test_nothing_is_sent_after_the_connection_has_ended(served: Served) -> None:
    """The listener sends the reason then, and no other frame may come in between."""
    served.end()
    served.connection.send(UpdatedPiece(1, 0), torch.zeros(8))
    served.channel.finish()
    with pytest.raises(ConnectionClosed, match="has closed"):
        served.worker.receive(lambda _message, size: memoryview(bytearray(size)))
