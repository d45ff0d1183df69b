"""The environment variables of a job's processes: paceline's own, and those of torchrun, Slurm and Kubernetes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

CONNECT = "PACELINE_CONNECT"  # the coordinator's address, host:port
TOKEN = "PACELINE_TOKEN"  # the job's token, or one of a role, in hexadecimal
TOKEN_FILE = "PACELINE_TOKEN_FILE"  # the file with the token, as `paceline token` writes it; TOKEN counts first
MIN_TOKEN = 16  # bytes of a token; a shorter one could be guessed
SHARD_TOKEN = "PACELINE_SHARD_TOKEN"  # the token that only the server's own shards know, in hexadecimal
WORKER = "PACELINE_WORKER"  # this worker's number
WORKERS = "PACELINE_WORKERS"  # how many workers the job starts with
RANK, RANKS = "PACELINE_RANK", "PACELINE_RANKS"  # of this process among the processes of one worker; their number
#: How these processes reduce their gradients, such as bcube:n=2,levels=2. If it is empty, by torch.distributed.
REDUCE = "PACELINE_RANKS_REDUCE"
GRADIENTS = "PACELINE_GRADIENTS"  # the type in which a worker sends gradients
LINK = "PACELINE_LINK"  # the file by which the processes of this job share emulated links (serve/wire/link.py)

PROBE = "PACELINE_PROBE"  # the file to write step times to; the script then trains alone for a while
PROBE_STEPS, PROBE_SECONDS = "PACELINE_PROBE_STEPS", "PACELINE_PROBE_SECONDS"  # when to stop

LAUNCHED = "PACELINE_LAUNCHED"  # set by `paceline run` and `work`, which show the user why a worker failed
RUN, WORK = "run", "work"  # its values
ASKED_TO_LEAVE = 143  # the exit code of a worker that has left because of SIGTERM, as a shell reports the signal
#: A worker that they started prints an error of paceline as one line with this prefix. Its exit code is REFUSED if a
#: restart would not help, and LOST if it may.
REFUSAL, REFUSED, LOST = "PACELINE_ERROR ", 78, 75
#: Lines that such a worker prints when it has joined, and when its first update is done.
JOINED, UPDATED = "PACELINE_JOINED", "PACELINE_UPDATED"

REFUSALS = "paceline.refusals"  # the logger of peers that the server has refused

#: The variables of other launchers for the number of a process, and for how many there are: torchrun, Slurm, and an
#: indexed Job of Kubernetes, which does not tell how many.
LAUNCHER_VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("JOB_COMPLETION_INDEX", ""))


def worker_number(variables: Mapping[str, str] | None = None) -> int | None:
    """Return this worker's number from PACELINE_WORKER or the launcher, or None: the coordinator assigns one."""
    known = os.environ if variables is None else variables
    if known.get(WORKER, "").isdigit():
        return int(known[WORKER])
    for rank, _ in LAUNCHER_VARIABLES:
        if known.get(rank, "").isdigit():
            return int(known[rank])
    return None


def workers_of_launcher(variables: Mapping[str, str] | None = None) -> int | None:
    """Return the number of workers that torchrun or Slurm has started, or None without them."""
    known = os.environ if variables is None else variables
    for _, size in LAUNCHER_VARIABLES:
        if known.get(size, "").isdigit():
            return int(known[size])
    return None


def job_token() -> bytes:
    """Return the job's token from PACELINE_TOKEN or PACELINE_TOKEN_FILE, or an empty one without them.

    Raise ValueError if it cannot be read or is too short.
    """
    if not os.environ.get(TOKEN) and os.environ.get(TOKEN_FILE):
        return token_in(Path(os.environ[TOKEN_FILE]))
    try:
        token = bytes.fromhex(os.environ.get(TOKEN, ""))
    except ValueError:
        raise ValueError(
            f"{TOKEN} must be the bytes of the token in hexadecimal; `paceline work --token-file FILE` reads a file."
        ) from None
    if token:
        check_token(token, TOKEN)
    return token


def token_in(file: Path) -> bytes:
    """Return the token in a file. Raise ValueError if it cannot be read or is too short."""
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"The token file {file} cannot be read: {error.strerror}.") from None
    check_token(token, str(file))
    return token


def check_token(token: bytes, source: str) -> None:
    """Raise ValueError if a token is so short that it could be guessed. source: where it was found."""
    if len(token) < MIN_TOKEN:
        raise ValueError(f"The token in {source} is too short to be safe; use at least {MIN_TOKEN} characters.")


def address(text: str) -> tuple[str, int]:
    """Return the host and the port of an address that is written host:port.

    The host may be left out (:7000) where a launcher names the job's first host.
    """
    host, colon, port = text.rpartition(":")
    if colon and not host:
        host = first_host() or ""
        if not host:
            raise ValueError(
                f"The address {text} has no host, and neither MASTER_ADDR nor SLURM_JOB_NODELIST names one: "
                "write host:port."
            )
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"A server's address is written host:port, not {text!r}.")
    return host.strip("[]"), int(port)


def first_host(variables: Mapping[str, str] | None = None) -> str | None:
    """Return the first host of the job, as torchrun (MASTER_ADDR) or Slurm (SLURM_JOB_NODELIST) names it, or None."""
    known = os.environ if variables is None else variables
    if known.get("MASTER_ADDR"):
        return known["MASTER_ADDR"]
    first = re.match(r"([^,\[\]]+)(?:\[(\w+)[^\]]*\]([^,\[\]]*))?(?:,|$)", known.get("SLURM_JOB_NODELIST", ""))
    return "".join(part or "" for part in first.groups()) if first else None


def is_launched() -> bool:
    """Return whether `paceline run` or `work` has started this process."""
    return LAUNCHED in os.environ


def tell_launcher(line: str) -> None:
    """Send a line to `paceline run` or `work`, over standard error. Without them, do nothing.

    The line begins with a carriage return, so that it does not become a part of a progress bar.
    """
    if is_launched():
        with contextlib.suppress(OSError):
            os.write(2, f"\r{line}\n".encode(errors="replace"))
