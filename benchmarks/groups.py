"""R²SP in groups: iteration time over the number of groups M, on the INFOCOM paper's cluster A.

python benchmarks/groups.py [--plot docs/pictures/groups.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.policies import make
from paceline.policies.r2sp import R2SP
from paceline.simulate import Cluster, limit_seconds, load_cluster

MODELS = ("resnet32", "alexnet", "vgg16", "inception")
GROUPS = (1, 2, 3, 4, 5, 6, 8, 16)


def measure(model: str, policy: str) -> tuple[float, int, R2SP | None]:
    """Return the iteration time in units of the floor, the largest staleness, and the policy after the run."""
    spec = load_cluster(f"r2sp-a-{model}")
    made = make(policy)
    report = Cluster(spec, made, 100).run().report
    floor = limit_seconds(spec, streamed=False)
    return report.mean_iteration_seconds / floor, report.max_staleness, made if isinstance(made, R2SP) else None


def main() -> None:
    plot = Path(sys.argv[sys.argv.index("--plot") + 1]) if "--plot" in sys.argv else None
    print("Iteration time in units of the floor (largest staleness), cluster A, no jitter")
    print(f"{'M':>16s}" + "".join(f"{model:>15s}" for model in MODELS))
    times: dict[str, list[float]] = {model: [] for model in MODELS}
    for groups in GROUPS:
        cells = []
        for model in MODELS:
            ratio, stale, _ = measure(model, f"r2sp:groups={groups}")
            times[model].append(ratio)
            cells.append(f"{ratio:10.3f} ({stale:2d})")
        print(f"{groups:16d}" + "".join(cells))
    chosen = {}
    cells = []
    for model in MODELS:
        ratio, stale, policy = measure(model, "r2sp:groups=auto")
        assert policy is not None
        chosen[model] = (len(policy.ring), ratio)
        cells.append(f"{ratio:10.3f} ({stale:2d})")
    print(f"{'auto':>16s}" + "".join(cells))
    print(f"{'auto chose':>16s}" + "".join(f"{groups:15d}" for groups, _ in chosen.values()))
    for policy_name in ("bsp", "bsp:pipeline=true"):
        print(f"{policy_name:>17s}" + "".join(f"{measure(model, policy_name)[0]:9.3f} ( 0)" for model in MODELS))
    if plot:
        draw(times, chosen, plot)


def draw(times: dict[str, list[float]], chosen: dict[str, tuple[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis = figure.subplots()
    for model, ratios in times.items():
        (line,) = axis.plot(GROUPS, ratios, marker=".", label=model)
        axis.plot(*chosen[model], marker="o", markersize=10, fillstyle="none", color=line.get_color())
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(GROUPS, [str(groups) for groups in GROUPS])
    axis.minorticks_off()
    axis.set_xlabel("groups M (staleness is M−1); circles mark the choice of groups=auto")
    axis.set_ylabel("iteration time / floor")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
