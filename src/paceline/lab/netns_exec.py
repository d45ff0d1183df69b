"""`python -m paceline.lab.netns_exec NAMESPACE COMMAND …`: run a command on a host of a lab."""

from __future__ import annotations

import os
import sys


def enter(namespace: str) -> None:
    """Move this thread to a namespace. Sockets that it opens and threads that it starts are there from now on."""
    from pyroute2 import netns

    netns.setns(namespace)


if __name__ == "__main__":
    enter(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
