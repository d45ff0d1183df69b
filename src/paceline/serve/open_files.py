"""Raise the limit of open files. Every connection is an open file, and a large job soon reaches the usual limit."""

from __future__ import annotations

import importlib.util

from paceline.serve.wire.strangers import MAX_STRANGERS

SPARE_FILES = 64  # files besides connections


def allow(connections: int) -> int:
    """Let this process and its children have this many connections. Return how many they may have now.

    Strangers need files too. If the system does not allow as many, they make room for each other sooner.
    """
    if importlib.util.find_spec("resource") is None:  # not on Windows
        return connections
    import resource

    wanted = connections + SPARE_FILES + MAX_STRANGERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(0, min(connections, allowed - SPARE_FILES))
