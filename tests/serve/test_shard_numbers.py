"""The numbers that the coordinator gives to shards that take any."""

from __future__ import annotations

import pytest

from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.coordinator.shard_connections import RETURN_SECONDS, ShardConnections
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import ANY_NUMBER, Register


def register(secret: bytes, shard: int = ANY_NUMBER) -> Register:
    return Register(shard, 1, secret, "generation")


def test_a_shard_gets_its_own_number_or_one_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("paceline.serve.coordinator.shard_session.time.monotonic", lambda: now)
    known = ShardConnections(ServerConfig(shards=2), "generation", lambda: None, lambda _: None, lambda _: None)
    assert known._free_number(register(b"a")) == 0
    known._shards[1].enter(register(b"b", 1), "")
    assert known._free_number(register(b"b")) == 1, "its answer was lost, so it asks again"
    assert known._free_number(register(b"a")) == 0
    known._shards[0].enter(register(b"a", 0), "")
    for replicas in known._shards:
        replicas.sessions[0]._lost_at = now
    with pytest.raises(WireError, match=r"^All 2 shards of this job are there; give the server more --servers"):
        known._free_number(register(b"c"))
    known._shards[1].sessions[0]._lost_at = now - RETURN_SECONDS
    assert known._free_number(register(b"c")) == 1, "the shard has had its moment to come back"
    assert known._free_number(register(b"a")) == 0
