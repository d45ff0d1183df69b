"""Arbitrary input raises only documented errors, and allocates little memory. Seeded, and bounded in time.

Each fuzzer runs in a forked child with a memory limit. A decoder that trusted a length of 2^40 would exceed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import struct
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

import msgspec
import numpy as np

from paceline.model import checkpoint
from paceline.model.checkpoint import CheckpointError
from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.serve.coordinator.listener import FROM_ANY_PEER
from paceline.serve.shard import coordinator_session, recording, worker_connection
from paceline.serve.wire import handshake, messages
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.frames import MAGIC, PREFIX, VERSION, Channel, ConnectionClosed, MessageDecoder, WireError
from paceline.serve.wire.messages import Challenge
from paceline.serve.worker import control, transfers

SECONDS = 1.5  # for each of the fuzzers
MAX_ALLOCATED = 64 << 20  # bytes; far more than any decoder needs
DECODERS = (
    FROM_ANY_PEER,
    control.FROM_COORDINATOR,
    transfers.FROM_SHARD,
    coordinator_session.FROM_COORDINATOR,
    worker_connection.FROM_WORKER,
)
DESCRIPTION = Description(
    Layout((Tensor("w", (3, 2)), Tensor("v", (2,), "float16"))), OptimizerSpec("SGD", ({"lr": 0.1},))
).as_json()


def values(chance: random.Random, depth: int = 0) -> Any:
    """Return any value that MessagePack and JSON can represent, often an absurd number."""
    kinds: list[Callable[[], Any]] = [
        lambda: chance.choice([0, 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63), chance.getrandbits(60)]),
        lambda: chance.choice([0.0, -1.5, float("inf"), float("nan"), 1e308]),
        lambda: None,
        lambda: chance.choice([True, False]),
        lambda: chance.choice(["", "float32", "Push", "w", "x" * 200, "\x00", "SGD"]),
    ]
    if depth < 4:
        kinds += [
            lambda: [values(chance, depth + 1) for _ in range(chance.randrange(4))],
            lambda: {str(values(chance, 9)): values(chance, depth + 1) for _ in range(chance.randrange(3))},
        ]
    return chance.choice(kinds)()


def heads(chance: random.Random) -> bytes:
    """Return a head: a message with arbitrary fields, an arbitrary value or random bytes; sometimes mutated."""
    kinds = [kind for decoder in DECODERS for kind in get_args(decoder.taken)]
    kind = chance.choice(kinds)
    wanted = len(kind.__struct_fields__) + chance.choice((-1, 0, 0, 0, 1))
    fields = [values(chance) for _ in range(max(0, wanted))]
    made = chance.choice(
        (
            lambda: msgspec.msgpack.encode([kind.__name__, *fields]),
            lambda: msgspec.msgpack.encode(values(chance)),
            lambda: chance.randbytes(chance.randrange(60)),
            lambda: b"\x91" * chance.randrange(3000),
        )
    )()
    return mutated(chance, made) if chance.random() < 0.3 else made


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Return the data with a few bytes changed, inserted or removed."""
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(4):
            case 0 if at < len(changed):
                changed[at] = chance.randrange(256)
            case 1:
                changed[at:at] = chance.randbytes(chance.randrange(1, 5))
            case 2:
                del changed[at : at + chance.randrange(1, 9)]
            case _:
                changed[at:at] = changed[: chance.randrange(1, 20)]
    return bytes(changed)


def frames(chance: random.Random) -> bytes:
    """Return a frame. Its lengths may be wrong."""
    head = heads(chance)
    body = chance.randbytes(chance.choice((0, 0, 1, 24, 100)))
    lengths = [0, len(body), 2**40, 2**63, 2**64 - 1, 16 << 20]
    size = len(body) if chance.random() < 0.6 else chance.choice(lengths)
    frame = PREFIX.pack(MAGIC, VERSION, len(head) & 0xFFFF, size) + head + body
    return mutated(chance, frame) if chance.random() < 0.3 else frame


def for_a_while(seed: int) -> Iterator[random.Random]:
    """Yield generators with one seed after another, for a fixed time. The seeds are the same in every run."""
    end = time.monotonic() + SECONDS
    number = 0
    while time.monotonic() < end or number < 200:
        yield random.Random(seed * 1_000_003 + number)
        number += 1


def fuzz_decoders(_folder: Path) -> None:
    for chance in for_a_while(1):
        data = heads(chance)
        for decoder in (*DECODERS, recording.FRAMES):
            with contextlib.suppress(WireError):
                assert isinstance(decoder.head(data), messages.Message)


