"""Finds and removes the namespaces of labs, also of labs whose process was killed.

The names of a lab's namespaces begin with the name of the lab. That name contains the process that built the lab, so a
lab whose process is gone can be recognized.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

NAMESPACES = Path("/run/netns")


def lab_name(number: int) -> str:
    """Return the name of a lab of this process. number: distinguishes the labs of one process."""
    return f"paceline-{os.getpid()}-{start_time(os.getpid())}-{number}"


def sweep() -> list[str]:
    """Remove what is left of labs whose process is gone. Return their names."""
    found: dict[str, bool] = {}
    for name in os.listdir(NAMESPACES) if NAMESPACES.is_dir() else ():
        parsed = re.fullmatch(r"(paceline-(\d+)-(\d+)-\d+)-.+", name)
        if parsed:
            found[parsed[1]] = start_time(int(parsed[2])) == parsed[3]
    gone = [lab for lab, alive in found.items() if not alive]
    for lab in gone:
        remove(lab)
    return gone


def remove(lab: str) -> None:
    """Remove the namespaces of a lab, and kill the processes that still run in them."""
    from pyroute2 import netns

    names = [name for name in os.listdir(NAMESPACES) if name.startswith(f"{lab}-")] if NAMESPACES.is_dir() else []
    inodes = {(NAMESPACES / name).stat().st_ino for name in names}
    for process in os.listdir("/proc"):
        if process.isdecimal() and int(process) != os.getpid():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{process}/ns/net").st_ino in inodes:
                    os.kill(int(process), signal.SIGKILL)
    for name in names:
        with contextlib.suppress(OSError):
            netns.remove(name)


def start_time(pid: int) -> str:
    """Return when a process started, in the kernel's ticks, or "" if there is no such process.

    Process ids are reused; a process id and a start time together identify one process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
