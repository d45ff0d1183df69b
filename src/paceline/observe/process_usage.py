"""What a process has used, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(process: int) -> float:
    """In user and in kernel mode. OSError if there is no such process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(process: int, what: str = "VmRSS") -> int:
    """Bytes: VmRSS now, VmHWM at the most so far. OSError if there is no such process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024
