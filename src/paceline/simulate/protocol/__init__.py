"""The whole protocol of a job in one process, under a virtual clock, with faults from a seed.

The coordinator's JobState and the WorkerState of every worker are the real ones. The network between them loses
connections, delays messages, and may deliver messages of an old connection after those of a new one. Processes are
stopped, killed and restarted. A seed that fails is a bug report that replays.
"""

from paceline.simulate.protocol.faults import ScheduledFault, draw_faults
from paceline.simulate.protocol.run import ProtocolOutcome, Setting, draw_setting, run

__all__ = ["ProtocolOutcome", "ScheduledFault", "Setting", "draw_faults", "draw_setting", "run"]
