"""Replay a recorded job. The weights of every shard must be the same again, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.serve.shard import recording
from paceline.serve.wire.frames import WireError

DECISIONS, UPDATES = "decisions-*.jsonl", "shard-*.rec"


class ReplayError(ValueError):
    """A recording that cannot be replayed. The message says what to do."""


@dataclass(frozen=True)
class ReplayedShard:
    """The result of replaying one shard's recording."""

    name: str
    version: int
    updates: int
    whole: bool  # does the recording have its end?
    same: bool  # are the weights the same, bit for bit?


def journals(folder: Path) -> list[Path]:
    """Return the journals of a recorded job, one for each generation."""
    found = sorted(folder.glob(DECISIONS))
    if not found:
        raise ReplayError(f"There is no recording in {folder}; name the folder that was given to --record-updates.")
    return found


def weights(folder: Path) -> list[ReplayedShard]:
    """Replay the recording of every shard. Return the results."""
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
