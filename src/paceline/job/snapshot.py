"""Save and load a whole JobState as JSON values, between two events.

This is the complete state of the job, including each worker's last Grant. `JobState.snapshot` holds less: the part
that a *new generation* starts from, after every worker has joined again.
"""

from __future__ import annotations

from typing import Any

from paceline.job.accounting import Watcher
from paceline.job.state import JobState
from paceline.policies.options import PolicyError
from paceline.policies.snapshot import decode, encode

JOB_MODULES = ("paceline.job.",)


def save(state: JobState) -> Any:
    """Return the state of a job, ready for `json.dumps`. Its watcher is left out."""
    state._out = []  # the instructions of the last event, which the driver has received
    watcher = state.ledger.watcher
    del state.ledger.watcher
    try:
        return encode(state, JOB_MODULES)
    finally:
        state.ledger.watcher = watcher


def load(saved: Any, watcher: Watcher) -> JobState:
    """Return the job that was saved. It answers later events exactly as the saved job would have."""
    state = decode(saved, JOB_MODULES)
    if not isinstance(state, JobState):
        raise PolicyError("The saved state is not a job.")
    state.ledger.watcher = watcher
    return state
