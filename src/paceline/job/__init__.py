"""The job as a pure state machine: membership, leases, samples and checkpoints.

`JobState.handle(event, now)` takes an event and returns instructions. It opens no socket, reads no clock, writes no
file and knows no tensor. The parameter server and the simulator drive the same class. `WorkerState` is the worker's
side of the protocol: the state of one incarnation of a worker.
"""

from paceline.job.accounting import Ledger
from paceline.job.config import JobConfig, SaveEvery
from paceline.job.identity import Identity
from paceline.job.state import JobState
from paceline.job.worker import WorkerState

__all__ = ["Identity", "JobConfig", "JobState", "Ledger", "SaveEvery", "WorkerState"]
