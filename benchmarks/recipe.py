"""Test accuracy over time of a whole recipe: ResNet-20 on CIFAR-10, one line for each policy.

python benchmarks/recipe.py [--results docs/results/r2sp-h200.json] [--plot docs/pictures/recipe.png] [--target 0.91]

It draws what `paceline reproduce r2sp --only recipe --device cuda --data DIR --report DIR` measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = {
    "bsp:weights=mean": ("BSP", "#e07b39"),
    "bsp:pipeline=true,weights=mean": ("pipelined BSP", "#b8860b"),
    "asp:weights=mean": ("ASP", "#9a9a9a"),
    "r2sp:weights=mean --correct full": ("R²SP", "#3b7dd8"),
    "r2sp:groups=3,weights=mean --correct full": ("R²SP, 3 groups", "#4aa564"),
}
LEAST = 0.78  # accuracies below this are left out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/r2sp-h200.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/pictures/recipe.png")
    parser.add_argument("--target", type=float, default=0.91)
    args = parser.parse_args()
    figures = json.loads(args.results.read_text())["figures"]
    recipes = [each for each in figures if each["id"] == "recipe"]
    if not recipes:
        raise SystemExit(f"{args.results} has no recipe; write it with paceline reproduce r2sp --only recipe --report.")
    draw(recipes[0]["plots"][0]["lines"], args.target, args.plot)
    print(f"Written: {args.plot}")


def draw(lines: list[dict[str, Any]], target: float, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis: Any = figure.subplots()
    for line in lines:
        name, colour = NAMES.get(line["name"], (line["name"], None))
        hours = [each / 3600 for each in line["x"]]
        axis.plot(hours, line["y"], color=colour, label=name, linewidth=1.4)
        axis.plot(hours[-1:], line["y"][-1:], "o", color=colour, markersize=4)
        reached = next((at for at, value in zip(hours, line["y"], strict=True) if value >= target), None)
        if reached is not None:
            axis.plot([reached, reached], [LEAST, target], color=colour, linewidth=0.9, linestyle=":")
    axis.axhline(target, color="#9a9a9a", linewidth=0.8, zorder=0)
    axis.annotate(f"{target:.0%}", (0.005, target), xycoords=("axes fraction", "data"), va="bottom", color="#777")
    axis.set_ylim(LEAST, 0.925)
    axis.set_xlim(left=0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_xlabel("hours (simulated cluster, real training)")
    axis.set_ylabel("test accuracy")
    axis.set_title("ResNet-20 on CIFAR-10, 80 epochs, 8 workers on links of 100 Mbit/s", loc="left", fontsize=11)
    axis.legend(frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
