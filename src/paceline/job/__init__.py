"""The job as a pure state machine: which workers are members, which samples are whose, and when a checkpoint is taken.

`JobState.handle(event, now)` answers an event with instructions. It opens no socket, reads no clock, writes no file and
knows no tensor. The parameter server and the simulator drive the same object. `WorkerState` is the other end of the
conversation: one incarnation of a worker.
"""

from paceline.job.accounting import Ledger
from paceline.job.config import JobConfig, SaveEvery
from paceline.job.identity import Identity
from paceline.job.state import JobState
from paceline.job.worker import WorkerState

__all__ = ["Identity", "JobConfig", "JobState", "Ledger", "SaveEvery", "WorkerState"]
