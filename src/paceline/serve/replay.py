"""A recorded job, run again: the weights of every shard must come out the same, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.serve.shard import recording
from paceline.serve.wire.frames import WireError

DECISIONS, UPDATES = "decisions-*.jsonl", "shard-*.rec"


class ReplayError(ValueError):
    """What cannot be replayed. The message says what to do."""


@dataclass(frozen=True)
class ReplayedShard:
    """What one shard's recording came to."""

    name: str
    version: int
    updates: int
    whole: bool  # was it recorded to its end?
    same: bool  # did the weights come out the same?


def journals(folder: Path) -> list[Path]:
    """The journals of a recorded job, one a generation."""
    found = sorted(folder.glob(DECISIONS))
    if not found:
        raise ReplayError(f"There is no recording in {folder}; name the folder that --record-updates was given.")
    return found


def weights(folder: Path) -> list[ReplayedShard]:
    """Replay every shard's recording."""
    parts = []
    for path in sorted(folder.glob(UPDATES)):
        try:
            done = recording.replay(path)
        except (WireError, ValueError, KeyError) as error:
            raise ReplayError(f"The recording {path} cannot be replayed: {error}") from None
        parts.append(
            ReplayedShard(path.name, done.version, done.updates, bool(done.expected), done.digest == done.expected)
        )
    return parts
