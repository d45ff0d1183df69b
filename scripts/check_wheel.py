"""Build the wheel, install it in an empty environment, and run it as a user would.

python scripts/check_wheel.py [--without-torch]

1. `python -m build` makes a wheel.
2. A new virtual environment gets the wheel alone. `paceline simulate r2sp-a-vgg16` must run there, without torch.
3. The same environment gets the extra `torch`. A job of two workers must train there. The packages of the extra are
   linked from the environment that runs this script, because unpacking torch again takes a minute. pip checks that
   their versions fit, and installs those that are missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
#: Variables that would let the checkout leak into the new environment.
LEAKS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def main() -> None:
    """Run the three steps. The exit code is not 0 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-torch", action="store_true", help="leave out the third step")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), torch=not asked.without_torch)


def check(folder: Path, torch: bool) -> None:
    """Build the wheel, install it and run it, in this empty folder."""
    step("building the wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", ROOT, cwd=folder, quiet=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    step(f"installing {wheel.name} in an empty environment")
    venv.create(folder / "env")
    programs = folder / "env" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install")
    options = ("--quiet", "--disable-pip-version-check", "--no-compile", "-c", ROOT / "constraints.txt")
    run(*pip, *options, wheel, cwd=folder)
    run(programs / "python", "-c", "import importlib.util as u; assert u.find_spec('torch') is None", cwd=folder)
    run(programs / "paceline", "simulate", "r2sp-a-vgg16", cwd=folder)
    if torch:
        step("adding the extra torch")
        link_packages(Requirement("paceline[torch]"), folder / "env")
        run(*pip, *options, f"{wheel}[torch]", cwd=folder)
        shutil.copy(ROOT / "examples" / "digits.py", folder)
        run(programs / "paceline", "run", "--workers", "2", "--policy", "r2sp", "digits.py", cwd=folder)
    step("done")


def link_packages(wanted: Requirement, environment: Path) -> None:
    """Link the packages that a requirement needs, and that are installed here, into another environment."""
    (there,) = environment.glob("lib/python*/site-packages")
    needed: set[str] = set()
    add_needed(wanted, needed)
    for package in map(metadata.distribution, sorted(needed)):
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (there / name).exists():
                (there / name).symlink_to(Path(str(package.locate_file(name))))


def add_needed(wanted: Requirement, needed: set[str]) -> None:
    """Add the names of the packages that a requirement needs, and that are installed here."""
    for text in metadata.requires(wanted.name) or ():
        inner = Requirement(text)
        applies = not inner.marker or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras))
        if applies and inner.name not in needed and list(metadata.distributions(name=inner.name)):
            needed.add(inner.name)
            add_needed(inner, needed)


STARTED = time.monotonic()


def step(text: str) -> None:
    """Print the next step, with the seconds since the start."""
    print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


def run(*command: str | Path, cwd: Path, quiet: bool = False) -> None:
    """Run a command outside of the checkout. Exit with its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in LEAKS}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=quiet, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed.\n{done.stdout or ''}{done.stderr or ''}")


if __name__ == "__main__":
    main()
