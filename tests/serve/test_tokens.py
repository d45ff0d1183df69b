"""Each token of a role allows that role at a running server, and no other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from paceline.policies import make
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.environment import address
from paceline.serve.server import Server, ServerError
from paceline.serve.watch import inspect, watch
from paceline.serve.wire import handshake, messages
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import Channel, MessageDecoder, WireError
from paceline.serve.wire.messages import (
    Accepted,
    Challenge,
    Exclusions,
    InspectExclusions,
    Join,
    Refused,
    Register,
    Resume,
    Subscribe,
    TraceEvents,
    Welcome,
)
from paceline.serve.wire.tokens import ROLES, Role, role_of, token_for
from serve.workers import described, work
from train.jobs import Job, job

SECRET = b"the operator's secret"
ANSWERS = MessageDecoder(Challenge | Accepted | Refused | Welcome | TraceEvents | Exclusions)
#: What a peer may send first, and the roles that allow it.
FIRST: list[tuple[Any, tuple[Role, ...]]] = [
    (Join(None), ("", "worker")),
    (Resume(0, 1, b"", ""), ("", "worker")),
    (Subscribe(), ("", "watch")),
    (InspectExclusions(), ("", "watch")),
    (InspectExclusions((3,)), ("",)),
    (InspectExclusions((), True), ("",)),
    (Register(0, 1, b"secret", "another generation"), ("", "shard")),
]
CASES = [(first, role, role in allowed) for first, allowed in FIRST for role in ROLES]


@pytest.fixture(scope="module")
def running() -> Iterator[Job]:
    with job("asp", workers=1000, token=SECRET) as started:
        yield started


def opened(port: int, token: bytes) -> Channel:
    """Connect to a port of the job and shake hands with this token."""
    channel = Channel(socket.create_connection(("127.0.0.1", port), 20.0), ANSWERS)
    channel.limit_silence(20.0)
    try:
        handshake.call(channel, token)
    except BaseException:
        channel.close()
        raise
    return channel


@pytest.mark.parametrize(
    ("first", "role", "allowed"), CASES, ids=[f"{role or 'operator'}-{first}" for first, role, _ in CASES]
)
def test_a_token_allows_its_role_and_nothing_else(running: Job, first: Any, role: Role, allowed: bool) -> None:
    channel = opened(address(running.address)[1], token_for(role, SECRET))
    try:
        channel.send(first, memoryview(described()) if isinstance(first, Join) else None)
        try:
            answer = channel.receive()
        except ConnectionError:
            assert isinstance(first, Resume), "this Resume names no worker, so the server hangs up"
            answer = None
    finally:
        channel.close()
    refused = isinstance(answer, Refused) and "does not allow" in answer.reason
    assert refused is not allowed, answer


@pytest.mark.parametrize("role", ["", "watch"])
def test_a_shard_accepts_only_workers(running: Job, role: Role) -> None:
    _, port = running.coordinator.shards.addresses[0]
    with pytest.raises(WireError, match="may not connect here"):
        opened(port, token_for(role, SECRET))


def test_a_role_cannot_be_claimed_with_the_token_of_another(running: Job) -> None:
    """The Proof names a role, but the server checks the MAC with the token of that role."""
    port = address(running.address)[1]
    channel = Channel(socket.create_connection(("127.0.0.1", port), 20.0), ANSWERS)
    channel.limit_silence(20.0)
    mine = handshake.proof(token_for("worker", SECRET), channel.receive())
    channel.send(messages.Proof(mine.nonce, mine.mac, "watch"))
    answer = channel.receive()
    channel.close()
    assert isinstance(answer, Refused) and "token is wrong" in answer.reason


def test_a_job_whose_peers_have_tokens_of_their_roles() -> None:
    async def first_event(endpoint: Endpoint) -> object:
        async for event in watch(endpoint):
            return event
        return None

    with job("asp", shards=2, workers=2, token=SECRET) as running:
        endpoint = Endpoint(*address(running.address), token=token_for("watch", SECRET))
        assert asyncio.run(first_event(endpoint)) is not None
        assert asyncio.run(inspect(endpoint)).blacklist == ()
        running.work(*[lambda where: work(where, 40, token=token_for("worker", SECRET))] * 2)
        running.finish()
        assert running.coordinator.samples is not None and running.coordinator.samples.all_done


def test_a_token_gives_the_tokens_below_it() -> None:
    tokens = {role: token_for(role, SECRET) for role in ROLES}
    assert len(set(tokens.values())) == 4
    assert {role: role_of(token) for role, token in tokens.items()} == {role: role for role in ROLES}
    below: dict[Role, set[Role]] = {
        "": set(ROLES),
        "shard": {"shard", "worker"},
        "worker": {"worker"},
        "watch": {"watch"},
    }
    for held, token in tokens.items():
        for role in ROLES:
            if role in below.get(held, {held}):
                assert token_for(role, token) == tokens[role]
            else:
                with pytest.raises(ValueError, match=f"only for the role {held}"):
                    token_for(role, token)


def test_only_the_operator_can_pardon() -> None:
    endpoint = Endpoint("127.0.0.1", 1, token_for("watch", SECRET))
    with pytest.raises(ValueError, match="give the job's own token"):
        asyncio.run(inspect(endpoint, everyone=True))


def test_a_server_needs_the_jobs_own_token() -> None:
    with pytest.raises(ServerError, match="only for the role worker: give the job's own token"):
        Server(lambda: make("asp"), ServerConfig(token=token_for("worker", SECRET)))
