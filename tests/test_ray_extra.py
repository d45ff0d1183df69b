"""Ray is an extra: without it, the error names the extra. `test_architecture.py` checks the imports of all rooms."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_RAY = (
    "import importlib.metadata as metadata, sys\n"
    "sys.modules['ray'] = None\n"
    "found = metadata.version\n"
    "def version(name):\n"
    "    if name == 'ray':\n"
    "        raise metadata.PackageNotFoundError(name)\n"
    "    return found(name)\n"
    "metadata.version = version\n"
)


def test_without_ray_the_error_names_the_extra() -> None:
    code = f"{WITHOUT_RAY}import paceline.ray"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last == "ModuleNotFoundError: paceline.ray needs Ray: pip install 'paceline[ray]'."
