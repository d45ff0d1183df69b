"""`python -m paceline.serve` serves the job whose options it reads from standard input, as one line of JSON.

`paceline run` starts its server so. `paceline serve` is the command for people.
"""

from __future__ import annotations

import logging
import os
import sys

from paceline.model.checkpoint import CheckpointError
from paceline.serve.coordinator import event_loop
from paceline.serve.environment import REFUSALS, job_token
from paceline.serve.job_options import JobOptions
from paceline.serve.last_save import UNSAVED
from paceline.serve.serve_job import serve_job, unsaved
from paceline.serve.server import ServerError


def main() -> None:
    """Serve the job. An error that a person can correct is one line on standard error, and exit code 2."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger(REFUSALS).disabled = True  # `paceline run` shows the reason that its own worker prints
    try:
        token = job_token()
        options = JobOptions.from_json(sys.stdin.buffer.readline())
        job = event_loop.run(serve_job(options, token, print, parent=os.getppid()))
        if not job.is_saved:
            sys.stderr.write(f"{unsaved(options, job)}\n")
            sys.exit(UNSAVED)
    except (ServerError, CheckpointError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
