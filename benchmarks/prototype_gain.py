"""Why might the R²SP paper's prototype gain 1.4 × over BSP where our R²SP gains 2.15 ×? Simulated, cluster A.

    python benchmarks/prototype_gain.py

Each line changes one thing that the prototype may have had: transfers that share the links, jitter, slower links of the
workers, and servers whose two directions slow each other down. The last one is simulated by slower links of the servers
under R²SP alone, because BSP uses one direction at a time.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.reproduce.shared.simulated import report
from paceline.simulate import ClusterSpec, load_cluster

RELAX = 0.8  # the paper's
NIC = 1.25e9  # bytes per second: the 10 Gbit/s of the paper's machines


def gain(bsp: ClusterSpec, r2sp: ClusterSpec | None = None, relax: float = RELAX, shared: bool = True) -> float:
    """Return BSP's iteration time over R²SP's, on two clusters if they differ."""
    slow = report(bsp, "bsp", 24).mean_iteration_seconds
    return slow / report(r2sp or bsp, f"r2sp:relax={relax}", 60, shared=shared).mean_iteration_seconds


def with_servers(spec: ClusterSpec, link: float) -> ClusterSpec:
    """Return the cluster with this rate of each server's link, in bytes per second."""
    return replace(spec, server_link=link)


def with_workers(spec: ClusterSpec, factor: float) -> ClusterSpec:
    """Return the cluster with the rate of every worker's link multiplied by `factor`."""
    return replace(spec, workers=tuple(replace(worker, link=factor * worker.link) for worker in spec.workers))


def main() -> None:
    for model in ("vgg16", "alexnet"):
        fitted = load_cluster(f"r2sp-a-{model}")
        spec = fitted.with_jitter(0.05)
        rows = {
            "links handed on (ours), jitter 5%": gain(spec, shared=False),
            "links shared (the prototype's), jitter 5%": gain(spec),
            "links shared, jitter 20%": gain(fitted.with_jitter(0.2)),
            "links shared, jitter 50%": gain(fitted.with_jitter(0.5)),
            "links shared, relaxation 0.01: no gaps": gain(spec, relax=0.01),
            "links shared, the workers' links at 0.5 of the rate": gain(with_workers(spec, 0.5)),
        }
        for slower in (1.33, 1.5, 2.0):
            coupled = with_servers(spec, spec.server_link / slower)
            rows[f"each direction 1/{slower:g} as fast while both are in use"] = gain(spec, coupled)
        narrow = with_workers(with_servers(spec, NIC / 10), NIC / 10 / spec.workers[0].link)
        rows["1 Gbit/s, which binds before the servers do"] = gain(narrow)
        for what, value in rows.items():
            print(f"{model:8} {what:58} {value:.2f} ×")


if __name__ == "__main__":
    main()
