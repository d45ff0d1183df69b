"""Save and restore a whole JobState as plain JSON values, between two events.

This is everything that the job knows, down to a worker's last Grant. A checkpoint (`JobState.snapshot`) is less: what
a *new generation* goes on with, after everybody has joined anew.
"""

from __future__ import annotations

from typing import Any

from paceline.job.accounting import Watcher
from paceline.job.state import JobState
from paceline.policies.options import PolicyError
from paceline.policies.snapshot import decode, encode

OURS = ("paceline.job.",)


def save(state: JobState) -> Any:
    """The job's state, ready for `json.dumps`. What watches the job is not part of it."""
    state._out = []  # of the last event; the driver has it
    watcher = state.ledger.watcher
    del state.ledger.watcher
    try:
        return encode(state, OURS)
    finally:
        state.ledger.watcher = watcher


def load(saved: Any, watcher: Watcher) -> JobState:
    """The job that was saved. It goes on exactly as that one would have."""
    state = decode(saved, OURS)
    if not isinstance(state, JobState):
        raise PolicyError("What was saved is not a job.")
    state.ledger.watcher = watcher
    return state
