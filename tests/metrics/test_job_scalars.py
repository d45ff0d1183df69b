"""The rows of scalars that a tracker gets."""

from __future__ import annotations

from itertools import pairwise

import pytest

from metrics.test_job_metrics import EVENTS
from paceline.metrics.job_scalars import MAX_NAMES, JobScalars, ScalarRow
from paceline.observe.observer import Tee, replay
from paceline.observe.summary import Summary
from paceline.policies import make
from paceline.simulate import Cluster, load_cluster


class Rows:
    """The rows and the parameters that JobScalars has passed on."""

    def __init__(self) -> None:
        self.rows: list[ScalarRow] = []
        self.parameters: dict[str, object] = {}
        self.scalars = JobScalars(self.rows.append, self.parameters.update)


def test_the_rows_of_a_small_job() -> None:
    seen = Rows()
    replay(EVENTS, seen.scalars)
    seen.scalars.flush()
    first, last = seen.rows
    assert (first.version, first.seconds) == (1, 7)
    assert first.values == {
        "loss": 0.5,
        "staleness": 3,
        "batch_size": 32,
        "samples_per_second": 32 / 7,
        "waiting_share": 1 / 14,
        "members": 2,
    }
    assert (last.version, last.values["accuracy"], last.values["epoch"], last.values["members"]) == (1, 0.75, 0, 1)
    assert "cosine" not in last.values
    assert seen.parameters["optimizer"] == "SGD(lr=0.1)"
    assert (seen.parameters["policy"], seen.parameters["model elements"]) == ("r2sp", 250)


@pytest.mark.parametrize("policy", ["bsp", "asp", "safa"])
def test_rows_come_once_a_second_and_together_give_the_report(policy: str) -> None:
    seen, summary = Rows(), Summary()
    Cluster(load_cluster("r2sp-b").with_jitter(0.2), make(policy), 40, observer=Tee(seen.scalars, summary)).run()
    seen.scalars.flush()
    report, times = summary.report(), [row.seconds for row in seen.rows]
    assert all(later - earlier >= 1 for earlier, later in pairwise(times[:-1]))
    samples, before = 0.0, 0.0
    for row in seen.rows:
        samples += row.values.get("samples_per_second", 0.0) * (row.seconds - before)
        before = row.seconds
        assert 0 <= row.values.get("waiting_share", 0.0) <= 1
    assert samples == pytest.approx(report.samples_per_second * report.seconds)


def test_names_are_bounded_and_reports_of_many_clients_are_averaged() -> None:
    seen = Rows()
    for client in range(10_000):
        seen.scalars.measured(1.0, client, "accuracy", client % 2)
        seen.scalars.measured(1.0, client, f"mine-{client}", 1.0)
    seen.scalars.flush()
    (row,) = seen.rows
    assert row.values["accuracy"] == 0.5
    assert len(row.values) <= MAX_NAMES + 1