def fuzz_channel(_folder: Path) -> None:
    for chance in for_a_while(2):
        ours, theirs = _tcp()
        theirs.sendall(b"".join(frames(chance) for _ in range(chance.randrange(1, 4))))
        theirs.close()
        channel = Channel(ours, chance.choice(DECODERS))
        into = chance.choice((None, lambda _message, _size: memoryview(bytearray(24))))
        try:
            while True:
                channel.receive(into)
        except (WireError, ConnectionClosed):
            pass
        channel.close()


def fuzz_async_channel(_folder: Path) -> None:
    async def fuzz() -> None:
        for chance in for_a_while(3):
            ours, theirs = _tcp()
            theirs.sendall(b"".join(frames(chance) for _ in range(chance.randrange(1, 4))))
            theirs.close()
            reader, writer = await asyncio.open_connection(sock=ours)
            peer = AsyncChannel(reader, writer, FROM_ANY_PEER)
            peer.max_body = chance.choice((0, 1000))
            try:
                while True:
                    await peer.receive()
                    assert len(peer.body) <= peer.max_body
            except (WireError, asyncio.IncompleteReadError):
                pass
            peer.close()

    asyncio.run(fuzz())


def fuzz_handshake(_folder: Path) -> None:
    decoder = MessageDecoder(messages.Proof | messages.Join)
    for chance in for_a_while(4):
        challenge = Challenge(chance.randbytes(32), "generation")
        good = handshake.proof(b"secret", challenge)
        data = mutated(chance, msgspec.msgpack.encode(good)) if chance.random() < 0.7 else heads(chance)
        try:
            answer = decoder.head(data)
        except WireError:
            continue
        if answer != good:
            assert isinstance(handshake.check_proof(b"secret", challenge, answer), messages.Refused)


def fuzz_description(_folder: Path) -> None:
    for chance in for_a_while(5):
        if chance.random() < 0.5:
            data = mutated(chance, DESCRIPTION)
        else:
            known = json.loads(DESCRIPTION)
            place: Any = known
            for _ in range(chance.randrange(5)):  # descend to a random place
                keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                inner = [key for key in keys if isinstance(place[key], dict | list)]
                if not inner:
                    break
                place = place[chance.choice(inner)]
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if keys:
                place[chance.choice(keys)] = values(chance)
            data = json.dumps(known).encode()
        try:
            described = Description.from_json(data)
            described.deal(2)
            assert Description.from_json(described.as_json()) == described
        except ValueError:
            pass


def fuzz_checkpoint(folder: Path) -> None:
    job: dict[str, Any] = {
        "format": checkpoint.WITHOUT_DIGESTS,  # a digest would reject every change at once
        "version": 3,
        "shards": 1,
        "description": json.loads(DESCRIPTION),
    }
    whole = folder / "version-000000003"
    whole.mkdir()
    tensors = {"0/weights": np.zeros(8, dtype=np.float32)}
    checkpoint.save_shard(whole, 0, tensors, {"pieces": [{"start": 0, "stop": 8}]})
    (whole / "job.json").write_text(json.dumps(job))
    assert len(checkpoint.weights(checkpoint.read(folder))) == 2
    good = (whole / "shard-0.safetensors").read_bytes()
    for chance in for_a_while(6):
        described = dict(job)
        if chance.random() < 0.5:
            described[chance.choice(list(job))] = values(chance)
        text = json.dumps(described).encode()
        (whole / "job.json").write_bytes(mutated(chance, text) if chance.random() < 0.5 else text)
        data = mutated(chance, good) if chance.random() < 0.7 else struct.pack("<Q", chance.getrandbits(63)) + good[8:]
        (whole / "shard-0.safetensors").write_bytes(data)
        with contextlib.suppress(CheckpointError):
            checkpoint.weights(checkpoint.read(folder))


def _tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    return ours, theirs


def _too_long(*_: object) -> None:
    raise AssertionError("the fuzzer did not end in time")


FUZZERS = [fuzz_decoders, fuzz_channel, fuzz_async_channel, fuzz_handshake, fuzz_description, fuzz_checkpoint]


@pytest.mark.parametrize("fuzz", FUZZERS, ids=lambda fuzz: fuzz.__name__)
def test_arbitrary_input_raises_only_documented_errors(fuzz: Callable[[Path], None], tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    log = log_file.open("w")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
            signal.signal(signal.SIGALRM, _too_long)
            signal.alarm(60)
            tracemalloc.start()
            fuzz(tmp_path)
            peak = tracemalloc.get_traced_memory()[1]
            assert peak < MAX_ALLOCATED, f"{peak} bytes were allocated"
            code = 0
        except BaseException:
            traceback.print_exc(file=log)
        finally:
            log.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    log.close()
    assert status == 0, f"status {status}: {log_file.read_text()}"
