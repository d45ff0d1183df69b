"""The live view of a running job, as a table or a line."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import NoReturn

import pytest
from rich.console import Console, RenderableType

from paceline.observe.live import attendance, line, table
from paceline.observe.live_state import MAX_METRICS, SMOOTH, Live, LiveWorker
from paceline.observe.observer import Tee, replay
from paceline.observe.summary import Summary
from paceline.observe.trace import (
    Applied,
    Arrived,
    Began,
    Cancelled,
    Computed,
    Discarded,
    Event,
    Granted,
    Joined,
    Kept,
    Left,
    Measured,
    Progressed,
    Turned,
)
from paceline.policies import make, names, without_mean_weights
from paceline.simulate import Cluster, load_cluster
from paceline.simulate.random_faults import with_random_faults


def watched(*events: Event, window: float = 10.0) -> Live:
    live = Live(window=window)
    replay(events, live)
    return live


def rendered(what: RenderableType, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, legacy_windows=False).print(what)
    return [text.rstrip() for text in out.getvalue().splitlines()]


def iteration(worker: int, number: int, start: float, samples: int = 10, loss: float | None = None) -> list[Event]:
    """Return the events of an iteration: three seconds of computing and one of pushing. Then the worker waits."""
    return [
        Granted(start, worker, None, 0),
        Computed(start + 3, worker),
        Turned(start + 3, worker),
        Arrived(start + 4, worker, number, samples, loss),
        Applied(start + 4, number, (worker,), (number,), (0,)),
    ]


# One worker


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (Granted(1, 0, None, 0), "computing"),
        (Computed(1, 0), "waiting"),
        (Turned(1, 0), "pushing"),
        (Arrived(1, 0, 1, 8), "waiting"),
        (Cancelled(1, 0), "waiting"),
        (Left(1, 0), "left"),
    ],
)
def test_each_event_sets_the_state_of_its_worker(event: Event, state: str) -> None:
    live = watched(Joined(0, 0), Granted(0, 0, None, 0), event)
    assert live.workers[0].state == state


def test_a_worker_waits_for_a_grant_and_for_a_turn() -> None:
    live = watched(Joined(0, 0), Granted(0, 0, None, 0), Computed(3, 0), Turned(4, 0), Arrived(5, 0, 1, 8))
    worker = live.workers[0]
    assert worker.waiting_share(5) == pytest.approx(1 / 5)
    assert worker.waiting_share(10) == pytest.approx(6 / 10), "it is still waiting"
    replay([Granted(10, 0, None, 0)], live)
    assert worker.waiting_share(12) == pytest.approx(6 / 12)
    assert live.waiting_share(12) == pytest.approx(6 / 12)


def test_rates_cover_only_the_recent_past() -> None:
    events: list[Event] = [Joined(0, 0)]
    for number in range(1, 11):  # a hundred seconds, of which 60% are spent waiting
        events += iteration(0, number, start=10.0 * number, samples=10)
    for number in range(11, 31):  # eighty seconds without waiting
        events += iteration(0, number, start=110.0 + 4 * (number - 11), samples=40)
    live = watched(*events)
    now = live.time
    assert now == 190.0
    assert live.workers[0].samples_per_second(now) == pytest.approx(10.0)
    assert live.workers[0].waiting_share(now) == 0.0
    assert live.samples_per_second(now) == pytest.approx(10.0, rel=0.3), (
        "the window may contain one arrival more or less"
    )
    assert live.waiting_share(now) == 0.0


def test_rates_are_measured_over_whole_iterations() -> None:
    events: list[Event] = [Joined(0, 0)]
    for number in range(1, 4):
        events += iteration(0, number, start=100.0 * number, samples=50)
    worker = watched(*events).workers[0]
    for now in (304.0, 350.0, 400.0):
        assert worker.samples_per_second(now) == pytest.approx(50 / 100), "the next arrival is not overdue yet"
    assert worker.samples_per_second(1000.0) < 0.1, "the rate of a worker that hangs falls"


def test_a_grant_starts_the_next_iteration() -> None:
    live = watched(Joined(0, 0), *iteration(0, 1, 0.0))
    assert live.workers[0].iteration == 1
    replay([Granted(5, 0, None, 0)], live)
    assert live.workers[0].iteration == 2


def test_a_worker_that_returns_starts_from_zero() -> None:
    live = watched(Joined(0, 0), *iteration(0, 1, 0.0), Left(5, 0), Joined(50, 0, 2))
    worker = live.workers[0]
    assert (worker.state, worker.incarnation, worker.iteration) == ("waiting", 2, 0)
    assert worker.samples_per_second(50.0) == 0.0
    assert worker.waiting_share(51.0) == 0.0
    assert live.members == 1


def test_a_worker_shows_its_last_staleness_and_loss() -> None:
    live = watched(
        Joined(0, 0),
        *iteration(0, 1, 0.0, loss=2.5),
        Arrived(9, 0, 2, 10, 1.5),
        Applied(9, 2, (0,), (2,), (7,)),
    )
    assert (live.workers[0].staleness, live.workers[0].loss, live.workers[0].iteration) == (7, 1.5, 2)
    assert live.staleness() == pytest.approx(3.5)
    assert live.version == 2


# The whole job


@pytest.mark.parametrize("policy", names())
def test_counts_equal_those_of_the_report(policy: str) -> None:
    spec = with_random_faults(load_cluster("r2sp-b").with_jitter(0.1), count=5, iterations=12, seed=1)
    live, summary = Live(window=1e9), Summary()
    Cluster(spec, make(policy), 12, observer=Tee(live, summary)).run()
    report, now = summary.report(), live.time
    assert live.updates == report.updates > 0
    assert live.samples_per_second(now) == pytest.approx(report.samples_per_second)
    assert live.staleness() == pytest.approx(report.mean_staleness)
    assert live.members == sum(worker.state != "left" for worker in live.workers.values())


@pytest.mark.parametrize("policy", ["bsp", "r2sp", "ssp"])
def test_the_waiting_share_equals_that_of_the_report(policy: str) -> None:
    live, summary = Live(window=1e9), Summary()
    Cluster(load_cluster("r2sp-b"), make(policy), 12, observer=Tee(live, summary)).run()
    report = summary.report()
    share = report.blocking_seconds / report.mean_iteration_seconds
    assert share > 0
    assert live.waiting_share(live.time) == pytest.approx(share)
    each = [worker.waiting_share(live.time) for worker in live.workers.values()]
    assert sum(each) / len(each) == pytest.approx(share)


def test_a_kept_update_counts_once_and_a_discarded_one_does_not_count() -> None:
    live = watched(
        *(Joined(0, worker) for worker in range(2)),
        Arrived(4, 0, 1, 10),
        Discarded(4, 0, 1),
        Arrived(5, 1, 1, 10),
        Kept(5, 1, 1, 0),
        *(Applied(5, version, (1,), (1,), (0,)) for version in (1, 2, 3)),
    )
    assert live.updates == 1
    assert live.samples_per_second(5.0) == pytest.approx(10 / 5)


def test_an_update_counts_for_the_incarnation_that_made_it() -> None:
    events: list[Event] = [
        Joined(0, 0),
        Arrived(1, 0, 1, 10),
        Left(1, 0),
        Joined(1, 0, 2),
        Arrived(5, 0, 1, 30, None, 2),
    ]
    old = watched(*events, Discarded(5, 0, 1, 2), Applied(5, 1, (0,), (1,), (0,), (1,)))
    assert (old.updates, old.samples_per_second(5.0)) == pytest.approx((1, 10 / 5))
    new = watched(*events, Discarded(5, 0, 1, 1), Kept(5, 0, 1, 7, 2), Applied(5, 1, (0,), (1,), (0,), (2,)))
    assert (new.updates, new.samples_per_second(5.0)) == pytest.approx((1, 30 / 5))
    both = watched(*events, Applied(5, 1, (0, 0), (1, 1), (0, 0), (1, 2)))
    assert (both.updates, both.samples_per_second(5.0)) == pytest.approx((2, 40 / 5))


def test_time_before_the_first_member_does_not_count() -> None:
    live = watched(Joined(100, 0), *iteration(0, 1, 100.0))
    assert live.samples_per_second(104.0) == pytest.approx(10 / 4)


def test_progress_and_remaining_time() -> None:
    live = watched(Joined(0, 0))
    assert live.progress() is None
    assert live.seconds_left(1.0) is None
    replay([Progressed(0, 0, 0, 400)], live)
    assert live.progress() == 0.0
    assert live.seconds_left(2.0) is None, "it cannot be estimated before something is done"
    replay([Progressed(5, 0, 100, 400)], live)
    assert live.progress() == 0.25
    assert live.seconds_left(5.0) == pytest.approx(15.0)


def test_without_a_known_size_the_epoch_is_shown_and_no_share() -> None:
    live = watched(Joined(0, 0), *iteration(0, 1, 0.0), Progressed(4, 2, 250, 0))
    assert live.progress() is None and live.seconds_left(5.0) is None
    assert line(live) == "4.0 s  1 update  2 samples/s  waiting 0%  epoch 3  staleness 0.0"
    assert "epoch 3" in rendered(table(live))[1] and "%  done" not in "".join(rendered(table(live)))


def test_if_every_update_counts_as_one_sample_the_rates_are_those_of_updates() -> None:
    live = watched(Joined(0, 0), *iteration(0, 1, 0.0, samples=1))
    assert "0 updates/s" in line(live) and "samples/s" not in line(live)
    assert "updates/s" in rendered(table(live))[2]
    replay([Arrived(9, 0, 2, 2)], live)
    assert "samples/s" in line(live)


def test_the_remaining_time_of_a_stalled_job_grows() -> None:
    live = watched(Joined(0, 0), *iteration(0, 1, 0.0), Progressed(4, 0, 10, 40))
    assert live.samples_per_second(40.0) < live.samples_per_second(4.0) / 9
    soon, late = live.seconds_left(4.0), live.seconds_left(40.0)
    assert soon is not None
    assert late is not None
    assert late > 9 * soon


def test_the_loss_of_the_job_is_a_mean_of_recent_losses() -> None:
    live = watched(Joined(0, 0), Arrived(1, 0, 1, 8, 4.0), Arrived(2, 0, 2, 8, 2.0), Arrived(3, 0, 3, 8))
    assert live.loss == pytest.approx(3.0)
    replay((Arrived(4, 0, number, 8, 1.0) for number in range(4, 4 + 10 * SMOOTH)), live)
    assert live.loss == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_shows_at_once_and_does_not_stay(broken: float) -> None:
    live = watched(Joined(0, 0), Arrived(1, 0, 1, 8, 4.0), Arrived(2, 0, 2, 8, broken))
    assert live.loss is not None
    assert not math.isfinite(live.loss)
    assert f"loss {broken}" in line(live)
    replay([Arrived(3, 0, 3, 8, 2.0), Arrived(4, 0, 4, 8, 1.0)], live)
    assert live.loss == pytest.approx(1.5)


def test_metrics_show_their_last_values() -> None:
    live = watched(Joined(0, 0), Measured(1, 0, "accuracy", 0.5), Measured(2, 0, "val_loss", 1.25))
    replay([Measured(3, 0, "cosine", 0.1), Measured(4, 0, "accuracy", 0.75)], live)
    assert live.metrics == {"val_loss": 1.25, "accuracy": 0.75}, "the job itself reports cosines"
    assert line(live).endswith("waiting 0%  val_loss 1.25  accuracy 0.75")
    replay((Measured(5, 0, f"metric{number}", number) for number in range(100)), live)
    assert list(live.metrics) == [f"metric{number}" for number in range(100 - MAX_METRICS, 100)]
    assert len(rendered(table(live))[1]) <= 80


def test_another_run_starts_from_zero() -> None:
    live = watched(Joined(0, 0), *iteration(0, 1, 0.0, loss=1.0), Began(0, "our lab", "bsp", "whole", 0))
    assert (live.policy, live.workers, live.updates, live.loss, live.time) == ("bsp", {}, 0, None, 0)


# Many workers


class Unread(dict[int, LiveWorker]):
    """A dictionary of workers that cannot be iterated over."""

    def __iter__(self) -> Iterator[int]:
        return self._refuse()

    def values(self) -> NoReturn:
        self._refuse()

    def items(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("an event must not cost more with more workers")


def test_no_event_iterates_over_all_workers() -> None:
    live = Live(window=1.0)
    live.workers = Unread()
    spec = with_random_faults(load_cluster("r2sp-b"), count=5, iterations=12, seed=1)
    Cluster(spec, make("safa"), 12, observer=live).run()
    now = live.time
    assert live.updates > 0
    assert live.samples_per_second(now) > 0
    assert "updates" in line(live)
    with pytest.raises(AssertionError):
        list(live.workers.values())


@pytest.mark.parametrize("height", [1, 8, 24, 50])
@pytest.mark.parametrize("workers", [1, 8, 10_000])
@pytest.mark.parametrize("known", [False, True])
def test_a_table_fits_in_its_height(height: int, workers: int, known: bool) -> None:
    live = Live("r2sp:tune_batches=true")
    for worker in reversed(range(workers)):
        live.joined(0.0, worker)
    if known:
        live.progressed(1.0, 0, 10, 40)
    text = rendered(table(live, height))
    assert len(text) <= max(height, 7), "headings and one worker are always shown"
    assert max(len(row) for row in text) <= 80
    shown = [row for row in text if row.endswith("%") and "waiting" in row and "samples" not in row]
    assert [int(row.split()[0]) for row in shown] == list(range(len(shown))), "the first workers, in order"
    assert len(shown) == workers or text[-1] == f"and {workers - len(shown):,} more"
    assert shown
    if height == 24:
        assert len(text) == 24 or len(shown) == workers, "all lines are used"


def test_a_table_of_large_numbers_fits_in_eighty_columns() -> None:
    live = Live("r2sp:groups=auto,weights=mean")
    for worker in (0, 9_999):
        live.joined(0.0, worker)
        live.granted(0.0, worker, None, 0)
        live.arrived(123_456.7, worker, 1_234_567, 1_000_000_000, 0.000123456)
        live.applied(123_456.7, 7_654_321, (worker,), (1_234_567,), (1234,))
    live.progressed(123_456.7, 3, 10, 1_000_000)
    text = rendered(table(live))
    assert "…" not in "".join(text)
    assert text[0] == "r2sp:groups=auto,weights=mean  2 workers  version 7,654,321  123456.7 s"
    assert text[1] == "2 updates  16,200 samples/s  waiting 0%  staleness 1234.0"
    assert text[2] == "loss 0.000123"
    assert text[3].endswith("0% done, 3429318 h left")
    assert text[4].split() == ["worker", "state", "iteration", "samples/s", "waiting", "staleness", "loss"]
    assert text[-1].split() == ["9999", "waiting", "1,234,567", "8,100", "0%", "1234", "0.000123"]


def test_the_time_of_a_job_counts_from_its_first_worker() -> None:
    live = watched(Joined(30, 0), *iteration(0, 1, 30.0))
    assert line(live).startswith("4.0 s  "), "as in the final report"
    assert rendered(table(live))[0].endswith("  4.0 s")


def test_the_policy_is_shown_as_its_user_wrote_it() -> None:
    live = Live(shorten=without_mean_weights)
    live.began(0.0, "", "r2sp:groups=2,weights=mean", "whole", 0)
    assert live.policy == "r2sp:groups=2"


def test_a_worker_that_has_left_has_no_rate() -> None:
    live = watched(Joined(0, 0), *iteration(0, 1, 0.0, loss=0.5), Left(5, 0))
    assert rendered(table(live))[-1].split() == ["0", "left", "1", "0", "0.5"]
    assert "0 workers" in rendered(table(live))[0]


# A line


def test_a_table_shows_how_many_workers_the_job_waits_for() -> None:
    live = Live("bsp")
    live.awaited(1.0, 0, 2)
    assert attendance(live) == "0 workers, waiting for 2 workers"
    live.awaited(2.0, 1, 1)
    assert attendance(live) == "1 worker, waiting for 1 more"
    assert "waiting for 1 more" in rendered(table(live))[0]
    live.awaited(3.0, 2, 0)
    assert attendance(live) == "2 workers"
    live.joined(3.0, 0)
    live.joined(3.0, 1)
    assert attendance(live) == "2 workers"


def test_a_line_has_all_known_figures() -> None:
    live = Live("r2sp")
    replay([Joined(0, 0), *iteration(0, 1, 0.0, samples=8000, loss=0.431), Granted(5, 0, None, 0)], live)
    replay([Progressed(8, 0, 400, 1000), Arrived(12, 0, 2, 8000), Applied(12, 2, (0,), (2,), (5,))], live)
    assert line(live) == (
        "12.0 s  r2sp  2 updates  1,333 samples/s  waiting 8%  staleness 2.5  loss 0.431  40% done, 18 s left"
    )
    assert line(live, now=24.0).startswith("24.0 s  r2sp  2 updates  667 samples/s  waiting 54%")


def test_a_line_leaves_out_unknown_figures() -> None:
    assert line(Live()) == "0.0 s  0 updates  0 samples/s  waiting 0%"


@pytest.mark.parametrize(
    ("done", "shown"),
    [(0, "0% done"), (1, "0% done, 17 min left"), (999, "99% done, 0 s left"), (1000, "100% done")],
)
def test_the_share_is_rounded_down(done: int, shown: str) -> None:
    live = watched(Joined(0, 0), Progressed(1, 0, done, 1000))
    assert line(live).endswith("  " + shown)
