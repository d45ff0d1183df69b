"""The CPU time and the memory of a process, as the Linux kernel counts them."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process in user and kernel mode. Raise OSError if it does not exist."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(process: int, what: str = "VmRSS") -> int:
    """Return the memory of a process in bytes. Raise OSError if it does not exist.

    what: VmRSS for the current resident memory, VmHWM for its peak.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024
