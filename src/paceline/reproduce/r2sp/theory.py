"""Measurement against theory: the staleness of updates, and where R²SP is faster than pipelined BSP."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row
from paceline.reproduce.shared.simulated import JITTER, MODELS, SCHEMES, report, row
from paceline.simulate import ClusterSpec, WorkerSpec, load_cluster

if TYPE_CHECKING:
    from paceline.reproduce.shared.request import Request

WORTHWHILE = 1.1  # the smallest speed-up that the map counts as a gain
WORKERS = (2, 4, 8, 16, 32)
RATIOS = tuple(10 ** (-1 + step / 4) for step in range(9))  # of compute time to communication time
PIPELINED = "bsp:pipeline=true"


def staleness(request: Request) -> Figure:
    """Compare the staleness of each scheme on cluster A with theory."""
    make_row = partial(row, "staleness")
    count = 24 if request.quick else 60
    rows: list[Row] = []
    means: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
    for model, name in MODELS.items():
        spec = load_cluster(f"r2sp-a-{name}").with_jitter(JITTER)
        for scheme, policy in SCHEMES.items():
            found = report(spec, policy, count)
            means[scheme].append(found.mean_staleness)
            if scheme == "BSP":
                rows.append(
                    make_row(f"{model}, {scheme}: mean", 0.0, found.mean_staleness, "updates", "By definition.")
                )
            elif scheme == "R²SP":
                paper = "at most 15"
                rows.append(
                    make_row(
                        f"{model}, {scheme}: mean", paper, found.mean_staleness, "updates", _explain_staleness(spec)
                    )
                )
                rows.append(make_row(f"{model}, {scheme}: worst", 15.0, found.max_staleness, "updates", "N−1."))
    shared = report(load_cluster("r2sp-a-vgg16").with_jitter(JITTER), "r2sp", count, shared=True)
    note = "With shared links, no pull waits before it begins, so every worker gets the weights of its Grant."
    rows.append(make_row("VGG16, R²SP with links shared: mean", None, shared.mean_staleness, "updates", note))
    spec = load_cluster("r2sp-a-resnet32").with_jitter(0.2)
    worst = report(spec, "ssp:staleness=1", 200).max_staleness
    note = (
        "The paper gives 2(N−1) for the tightest SSP. During one iteration of a worker that is ahead, each of the "
        "others may push three times (the iteration by which it is behind, and two more), so 3(N−1) = 45 is possible."
    )
    rows.append(make_row("ResNet32, SSP(1), jitter 20%: worst", 30.0, worst, "updates", note))
    lines = tuple(PlotLine(scheme, tuple(MODELS), tuple(values)) for scheme, values in means.items())
    plot = Plot(f"Mean staleness, jitter {JITTER:.0%}", "", "updates", lines, "bars")
    title = f"Staleness on cluster A against theory, jitter {JITTER:.0%}"
    return Figure("staleness", title, tuple(rows), (plot,))


def _explain_staleness(spec: ClusterSpec) -> str:
    """Explain why the mean staleness of a ring is N−1, or less."""
    worker = spec.workers[0]
    own = worker.compute_seconds() + 2 * spec.one_way(worker)
    X = len(spec.workers) * spec.model_bytes / (spec.servers * spec.server_link)
    if own > X:
        return f"N−1: a round takes as long as a worker's own path, {own:.3g} s, and no pull waits for a link."
    return (
        f"Less than N−1: in a round, the links are busy for {X:.3g} s and a worker for {own:.3g} s. So its pull waits "
        "for a link, and gets the weights of the moment at which it begins, which are newer than those of its Grant."
    )


def regime_map(request: Request) -> Figure:
    """Map R²SP's speed-up over pipelined and plain BSP over compute time and the number of workers."""
    make_row = partial(row, "map")
    clusters = {f"{workers} workers": (workers, max(1, workers // 4)) for workers in WORKERS}
    clusters["16 workers, 1 server"] = (16, 1)
    gains: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    for name, (workers, servers) in clusters.items():
        found = [_gains(even(workers, servers, ratio), 20 if request.quick else 40) for ratio in RATIOS]
        gains[name], plain[name] = [over for over, _ in found], [over for _, over in found]
    one = RATIOS.index(1.0)
    added = "Added by us."
    best = max((over, name, RATIOS[at]) for name, each in gains.items() for at, over in enumerate(each))
    sixteen = even(16, 4, 1.0)
    rows: list[Row] = [
        make_row(
            "largest speed-up over pipelined BSP",
            None,
            best[0],
            "× as fast",
            f"{added} With {best[1]}, and a compute time of {best[2]:.2g} times that of all pushes. The additional "
            "samples that staleness costs are not included.",
        ),
        make_row(
            "16 workers, 4 servers, ratio 1: over pipelined BSP",
            None,
            gains["16 workers"][one],
            "× as fast",
            f"{added} The formula gives {expected(sixteen):.2f}. Pipelined BSP takes C/16 longer than the formula "
            "says, because the last slice can return only once it is complete.",
        ),
        make_row("16 workers, 4 servers, ratio 1: over plain BSP", None, plain["16 workers"][one], "× as fast", added),
        make_row(
            "16 workers, 1 server, ratio 1: over pipelined BSP",
            None,
            gains["16 workers, 1 server"][one],
            "× as fast",
            f"{added} The formula gives {expected(even(16, 1, 1.0)):.2f}. With fewer servers per worker, a worker's "
            "own transfers are a smaller part of a round.",
        ),
    ]
    for name, each in gains.items():
        ours = _region([ratio for ratio, over in zip(RATIOS, each, strict=True) if over >= WORTHWHILE])
        note = f"{added} At most {max(each):.2f} times as fast."
        rows.append(
            make_row(f"{name}: compute/communication at which R²SP is at least 10% faster", None, ours, "ratio", note)
        )
    lines = [PlotLine(name, RATIOS, tuple(each)) for name, each in gains.items()]
    for name in ("16 workers", "16 workers, 1 server"):
        by_formula = tuple(expected(even(*clusters[name], ratio)) for ratio in RATIOS)
        lines.append(PlotLine(f"{name}, by formula", RATIOS, by_formula))
    axis = "compute seconds / seconds of all pushes, C = N·S/(K·B)"
    plots = (
        Plot("R²SP's speed-up over pipelined BSP", axis, "× as fast", tuple(lines), log=True),
        Plot(
            "R²SP's speed-up over plain BSP",
            axis,
            "× as fast",
            tuple(PlotLine(name, RATIOS, tuple(each)) for name, each in plain.items()),
            log=True,
        ),
    )
    return Figure("map", "R²SP against pipelined BSP over the ratio of compute to communication", tuple(rows), plots)


def even(workers: int, servers: int, ratio: float) -> ClusterSpec:
    """Return a cluster of equal machines whose links carry the model in a second, with compute `ratio` · N·S/(K·B)."""
    size = 100e6
    compute = ratio * workers / servers
    return ClusterSpec(
        name="even",
        model_bytes=size,
        servers=servers,
        server_link=size,
        latency=50e-6,
        apply_rate=10e9,
        lease=30.0,
        workers=(WorkerSpec(link=size, batch=32, samples_per_second=32 / compute),) * workers,
    )


def expected(spec: ClusterSpec) -> float:
    """Return pipelined BSP's time over R²SP's: (compute + C) / max(compute + 2·S/b, C)."""
    worker = spec.workers[0]
    compute, C = worker.compute_seconds(), len(spec.workers) * spec.model_bytes / (spec.servers * spec.server_link)
    return (compute + C) / max(compute + 2 * spec.one_way(worker), C)


def _gains(spec: ClusterSpec, iterations: int) -> tuple[float, float]:
    """Return R²SP's speed-up over pipelined and over plain BSP. A barrier settles at once, so 12 rounds are enough."""
    r2sp, pipelined, plain = (
        report(spec, policy, count).mean_iteration_seconds
        for policy, count in (("r2sp", iterations), (PIPELINED, 12), ("bsp", 12))
    )
    return pipelined / r2sp, plain / r2sp


def _region(ratios: list[float]) -> str:
    """Return the range of the ratios. The speed-up rises once and falls once, so they have no gaps."""
    return f"{min(ratios):.2g} to {max(ratios):.2g}" if ratios else "none"
