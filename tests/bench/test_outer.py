"""The theory of outer rules, beside facts that are known, and beside a simulation with random noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks import outer
from benchmarks.outer import growth, largest_rate, make_round, noise, radius, rounds_to_tenth
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
    own_part,
)

GAINS = np.linspace(0.02, 1, 50)
WORKERS = (2, 4, 8)


def largest_root(coefficients: list[float]) -> float:
    return float(np.abs(np.roots(coefficients)).max())


@pytest.mark.parametrize(("rate", "beta"), [(0.7, 0.9), (1.0, 0.5), (0.1, 0.9)])
@pytest.mark.parametrize("make", [nesterov, delayed_nesterov])
def test_synchronous_nesterov_is_that_of_the_textbook(
    make: Callable[[float, float], Rule], rate: float, beta: float
) -> None:
    kept = 1 - rate * GAINS
    known = [largest_root([1, -(1 + beta) * each, beta * each]) for each in kept]
    assert radius(make(rate, beta), 1, GAINS) == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize("workers", WORKERS)
def test_averaging_by_turns_is_gradient_descent_with_a_delay(workers: int) -> None:
    for gain in (*GAINS, -0.5, -3.0):
        turn = largest_root([1, -1, *[0] * (workers - 2), gain / workers])
        assert radius(averaging(), workers, [gain])[0] == pytest.approx(turn**workers)
    limit = 2 * workers * np.sin(np.pi / (4 * workers - 2))
    assert largest_rate(lambda rate, beta: averaging(rate), workers, 0.0) == pytest.approx(limit, abs=0.005)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "rule",
    [
        averaging(),
        averaging(1.2, pulls=2),
        mean_of_ends(),
        compensated(),
        own_part(),
        anchored(),
        beginning_ahead(keep=0.5, anchor=0.5),
        half_momentum(1.0, 0.8),
        half_momentum(),
    ],
    ids=lambda rule: rule.name,
)
def test_stable_for_every_gain_of_local_steps(rule: Rule, workers: int) -> None:
    assert (radius(rule, workers, GAINS) < 1).all()


def test_momentum_by_turns_is_unstable_where_local_steps_converge() -> None:
    assert radius(nesterov(per="turn"), 2, [1.0])[0] > 1
    for workers in (4, 8):
        assert radius(nesterov(per="turn"), workers, [1.0])[0] > 1
        assert radius(nesterov(per="round"), workers, [1.0])[0] > 1
    assert radius(delayed_nesterov(), 4, [1.0])[0] < 1 < radius(delayed_nesterov(), 8, [1.0])[0]


def test_a_worker_that_keeps_all_of_its_own_part_is_unstable_with_eight_workers() -> None:
    assert radius(own_part(1.0), 8, [1.0])[0] > 1
    assert np.isnan(noise(own_part(1.0), 8, [1.0])[0])


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("rule", [own_part(), anchored(), half_momentum(1.0, 0.8)], ids=lambda rule: rule.name)
def test_corrections_lower_the_noise_and_do_not_slow_down_slow_directions(rule: Rule, workers: int) -> None:
    fast = GAINS[GAINS >= 0.5]
    assert (noise(rule, workers, fast) < noise(averaging(), workers, fast)).all()
    assert rounds_to_tenth(rule, workers, [0.01])[0] <= rounds_to_tenth(averaging(), 1, [0.01])[0]


def test_turns_slow_down_what_grows_and_less_noise_slows_it_down_more() -> None:
    growing = [0.5, 1.0, 3.0]
    by_turns = growth(averaging(), 8, growing)
    assert (np.diff(by_turns) < 0).all() and by_turns[-1] < 0.8
    for rule in (anchored(), half_momentum(1.0, 0.8), mean_of_ends(), compensated()):
        assert (growth(rule, 8, growing) < by_turns).all()
    for rule in (own_part(), beginning_ahead(), beginning_ahead(0.0, keep=0.5), beginning_ahead(keep=0.5)):
        assert (growth(rule, 8, growing) > by_turns).all()


@pytest.mark.parametrize("workers", WORKERS)
def test_with_a_pull_at_every_turn_the_mean_of_the_workers_moves_as_under_a_barrier(workers: int) -> None:
    rule = averaging(pulls=workers)
    assert growth(rule, workers, [0.1, 1.0, 10.0]) == pytest.approx(1)
    assert (noise(rule, workers, GAINS) < 1.001).all()
    random = np.random.default_rng(3)
    models = list(random.standard_normal((workers, 5)))
    server = np.zeros(5)
    state = State(server, server, server, models, [server] * workers, [server] * workers, [server] * workers)
    rule.exchange(state, 0)
    for other in range(1, workers):
        rule.pull(state, other)
    assert np.mean(state.local, axis=0) == pytest.approx(np.mean(models, axis=0))


def test_more_pulls_are_faster_and_less_noisy() -> None:
    rules = [averaging(pulls=pulls) for pulls in (1, 2, 4, 8)]
    assert (np.diff([growth(rule, 8, [0.5, 3.0]) for rule in rules], axis=0) > 0).all()
    assert (np.diff([noise(rule, 8, [0.5, 0.9, 1.0]) for rule in rules], axis=0) < 0).all()


@pytest.mark.parametrize("workers", WORKERS)
def test_the_mean_of_end_points_drags(workers: int) -> None:
    late = 1 + (workers - 1) / (2 * workers)  # the mean age of the end points, in rounds
    known = rounds_to_tenth(averaging(), 1, [0.01])[0] * late
    assert rounds_to_tenth(mean_of_ends(), workers, [0.01])[0] == pytest.approx(known, rel=0.01)


@pytest.mark.parametrize("workers", WORKERS)
def test_the_mean_of_end_points_as_the_last_exchange_is_as_quiet_as_a_barrier(workers: int) -> None:
    assert noise(averaging(), workers, GAINS, of_ends=True) == pytest.approx(1, abs=0.03)
    assert noise(averaging(), workers, [1.0])[0] > 1.19


def test_an_anchor_of_one_is_averaging_and_under_a_barrier_every_anchor_is() -> None:
    assert noise(anchored(1.0), 4, GAINS) == pytest.approx(noise(averaging(), 4, GAINS))
    assert noise(anchored(0.4), 1, GAINS) == pytest.approx(1)


@pytest.mark.parametrize(
    "rule",
    [
        averaging(),
        averaging(pulls=2),
        averaging(pulls=4),
        own_part(),
        anchored(),
        beginning_ahead(keep=0.5, anchor=0.5),
        half_momentum(),
        delayed_nesterov(0.3),
        mean_of_ends(),
        compensated(),
    ],
    ids=lambda rule: rule.name,
)
def test_the_noise_is_that_of_a_simulation(rule: Rule) -> None:
    workers, chains, rounds, gain = 4, 4000, 150, 0.6
    left = (1 - gain) ** (1 / workers)
    random = np.random.default_rng(7)
    zero = np.zeros(chains)
    state = State(zero, zero, zero, [zero] * workers, [zero] * workers, [zero] * workers, [zero] * workers)
    squares = []
    for number in range(rounds):
        for turn in range(workers):
            state.local = [left * each + random.standard_normal(chains) for each in state.local]
            rule.exchange(state, turn)
            for since in range(1, workers):
                if since * rule.pulls % workers == 0:
                    rule.pull(state, (turn - since) % workers)
        if number >= 50:
            squares.append(np.mean(state.model**2))
    synchronous = 1 / (workers * (1 - left**2))
    assert np.mean(squares) / synchronous == pytest.approx(noise(rule, workers, [gain])[0], rel=0.03)


def test_only_what_counts_for_the_model_is_in_the_state() -> None:
    gain, workers = 0.3, 4
    made = make_round(averaging(), workers, [gain])
    assert made.changes.shape == (1, 1 + 2 * workers, 1 + 2 * workers)  # the model, the workers, and where they started
    assert made.model @ made.changes[0] @ made.begins == pytest.approx(
        1 - sum(1 - (1 - gain) ** (k / 4) for k in (1, 2, 3, 4)) / 4
    )


def test_the_tables_and_the_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(outer, "RULES", (averaging(), nesterov(per="turn")))
    monkeypatch.setattr(outer, "FAMILIES", {"averaging": outer.FAMILIES["averaging"]})
    outer.compare()
    printed = capsys.readouterr().out
    assert "| averaging | 1.00 | 229 | 22 | 0.96 | 0.88 | 0.84 | 0.78 | 1.04 | 1.22 | 1.53 |" in printed
    assert "| Nesterov 0.7/0.9, β per turn | 0.20 |" in printed
    assert "| 8 | 0.5 | 1.67 |" in printed
    pytest.importorskip("matplotlib")
    outer.draw(tmp_path / "outer.png")
    assert (tmp_path / "outer.png").stat().st_size > 10_000
