"""Which policy is fastest where: the map of `paceline reproduce rlp --only map --report DIR`, as a plot and as tables.

python benchmarks/map.py DIR/rlp.json [--plot docs/pictures/rlp-map.png] [--tables docs/results/rlp-map-h200.md]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLOURS = {"BSP": "#95b6ea", "ASP": "#f0b694", "SSP(2)": "#9ccfac", "DSSP": "#e0a9d6", "R²SP": "#d8cf8a"}
Cells = dict[tuple[str, str, str], float | None]  # by policy, cluster and rate


def cells(figure: dict[str, Any], title: str) -> Cells:
    """Return the values of one of the figure's plots."""
    (plot,) = (each for each in figure["plots"] if each["title"] == title)
    lines = ((*line["name"].split(", ", 1), line) for line in plot["lines"])
    return {
        (policy, cluster, rate): value
        for policy, cluster, line in lines
        for rate, value in zip(line["x"], line["y"], strict=True)
    }


def maps(figure: dict[str, Any]) -> dict[str, tuple[Cells, Cells]]:
    """Return the updates and the relative times for each momentum."""
    titles = [each["title"].split(": ") for each in figure["plots"]]
    momenta = dict.fromkeys(momentum for momentum, _ in titles)
    whats = dict.fromkeys(what for _, what in titles)
    return {each: tuple(cells(figure, f"{each}: {what}") for what in whats) for each in momenta}  # type: ignore[misc]


def names(found: Cells, place: int) -> list[str]:
    """Return the names at one place of the keys: 0 for policies, 1 for clusters, 2 for rates."""
    return list(dict.fromkeys(key[place] for key in found))


def shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def draw(found: dict[str, tuple[Cells, Cells]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(4.6 * len(found), 4), layout="constrained")
    axes = figure.subplots(1, len(found), sharey=True)
    for axis, (momentum, (_, slower)) in zip(axes, found.items(), strict=True):
        policies, clusters, rates = (names(slower, place) for place in range(3))
        for y, cluster in enumerate(clusters):
            for x, rate in enumerate(rates):
                times = {policy: slower[policy, cluster, rate] for policy in policies}
                reached = {policy: each for policy, each in times.items() if each is not None}
                if not reached:
                    axis.text(x, y, "none", ha="center", va="center", color="grey", size=8)
                    continue
                best = min(reached, key=lambda policy: reached[policy])
                axis.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=COLOURS[best]))
                label = f"{best}\nBSP {shown(times['BSP'], 1)}  ASP {shown(times['ASP'], 1)}"
                axis.text(x, y, label, ha="center", va="center", size=7)
        axis.set(title=momentum.lower(), xlabel="learning rate", xlim=(-0.5, len(rates) - 0.5))
        axis.set(ylim=(len(clusters) - 0.5, -0.5))
        axis.set_xticks(range(len(rates)), rates)
        axis.set_yticks(range(len(clusters)), clusters)
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_visible(False)
    figure.savefig(path, dpi=95)


def tables(found: dict[str, tuple[Cells, Cells]], report: dict[str, Any]) -> str:
    lines = [
        "# Updates and time to 88% over learning rate, momentum and stragglers",
        "",
        "Simulated time, real gradients: one hidden layer, half of MNIST (standardized), 10 workers, batch 16, at most",
        "1,500 updates. A cell has the updates, and the time relative to the fastest policy, which is in bold. A dash:",
        "most seeds missed 88%.",
        "",
        f"`{report['command']}`",
        f"on {report['device']}, and then `python benchmarks/map.py`.",
    ]
    for momentum, (updates, slower) in found.items():
        policies, clusters, rates = (names(updates, place) for place in range(3))
        lines += [
            "",
            f"{momentum}:",
            "",
            f"| workers | rate | {' | '.join(policies)} |",
            "|---" * (len(policies) + 2) + "|",
        ]
        for cluster in clusters:
            for rate in rates:
                row = []
                for policy in policies:
                    took, ratio = updates[policy, cluster, rate], slower[policy, cluster, rate]
                    cell = "–" if ratio is None else f"{shown(took, 0)} / {shown(ratio, 2)}"
                    row.append(f"**{cell}**" if ratio == 1 else cell)
                lines.append(f"| {cluster} | {rate} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the JSON file of the report")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--tables", type=Path)
    args = parser.parse_args()
    report = json.loads(args.report.read_text())
    (figure,) = (each for each in report["figures"] if each["id"] == "map")
    found = maps(figure)
    if args.plot:
        draw(found, args.plot)
    text = tables(found, report)
    if args.tables:
        args.tables.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
