"""`paceline` and `python -m paceline`: import the commands and run one of them."""

from __future__ import annotations

import sys


def main() -> None:
    """Run a command. Ctrl-C ends it without a traceback, even while its modules are imported."""
    try:
        from paceline.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
