"""How staleness limits the stable learning rates of a scheme, on parabolas. Needs no data and takes seconds.

python benchmarks/staleness.py [--momentum 0.9] [--plot FILE]
python benchmarks/staleness.py outer [--plot FILE]               # outer rules, for workers that make local steps

The loss is ½·λ·w², its gradient λ·w. BSP with momentum β is stable if η·λ < 2·(1+β). If M groups take turns, each adds
1/M of the gradient, computed from weights that are M−1 versions old. The output is the largest η·λ up to which every
parabola is stable, computed with the code that servers run (`paceline.model.slice`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks import outer
from paceline.model.correction import CORRECTIONS, Correction
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice

CURVATURES = torch.logspace(-2, 0.8, 400)  # η·λ; η is 1
ROUNDS = 300


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=("gradients", "outer"), default="gradients")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.what == "outer":
        outer.compare()
        if args.plot:
            outer.draw(args.plot)
        return
    groups = (1, 2, 3, 4, 8, 16)
    print(f"Largest stable η·λ, momentum {args.momentum:g}\n")
    print("| groups | " + " | ".join(CORRECTIONS) + " |")
    print("|---|" + "---|" * len(CORRECTIONS))
    edges: dict[Correction, list[float]] = {each: [] for each in CORRECTIONS}
    for M in groups:
        for correct in CORRECTIONS:
            edges[correct].append(edge(growth(M, args.momentum, correct)))
        name = "1 (BSP)" if M == 1 else str(M)
        print(f"| {name} | " + " | ".join(f"{edges[each][-1]:.2f}" for each in CORRECTIONS) + " |")
    if args.plot:
        draw(groups, edges, args.plot)


def growth(M: int, beta: float, correct: Correction) -> torch.Tensor:
    """Return the growth of each parabola's oscillation in the second half of the rounds. Below 1 it dies out."""
    size = len(CURVATURES)
    spec = OptimizerSpec("SGD", ({"lr": 1.0, "momentum": beta},))
    server = Slice(Layout((Tensor("w", (size,)),)), 0, size, spec)
    server.weights.fill_(1.0)
    held = [server.weights.clone() for _ in range(M)]
    sizes = []
    for step in range(M * ROUNDS):
        server.step([CURVATURES / M * held[step % M]], [1.0], [1.0], correct, M)
        held[step % M] = server.ahead(M - 1, correct)
        sizes.append(server.weights.abs().clamp(1e-30, 1e30))
    early, late = (torch.stack(sizes[at : at + 40 * M]).amax(0) for at in (M * (ROUNDS // 2 - 40), M * (ROUNDS - 40)))
    return late / early


def edge(grown: torch.Tensor) -> float:
    """Return the largest η·λ below the first unstable one."""
    unstable = (grown >= 1).logical_or(grown.isnan()).nonzero()
    first = int(unstable[0]) if len(unstable) else len(CURVATURES)
    return float(CURVATURES[first - 1]) if first else 0.0


def draw(groups: tuple[int, ...], edges: dict[Correction, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for correct, values in edges.items():
        axis.plot([str(M) for M in groups], values, "o-", label=correct)
    axis.set_yscale("log")
    axis.set_xlabel("groups that take turns (1: BSP)")
    axis.set_ylabel("largest stable η·λ")
    axis.legend(title="correct", frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
