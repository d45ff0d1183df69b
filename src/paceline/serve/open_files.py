"""How many files a process may have open: every connection is one, and the usual limit is soon reached by a crowd."""

from __future__ import annotations

import importlib.util

SPARE = 64  # files besides connections


def allow(connections: int) -> int:
    """Let this process, and those that it starts, have so many connections. How many they may have now."""
    if importlib.util.find_spec("resource") is None:  # not everywhere
        return connections
    import resource

    wanted = connections + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(0, allowed - SPARE)
