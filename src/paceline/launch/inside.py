"""`python -m paceline.launch.inside NAMESPACE COMMAND …`: run a command on a host of a lab."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def enter(namespace: str) -> None:
    """From now on, what this thread opens, and the threads it starts, is on that host."""
    from pyroute2 import netns

    netns.setns(namespace)
    with contextlib.suppress(OSError):  # what most machines have, so that figures from two can be compared
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("cubic")


if __name__ == "__main__":
    enter(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
