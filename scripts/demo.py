"""The demo: train handwritten digits with four workers over slow links, once under BSP and once under R²SP.

python scripts/demo.py

It takes about a minute, needs no root, and writes demo.png. Both policies have the same learning rate, batch size and
seed. Where links cannot be emulated, the simulator predicts the gain instead.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline.serve.wire.link import check_rate
from paceline.simulate import units

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "demo.png"
LINK = "200Mbit"
TRAINING = ["run", "--workers", "4", "--policy", "bsp,r2sp", "--link", LINK, "--target", "accuracy=0.97"]
PREDICTION = ["simulate", "lab-1mb", "--policy", "bsp,r2sp"]


def command() -> list[str]:
    """Return the arguments of `paceline`, and print what they do."""
    try:
        check_rate(units.rate(LINK))
    except ValueError as error:
        print(f"No training, because {error} This is the simulator's prediction.")
        return PREDICTION
    print(f"Four workers train handwritten digits. Every worker and the server has an emulated link of {LINK}/s.")
    print("First all workers push at once and wait for each other (BSP); then they take turns (R²SP).", flush=True)
    script = ROOT / "examples" / "digits.py"
    return [*TRAINING, "--plot", str(PICTURE), str(script), "--epochs", "8"]


def main() -> None:
    """Run the demo, and exit with the code of `paceline`."""
    sys.exit(subprocess.run([sys.executable, "-m", "paceline", *command()]).returncode)


if __name__ == "__main__":
    main()
