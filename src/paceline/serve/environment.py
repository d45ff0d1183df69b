"""The variables by which processes of a job find one another, ours and those of the launchers that people use."""

from __future__ import annotations

import os
from collections.abc import Mapping

CONNECT = "PACELINE_CONNECT"  # the coordinator's address, host:port
TOKEN = "PACELINE_TOKEN"  # the job's token, in hexadecimal
SHARD_TOKEN = "PACELINE_SHARD_TOKEN"  # the token that only the server's own shards know, in hexadecimal
WORKER = "PACELINE_WORKER"  # this worker's number
WORKERS = "PACELINE_WORKERS"  # how many workers there are at first
RANK, RANKS = "PACELINE_RANK", "PACELINE_RANKS"  # of the processes that make up this worker, if they are several
REDUCE = (
    "PACELINE_RANKS_REDUCE"  # how they add up among themselves, such as bcube:n=2,levels=2; all at once if it is empty
)

PROBE = "PACELINE_PROBE"  # a file: train alone for a while, and write there how long a step takes
PROBE_STEPS, PROBE_SECONDS = "PACELINE_PROBE_STEPS", "PACELINE_PROBE_SECONDS"  # when that is enough

LAUNCHED = "PACELINE_LAUNCHED"  # set by `paceline run` and `work`: somebody listens who tells a person what is wrong
#: How a worker that was started so tells them that to start it again would not help: this exit code, and a line.
REFUSED, REFUSAL = 78, "paceline: "

#: Who else numbers processes, and how many they say there are: torchrun and Slurm.
OTHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


def worker_number(variables: Mapping[str, str] | None = None) -> int | None:
    """This worker's number: ours, or torchrun's or Slurm's; None if nobody says, and the coordinator numbers it."""
    known = os.environ if variables is None else variables
    if known.get(WORKER, "").isdigit():
        return int(known[WORKER])
    for rank, _ in OTHERS:
        if known.get(rank, "").isdigit():
            return int(known[rank])
    return None


def workers_of_launcher(variables: Mapping[str, str] | None = None) -> int | None:
    """How many workers torchrun or Slurm says there are; None if nobody says."""
    known = os.environ if variables is None else variables
    for _, size in OTHERS:
        if known.get(size, "").isdigit():
            return int(known[size])
    return None


def address(text: str) -> tuple[str, int]:
    """A server's address, as host:port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"A server's address is written host:port, not {text!r}.")
    return host.strip("[]"), int(port)
