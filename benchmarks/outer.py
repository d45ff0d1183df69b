"""Which outer rules suit workers that make local steps and take turns, on parabolas. Takes seconds.

python benchmarks/staleness.py outer [--plot FILE]

In a direction of curvature λ, H local steps of rate η bring a worker from x to (1−κ)·x. The gain κ = 1 − (1−η·λ)^H is
small in slow directions, and 1 in directions that converge within the local steps. In a direction that is being
learned, the curvature is negative, and x grows: local steps multiply it by 1 + g, so that κ = −g. N workers (or groups)
exchange one after the other, so a difference is computed from a model that is N−1 versions old.

- `stable to κ`: up to this gain all eigenvalues of a round, of everything that counts for the model, are below 1.
- `growth`: the logarithm of the growth in a round, as a part of that of synchronous averaging.
- `noise`: the stationary variance of the server's model, if all local steps of all workers have noise of their own, in
  units of that of synchronous averaging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.outer_rules import (
    Rule,
    State,
    anchored,
    averaging,
    beginning_ahead,
    compensated,
    delayed_nesterov,
    half_momentum,
    mean_of_ends,
    nesterov,
    nesterov_to_ends,
    own_part,
)

Numbers = NDArray[np.float64]
Gains = Sequence[float] | Numbers

WORKERS = 8
SLOW = (0.01, 0.1)
GROWING = (0.1, 0.5, 1.0, 3.0)
NOISY = (0.1, 0.5, 1.0)
SYNCHRONOUS = (averaging(), nesterov(), half_momentum(1.0, 0.8))
RULES = (
    averaging(),
    averaging(0.7),
    averaging(1.3),
    nesterov(full=True, per="turn"),
    nesterov(per="turn"),
    nesterov(per="round"),
    delayed_nesterov(),
    delayed_nesterov(0.3),
    mean_of_ends(),
    nesterov_to_ends(),
    compensated(),
    half_momentum(1.0, 0.8),
    half_momentum(),
    anchored(),
    anchored(0.5),
    beginning_ahead(),
    beginning_ahead(anchor=0.5),
    beginning_ahead(ahead=0.0, keep=0.5),
    beginning_ahead(ahead=0.0, keep=0.8),
    beginning_ahead(keep=0.5),
    beginning_ahead(keep=0.5, anchor=0.5),
    own_part(),
    own_part(1.0),
    averaging(pulls=2),
    averaging(pulls=4),
    averaging(pulls=8),
    averaging(1.2, pulls=4),
)
GROUPS = (
    (2, averaging()),
    (2, beginning_ahead(keep=0.25, anchor=0.5)),
    (2, averaging(pulls=2)),
    (4, averaging()),
    (4, averaging(pulls=2)),
    (4, averaging(pulls=4)),
)
FAMILIES: dict[str, Callable[[float, float], Rule]] = {  # of what a difference adds in the end, and of β
    "averaging": lambda total, beta: averaging(total),
    "Nesterov, β per turn": lambda total, beta: nesterov(total * (1 - beta), beta, per="turn"),
    "Nesterov, β per round": lambda total, beta: nesterov(total * (1 - beta), beta, per="round"),
    "delayed Nesterov": lambda total, beta: delayed_nesterov(total * (1 - beta), beta),
    "half momentum": half_momentum,
}
LONGEST = 1000  # rounds


def compare() -> None:
    """Print all tables."""
    columns = [
        "stable to κ",
        *(f"rounds to 1/10, κ = {each:g}" for each in SLOW),
        *(f"growth, g = {each:g}" for each in GROWING),
        *(f"noise, κ = {each:g}" for each in NOISY),
    ]
    table("BSP", ["", *columns], [[rule.name.removesuffix(", β per round"), *row(rule, 1)] for rule in SYNCHRONOUS])
    table(f"{WORKERS} workers by turns", ["", *columns], [[rule.name, *row(rule, WORKERS)] for rule in RULES])
    table("Groups by turns", ["groups", "", *columns], [[str(M), rule.name, *row(rule, M)] for M, rule in GROUPS])
    table(
        "Noise of averaging, if the last exchange is the mean of end points",
        ["workers", *(f"κ = {each:g}" for each in NOISY)],
        [[str(N), *map(number, noise(averaging(), N, NOISY, of_ends=True))] for N in (2, 4, 8)],
    )
    table(
        "Largest stable rate: how much a difference adds in the end. It is 1 for averaging, and 7 for Nesterov 0.7/0.9",
        ["workers", "β", *FAMILIES],
        [
            [str(N), f"{beta:g}", *(number(largest_rate(make, N, beta)) for make in FAMILIES.values())]
            for N in (1, 2, 4, 8)
            for beta in (0.5, 0.9)
        ],
    )


def row(rule: Rule, workers: int) -> list[str]:
    rounds = [number(each, 0) for each in rounds_to_tenth(rule, workers, SLOW)]
    rest = [*growth(rule, workers, GROWING), *noise(rule, workers, NOISY)]
    return [number(stable_to(rule, workers)), *rounds, *map(number, rest)]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"{title}\n")
    for cells in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(cells) + " |")
    print()


def number(value: float, digits: int = 2) -> str:
    return "–" if np.isnan(value) else f"{value:.{digits}f}"


@dataclass(frozen=True)
class Round:
    """A round as matrices, one for each gain. The state is what counts for the model, now or later.

    `changes` is how a round changes the state, and `enters` how the noise of each worker's steps enters it. `model` is
    the part of the state that is looked at, and `begins` the state before a training, at a distance of 1.
    """

    changes: Numbers
    enters: Numbers
    model: Numbers
    begins: Numbers


def make_round(rule: Rule, workers: int, gains: Gains, of_ends: bool = False) -> Round:
    """Carry out a round with rows of coefficients. With `of_ends`, the mean of end points stands for the model."""
    N = workers
    size = 3 + 4 * N
    unit = np.repeat(np.eye(size + N * N)[:, None], len(gains), axis=1)  # [coordinate, gain, coordinate]
    lists = [list(unit[first : first + N]) for first in range(3, size, N)]
    state = State(unit[0], unit[1], unit[2], lists[0], lists[1], lists[2], lists[3])
    noise_of = iter(unit[size:])
    for turn in range(N):
        state.local = [kept(gains, N)[:, None] * each + next(noise_of) for each in state.local]
        rule.exchange(state, turn)
        for worker in range(N):
            since = (turn - worker) % N
            if since and since * rule.pulls % N == 0:
                rule.pull(state, worker)
    after = [state.model, state.momentum, state.summed, *state.local, *state.start, *state.ended, *state.seen]
    changes = np.stack(after, axis=1)
    model, begins = np.zeros(size), np.ones(size)
    model[slice(3 + 2 * N, 3 + 3 * N) if of_ends else 0] = 1 / N if of_ends else 1
    begins[1:3] = 0  # the momentum and the sum
    counts = model > 0
    for _ in range(size):  # adds what these depend on, until nothing is missing
        counts = counts | (changes[:, counts, :size] != 0).any(axis=(0, 1))
    return Round(changes[:, counts, :size][:, :, counts], changes[:, counts, size:], model[counts], begins[counts])


def kept(gains: Gains, workers: int) -> Numbers:
    """Return what is left of a worker's distance when it has made its local steps between two turns of the job."""
    left: Numbers = (1 - np.asarray(gains)) ** (1 / workers)
    return left


