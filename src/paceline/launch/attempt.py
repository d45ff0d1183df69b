"""One start of a worker or a shard, and what its processes report on standard error."""

from __future__ import annotations

from collections import deque

from paceline.serve.environment import JOINED, REFUSAL, UPDATED

LAST_LINES = 15  # lines of a crashed worker's output that its error repeats


class Attempt:
    """One start of a worker, and what its processes have reported since."""

    def __init__(self) -> None:
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)  # of standard error
        self.error = ""  # the sentence of paceline with which the worker ended
        self.joined = False
        self.updated = False  # whether an update of this worker is done

    def read(self, line: str) -> bool:
        """Take note of a line of standard error. Return False if it is not meant for the user."""
        if line.startswith(REFUSAL):
            self.error = line.removeprefix(REFUSAL)  # shown once, as the error of the job
        elif line == UPDATED:
            self.updated = True
        elif line == JOINED:
            self.joined = True
        else:
            self.last_lines.append(line)
            return True
        return False

    def quoted(self) -> str:
        """Return the last lines as the end of an error message, or an empty string if there are none."""
        text = "".join(f"\n  {line}" for line in self.last_lines)
        return f" Its last output:{text}" if text else ""
