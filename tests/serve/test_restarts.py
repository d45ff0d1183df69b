"""The limit on restarts: at most so many in the whole job, or within any time of some length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.serve.restarts import RestartBudget, RestartLimit


@pytest.mark.parametrize(
    ("text", "count", "seconds"),
    [("5", 5, None), ("0", 0, None), ("5/30s", 5, 30), ("1/10m", 1, 600), ("2/1h", 2, 3600)],
)
def test_a_limit_is_written_as_a_number_and_a_time(text: str, count: int, seconds: float | None) -> None:
    limit = RestartLimit.parse(text)
    assert (limit.count, limit.seconds) == (count, seconds)
    assert str(limit) == text


@pytest.mark.parametrize(
    "text", ["", "-1", "many", "5/", "5/10", "5/0s", "5/-1m", "5/nans", "5/infs", "/10m", "1.5", "²"]
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a number of restarts \(5\)"):
        RestartLimit.parse(text)


def test_restarts_in_the_whole_job_never_come_back() -> None:
    budget = RestartBudget(RestartLimit(2))
    assert [budget.spend(now) for now in (0.0, 1e6, 2e6, 1e9)] == [True, True, False, False]
    assert budget.used == "2 times"


def test_restarts_within_a_time_come_back_one_by_one() -> None:
    budget = RestartBudget(RestartLimit(2, 600.0))
    assert [budget.spend(now) for now in (0.0, 300.0, 599.0)] == [True, True, False]
    assert budget.used == "2 times within 10 minutes"
    assert [budget.spend(now) for now in (600.0, 601.0, 900.0)] == [True, False, True]


@given(
    count=st.integers(0, 4),
    window=st.floats(1.0, 100.0),
    pauses=st.lists(st.floats(0.0, 60.0), max_size=40),
)
def test_no_window_holds_more_than_the_limit_and_none_is_denied_in_vain(
    count: int, window: float, pauses: list[float]
) -> None:
    budget, now, allowed = RestartBudget(RestartLimit(count, window)), 0.0, list[float]()
    for pause in pauses:
        now += pause
        recent = [time for time in allowed if time > now - window]
        assert budget.spend(now) == (len(recent) < count)
        if len(recent) < count:
            allowed.append(now)
