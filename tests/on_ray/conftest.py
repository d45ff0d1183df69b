"""Let the actors of the tests import the modules of the tests."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]

# Ray's processes inherit this environment.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