def radius(rule: Rule, workers: int, gains: Gains) -> Numbers:
    """Return the largest eigenvalue of a round, for each gain."""
    largest: Numbers = np.abs(np.linalg.eigvals(make_round(rule, workers, gains).changes)).max(axis=1)
    return largest


def is_stable(rule: Rule, workers: int, gains: Gains) -> NDArray[np.bool_]:
    return radius(rule, workers, gains) < 1 - 1e-9


def stable_to(rule: Rule, workers: int) -> float:
    """Return the largest gain, up to 1, below the first unstable one."""
    gains = np.linspace(0.01, 1, 100)
    unstable = (~is_stable(rule, workers, gains)).nonzero()[0]
    first = unstable[0] if len(unstable) else len(gains)
    return float(gains[first - 1]) if first else 0.0


def growth(rule: Rule, workers: int, growths: Gains) -> Numbers:
    """Return how fast a growing direction grows, as a part of how fast it grows under synchronous averaging."""
    grown = np.asarray(growths)
    relative: Numbers = np.log(radius(rule, workers, -grown)) / np.log1p(grown)
    return relative


def rounds_to_tenth(rule: Rule, workers: int, gains: Gains) -> Numbers:
    """Return the rounds after which the model stays within a tenth of its first distance; NaN if it never does."""
    made, stable = make_round(rule, workers, gains), is_stable(rule, workers, gains)
    changes = made.changes * stable[:, None, None]
    state = np.tile(made.begins[:, None], (len(gains), 1, 1))
    last = np.zeros(len(gains))
    for rounds in range(1, LONGEST + 1):
        state = changes @ state
        last[np.abs(made.model @ state)[:, 0] > 0.1] = rounds
    return np.where(stable & (last < LONGEST), last + 1, np.nan)


def noise(rule: Rule, workers: int, gains: Gains, of_ends: bool = False) -> Numbers:
    """Return the variance of the model, or of the mean of the newest end points, after a round; NaN if unstable.

    The unit is the variance of synchronous averaging with as many workers, whose steps are as noisy.
    """
    made, stable = make_round(rule, workers, gains, of_ends), is_stable(rule, workers, gains)
    powers = made.changes * stable[:, None, None]
    variance = made.enters @ made.enters.transpose(0, 2, 1)
    while np.abs(powers).max() > 1e-12:  # sums the powers, doubled each time
        variance = variance + powers @ variance @ powers.transpose(0, 2, 1)
        powers = powers @ powers
    synchronous = 1 / (workers * (1 - kept(gains, workers) ** 2))
    return np.where(stable, made.model @ variance @ made.model / synchronous, np.nan)


def largest_rate(make: Callable[[float, float], Rule], workers: int, beta: float) -> float:
    """Return the largest rate, up to 20, with which all gains up to 1 are stable."""
    gains = np.linspace(0.04, 1, 25)
    low, high = 0.0, 20.0
    while high - low > 0.005:
        middle = (low + high) / 2
        if is_stable(make(middle, beta), workers, gains).all():
            low = middle
        else:
            high = middle
    return low


def draw(path: Path) -> None:
    """Draw the growth and the noise of the server's model, with 8 workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    gains, growths = np.linspace(0.02, 1, 99), np.geomspace(0.05, 10, 50)
    rules = (averaging(), anchored(), half_momentum(1.0, 0.8), *(averaging(pulls=pulls) for pulls in (2, 4, 8)))
    for rule in rules:
        left.plot(growths, growth(rule, WORKERS, growths), label=rule.name)
        right.plot(gains, noise(rule, WORKERS, gains), label=rule.name)
    left.set_xscale("log")
    left.set_ylim(0.5, 1.1)
    left.set_xlabel("g: local steps multiply by 1 + g")
    left.set_ylabel("speed of growth, as a part of BSP's")
    right.set_ylim(0.5, 1.6)
    right.set_xlabel("gain κ of the local steps")
    right.set_ylabel("noise, in units of BSP's")
    right.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)
