"""Advice about local steps and small updates."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from advise.clusters import cluster
from paceline.advise.candidates import DDP, DILOCO, RINGS, Candidate, candidates
from paceline.advise.evaluate import Estimate, estimate
from paceline.advise.explain import TIME_ALONE, Advice, advise, reasons
from paceline.cli.advise_output import table_of
from paceline.simulate import load_cluster

EIGHT_SITES = Path(__file__).parents[2] / "examples" / "clusters" / "eight-sites.toml"


def advice(compute: float = 0.12, steps: tuple[int, ...] = (50,), updates: str = "int4", now: str = DDP) -> Advice:
    return advise(cluster(compute), Candidate(now), 12, local_steps=steps, updates=updates)


def test_synchronous_diloco_over_a_ring_is_a_rival_plain_and_overlapped() -> None:
    found = candidates(cluster(0.1), (50,), "int4")
    assert [each for each in found if each.policy in RINGS] == [
        Candidate(DILOCO, local_steps=50),
        Candidate(DILOCO, local_steps=50, overlap=True),
    ]
    policies = [each for each in found if each.policy not in RINGS]
    assert {(each.local_steps, each.updates) for each in policies} == {(50, "int4")}
    assert {"bsp", "r2sp", "r2sp:groups=2", "asp", "ssp"} <= {each.policy for each in policies if not each.overlap}
    assert {"bsp", "r2sp", "r2sp:groups=2"} <= {each.policy for each in policies if each.overlap}


def test_several_numbers_of_steps_are_compared_from_the_smallest_on() -> None:
    found = candidates(cluster(0.1), (200, 1, 50, 50))
    steps = [each.local_steps for each in found]
    assert steps == sorted(steps)
    assert set(steps) == {1, 50, 200}
    assert len(set(found)) == len(found)
    assert [each for each in found if each.local_steps == 1] == candidates(cluster(0.1))


def test_one_worker_and_backups_leave_out_the_same_candidates_as_with_gradients() -> None:
    assert all(each.policy not in RINGS and not each.colocated for each in candidates(cluster(0.1, workers=1), (50,)))
    backed = candidates(replace(cluster(0.1), replicas=1), (50,))
    assert not any(each.streamed or each.colocated or "pipeline" in each.policy for each in backed)


def test_the_time_of_diloco_is_as_calculated_by_hand() -> None:
    spec = replace(cluster(0.12, workers=8, slow=2.0), latency=0.0)  # a link carries the model in 0.1 s
    plain = estimate(spec, Candidate(DILOCO, local_steps=50), 10)
    assert plain.iteration_seconds == pytest.approx(50 * 0.24 + 2 * 7 / 8 * 0.1)
    assert plain.samples_per_second == pytest.approx(8 * 50 * 32 / plain.iteration_seconds)
    hidden = estimate(spec, Candidate(DILOCO, local_steps=50, overlap=True), 10)
    assert hidden.iteration_seconds == pytest.approx(50 * 0.24)
    thin = replace(spec, workers=tuple(replace(worker, link=worker.link / 100) for worker in spec.workers))
    bound = estimate(thin, Candidate(DILOCO, local_steps=50, overlap=True), 10)
    assert bound.iteration_seconds == pytest.approx(17.5)


def test_a_round_of_a_policy_is_as_calculated_by_hand() -> None:
    spec = replace(cluster(0.12, workers=8, model=4 * 4096 * 300), latency=0.0, apply_rate=1e15)
    update = 4096 * 300 / 2 + 2 * 64 * 300  # bytes in int4
    barrier = estimate(spec, Candidate("bsp", local_steps=50, updates="int4"), 24)
    assert barrier.iteration_seconds == pytest.approx(6.0 + 2 * 8 * update / 50e6, rel=1e-3)
    turns = estimate(spec, Candidate("r2sp", local_steps=50, updates="int4"), 24)
    assert turns.iteration_seconds == pytest.approx(6.0 + 2 * update / 50e6, rel=1e-2)
    hidden = estimate(spec, Candidate("bsp", local_steps=50, updates="int4", overlap=True), 24)
    assert hidden.iteration_seconds == pytest.approx(6.0, rel=1e-3)


def test_local_steps_have_no_price_and_the_advice_says_what_it_leaves_out() -> None:
    found = advice(steps=(1, 50), now="asp")
    assert {each.price for each in found.ranked} == {1.0}
    assert TIME_ALONE in found.reasons
    assert TIME_ALONE not in advice(steps=(1,)).reasons
    assert any(each.price > 1 for each in advice(steps=(1,)).ranked)


def test_the_fewest_local_steps_are_advised_that_are_nearly_as_fast_as_more() -> None:
    found = advice(compute=1.0, steps=(50, 100, 500))
    assert found.chosen.candidate == Candidate(DILOCO, local_steps=50)
    assert found.ranked[0].samples_per_second > found.chosen.samples_per_second
    thin = advice(compute=0.0001, steps=(50, 100, 5000))  # an exchange takes longer than 50 steps
    assert thin.chosen.candidate.local_steps == 5000


def test_more_local_steps_are_named_as_the_drawback_of_a_little_more_speed() -> None:
    fastest = Estimate(Candidate("bsp", local_steps=500), 40.0, 101.0)
    chosen = Estimate(Candidate("bsp", local_steps=50), 4.04, 100.0)
    assert (
        "bsp, 500 local steps would be 1.0% faster, with 500 local steps instead of 50. A gain of less than 3% is not "
        "worth it."
    ) in reasons(cluster(0.1), chosen, [fastest, chosen], chosen)


def test_if_diloco_is_advised_the_best_scheme_of_paceline_is_named_too() -> None:
    found = advice(compute=1.0)
    assert found.chosen.candidate.policy == DILOCO
    own = next(each.candidate.name for each in found.ranked if each.candidate.policy not in RINGS)
    said = "\n".join(found.reasons)
    assert f"torchft does. Of paceline's own schemes, {own} is the fastest: it is as fast." in said
    assert "Pass local_steps" not in said


def test_the_reasons_fit_local_steps() -> None:
    spec = cluster(0.02, workers=8, slow=4.0)  # a barrier waits for the slow worker
    found = advise(spec, Candidate(DDP), 24, local_steps=(50,), updates="int4")
    assert found.chosen.candidate.policy == "bsp:tune_batches=true"
    assert found.chosen.candidate.colocated
    said = "\n".join(found.reasons)
    assert "An exchange after 50 steps, in int4, is 0.664 MB in each direction: 1/376 of" in said
    assert "Pass local_steps=50 to paceline.join in the script." in said
    assert "all workers begin a round with the same model" in said
    assert "Your learning rate can stay" not in said
    assert "each carries 1.8 times an update" in said


def test_chance_averages_out_over_the_steps_of_a_round() -> None:
    spec = cluster(0.3, workers=8).with_jitter(0.4)

    def costs(steps: int) -> list[str]:
        found = advise(spec, Candidate(DDP), 8, local_steps=(steps,))
        return [reason for reason in found.reasons if "Compute times vary" in reason]

    assert costs(1)
    assert not costs(200)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_names_the_steps(width: int) -> None:
    found = advice(steps=(1, 50))
    file = io.StringIO()
    Console(width=width, file=file).print(table_of(found, [], "title", width))
    lines = file.getvalue().splitlines()
    assert "steps" in lines[1]
    assert "needs" not in lines[1]
    assert all(len(line) <= width for line in lines)
    assert any("diloco overlapped" in line and " 50 " in line for line in lines)
    assert not any("…" in line for line in lines)


def test_eight_sites_are_advised_on() -> None:
    """Links of 100 Mbit/s and a model of 1 GB: local steps decide, then the codec, then the turns."""
    spec = load_cluster(str(EIGHT_SITES))
    assert spec.model_bytes == 1e9
    found = advise(spec, Candidate(DDP), 60, local_steps=(spec.local_steps,), updates=spec.updates)
    rate = {
        (each.candidate.policy, each.candidate.streamed, each.candidate.colocated, each.candidate.overlap): (
            each.samples_per_second
        )
        for each in found.ranked
    }
    turns, barrier = rate["r2sp", False, False, False], rate["bsp", False, False, False]
    assert turns > 1.4 * barrier
    assert turns > rate[DILOCO, False, False, False], "float32 over a ring, and nothing computed meanwhile"
    hidden = rate["r2sp", False, False, True]
    assert hidden > turns
    assert rate[DILOCO, False, False, True] == pytest.approx(hidden, rel=0.03), "both exchanges hide behind a round"
    assert barrier > 20 * rate[DDP, False, False, False]
