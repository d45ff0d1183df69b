"""`python -m paceline.serve` serves the job whose options it reads from standard input, as one line of JSON.

`paceline run` starts its server so. `paceline serve` is the command for people.
"""

from __future__ import annotations

import logging
import os
import sys

from paceline.model.checkpoint import CheckpointError
from paceline.serve.coordinator import event_loop
from paceline.serve.environment import TOKEN
from paceline.serve.job_options import JobOptions
from paceline.serve.serve_job import serve_job
from paceline.serve.server import ServerError


def main() -> None:
    """Serve the job. An error that a person can correct is one line on standard error, and exit code 2."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    token = bytes.fromhex(os.environ.get(TOKEN, ""))
    try:
        options = JobOptions.from_json(sys.stdin.buffer.readline())
        event_loop.run(serve_job(options, token, print))
    except (ServerError, CheckpointError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
