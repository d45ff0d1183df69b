"""The configuration of a server: in which jobs workers visit shards, and how many pieces a shard has."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("msgspec")

from paceline.policies import make
from paceline.serve.coordinator.config import LEAST_PIECES, PIECES_IF_TOGETHER, ServerConfig


@pytest.mark.parametrize(
    ("policy", "shards", "visits", "pieces"),
    [
        ("r2sp", 4, 16, 16),
        ("r2sp", 8, 4, 4),
        ("r2sp", 9, 0, LEAST_PIECES),
        ("r2sp", 1, 0, 1),
        ("r2sp:groups=2", 4, 0, PIECES_IF_TOGETHER),
        ("r2sp:groups=4", 4, 16, 16),
        ("bsp:pipeline=true", 4, 0, PIECES_IF_TOGETHER),
        ("asp", 4, 0, LEAST_PIECES),
    ],
)
def test_visits_and_pieces_follow_from_the_policy_and_the_shards(
    policy: str, shards: int, visits: int, pieces: int
) -> None:
    made = make(policy)
    config = ServerConfig(shards=shards, workers=shards, streamed=True, visits=True)
    assert config.job_config(made, "").visits == visits
    assert config.pieces_each(made) == pieces
    for without in (replace(config, visits=False), replace(config, streamed=False)):
        assert without.job_config(made, "").visits == 0
