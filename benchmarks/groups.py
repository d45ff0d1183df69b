"""R²SP in groups: iteration time over the number of groups M, on the INFOCOM paper's cluster A.

python benchmarks/groups.py [--plot docs/pictures/groups.png]
python benchmarks/groups.py --streamed      # streamed groups beside streamed turns, where shards run beside the workers
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.policies import make
from paceline.policies.r2sp import R2SP
from paceline.simulate import Cluster, ClusterSpec, WorkerSpec, limit_seconds, load_cluster

MODELS = ("resnet32", "alexnet", "vgg16", "inception")
GROUPS = (1, 2, 3, 4, 5, 6, 8, 16)


def measure(model: str, policy: str) -> tuple[float, int, R2SP | None]:
    """Return the iteration time in units of the floor, the largest staleness, and the policy after the run."""
    spec = load_cluster(f"r2sp-a-{model}")
    made = make(policy)
    report = Cluster(spec, made, 100).run().report
    floor = limit_seconds(spec, streamed=False)
    return report.mean_iteration_seconds / floor, report.max_staleness, made if isinstance(made, R2SP) else None


def compare_streamed(iterations: int = 100) -> None:
    """Print the iteration time of streamed groups, in units of that of N turns, and what their own floor allows."""
    print("5 MB at 200 Mbit/s, a shard beside each worker; X is the time in which a link carries the model once\n")
    print("| workers | compute | r2sp | M | × r2sp | allowed | staleness |")
    print("|---|---|---|---|---|---|---|")
    for workers in (4, 8):
        for label, share in (("X/4", 0.25), ("X", 1.0), ("4X", 4.0)):
            spec = full_links(workers, share)
            turns = Cluster(spec, make("r2sp"), iterations, streamed=True).run().report
            for groups in (2, 3, 4) if workers == 8 else (2, 3):
                report = Cluster(spec, make(f"r2sp:groups={groups}"), iterations, streamed=True).run().report
                ratio = report.mean_iteration_seconds / turns.mean_iteration_seconds
                allowed = max(1.0, floor_of_groups(spec, groups) / turns.mean_iteration_seconds)
                begin = f"| {workers} | {label} | {turns.mean_iteration_seconds:.3f} s "
                print(f"{begin}| {groups} | {ratio:.2f} | {allowed:.2f} | {report.max_staleness} |")


def full_links(workers: int, share: float) -> ClusterSpec:
    """Return equal machines with shards, that compute for `share` of the time in which a link carries the model."""
    link, size, batch = 25e6, 5e6, 32
    worker = WorkerSpec(link, batch, batch / (share * size / link))
    cluster = ClusterSpec("full-links", size, 1, link, 50e-6, 20e9, 30.0, (worker,) * workers)
    return cluster.colocated()


def floor_of_groups(spec: ClusterSpec, groups: int) -> float:
    """Return the shortest iteration of streamed groups, in seconds.

    While a group of g workers exchanges, the link of a member carries its own push, (N−1)/N of the model, and what the
    shard beside it returns to the other members, (g−1)/N of the model. Over a whole round it carries 2·(N−1)/N.
    """
    workers, worker = len(spec.workers), spec.workers[0]
    once = spec.model_bytes / worker.link
    members = -(-workers // groups)
    own = worker.compute_seconds() + once * (workers - 1 + members - 1) / workers
    return max(own, 2 * once * (workers - 1) / workers)


def main() -> None:
    if "--streamed" in sys.argv:
        compare_streamed()
        return
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
