"""`python -m paceline.lab.netns_exec NAMESPACE COMMAND …`: run a command on a host of a lab."""

from __future__ import annotations

import os
import sys


def enter(namespace: str) -> None:
    """From now on, what this thread opens, and the threads it starts, is on that host."""
    from pyroute2 import netns

    netns.setns(namespace)


if __name__ == "__main__":
    enter(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
