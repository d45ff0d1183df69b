"""Trace events and observers."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.observer import Observer, Recorder, Tee, replay
from paceline.observe.trace import (
    KINDS,
    Applied,
    Arrived,
    Awaited,
    Began,
    Cancelled,
    Clipped,
    Computed,
    Described,
    Discarded,
    Event,
    Granted,
    Joined,
    Kept,
    Left,
    Measured,
    Progressed,
    Pulled,
    Pulling,
    Pushing,
    Saved,
    Turned,
    Used,
    as_line,
    from_line,
    identities,
)
from tries import tries

ONE_OF_EACH: list[Event] = [
    Began(0.0, "our lab", "ssp:staleness=5", "whole", 7),
    Awaited(0.0, 1, 2),
    Described(0.0, 1_000_000, "SGD(lr=0.1)"),
    Joined(0.0, 3),
    Joined(0.05, 3, 2),
    Granted(0.1, 3, None, 0),
    Granted(0.1, 4, 128, 2),
    Pulling(0.2, 3),
    Pulled(0.3, 3, 17),
    Computed(1.0000000000000002, 3),
    Computed(1.1, 3, 0.75),
    Turned(1.25, 3),
    Pushing(1.5, 3),
    Arrived(2.0, 3, 1, 128),
    Arrived(2.0, 4, 9, 128, 0.1 + 0.2),
    Arrived(2.0, 3, 1, 128, None, 2),
    Applied(2.0, 18, (3, 4), (1, 9), (0, 5)),
    Applied(2.1, 19, (3,), (2,), (0,)),
    Applied(2.1, 20, (3, 4), (2, 9), (0, 5), (2, 1)),
    Kept(2.2, 3, 1, 0),
    Kept(2.2, 3, 1, 0, 2),
    Discarded(2.3, 3, 1),
    Discarded(2.3, 3, 1, 2),
    Clipped(2.35, 3, 1, 0.25),
    Clipped(2.35, 3, 1, 0.25, 2),
    Cancelled(2.4, 3),
    Left(1e6 + 1 / 3, 3),
    Left(1e6 + 1 / 3, 4, True),
    Used(3.0, "in", 0.5),
    Progressed(3.5, 1, 1500, 4000),
    Saved(3.5, 20),
    Saved(3.5, 20, 1.5),
    Measured(3.5, 2, "accuracy", 0.97),
    Measured(3.5, 2, "loss", float("-inf")),
]


def test_the_list_has_every_kind_of_event() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(KINDS.values())


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
def test_an_event_can_be_read_back_from_its_line(event: Event) -> None:
    line = as_line(event)
    assert "\n" not in line
    again = from_line(line)
    assert again == event
    assert type(again) is type(event)
    assert as_line(again) == line


def test_the_format_of_a_line() -> None:
    assert as_line(Granted(1.5, 3, None, 2)) == (
        '{"event":"granted","time":1.5,"worker":3,"batch_size":null,"progress_gap":2}'
    )
    assert as_line(Applied(2.0, 18, (3, 4), (1, 9), (0, 5), (2, 1))) == (
        '{"event":"applied","time":2.0,"version":18,"workers":[3,4],"iterations":[1,9],"staleness":[0,5],'
        '"incarnations":[2,1]}'
    )
    assert as_line(Arrived(2.0, 4, 9, 128, 0.5, 3)) == (
        '{"event":"arrived","time":2.0,"worker":4,"iteration":9,"batch_size":128,"loss":0.5,"incarnation":3}'
    )


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ('{"event":"joined","time":1.0,"worker":3}', Joined(1.0, 3, incarnation=1)),
        ('{"event":"computed","time":1.0,"worker":3}', Computed(1.0, 3, seconds=None)),
        ('{"event":"left","time":1.0,"worker":3}', Left(1.0, 3, lost=False)),
        (
            '{"event":"arrived","time":1.0,"worker":3,"iteration":2,"batch_size":8}',
            Arrived(1.0, 3, 2, 8, loss=None, incarnation=1),
        ),
        (
            '{"event":"arrived","time":1.0,"worker":3,"iteration":2,"batch_size":8,"loss":0.5}',
            Arrived(1.0, 3, 2, 8, 0.5, incarnation=1),
        ),
        (
            '{"event":"applied","time":1.0,"version":4,"workers":[3],"iterations":[2],"staleness":[0]}',
            Applied(1.0, 4, (3,), (2,), (0,), incarnations=()),
        ),
        ('{"event":"kept","time":1.0,"worker":3,"iteration":2,"slot":5}', Kept(1.0, 3, 2, 5, incarnation=1)),
        ('{"event":"discarded","time":1.0,"worker":3,"iteration":2}', Discarded(1.0, 3, 2, incarnation=1)),
    ],
)
def test_lines_of_old_traces_are_still_read(line: str, event: Event) -> None:
    assert from_line(line) == event


def test_an_update_is_identified_by_worker_incarnation_and_iteration() -> None:
    assert list(identities((3, 4), (1, 9), (2, 1))) == [(3, 2, 1), (4, 1, 9)]
    assert list(identities((3, 4), (1, 9), ())) == [(3, 1, 1), (4, 1, 9)], "an old trace has no incarnations"
    with pytest.raises(ValueError, match="argument 2"):
        list(identities((3, 4), (1, 9), (2,)))


@pytest.mark.parametrize(
    ("loss", "word"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (1e308, 1e308)]
)
def test_a_loss_that_is_not_finite_is_valid_json_and_comes_back(loss: float, word: object) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not valid JSON")

    line = as_line(Arrived(1.0, 3, 2, 8, loss))
    assert json.loads(line, parse_constant=refuse)["loss"] == word
    again = from_line(line)
    assert isinstance(again, Arrived)
    assert isinstance(again.loss, float)
    assert str(again.loss) == str(loss), "compared as text, because NaN does not equal itself"


@tries(50, 200)
@given(st.floats(0.0, 1e12), st.integers(0, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_numbers_keep_all_digits(time: float, version: int, workers: list[int]) -> None:
    event = Applied(time, version, tuple(workers), tuple(workers), tuple(workers), tuple(workers))
    assert from_line(as_line(event)) == event


def test_a_line_of_another_schema_is_refused() -> None:
    with pytest.raises(KeyError):
        from_line('{"event":"exploded","time":1}')
    with pytest.raises(TypeError):
        from_line('{"event":"joined","time":1,"colour":"red"}')


# Observers


def test_the_base_observer_ignores_all_events() -> None:
    replay(ONE_OF_EACH, Observer())


def test_a_recorder_records_replayed_events() -> None:
    seen: list[Event] = []
    replay(ONE_OF_EACH, Recorder(seen.append))
    assert seen == ONE_OF_EACH


def test_a_tee_passes_events_to_both_observers() -> None:
    one: list[Event] = []
    other: list[Event] = []
    replay(ONE_OF_EACH, Tee(Recorder(one.append), Recorder(other.append)))
    assert one == other == ONE_OF_EACH


@pytest.mark.parametrize("name", KINDS)
def test_an_observer_has_a_method_with_the_fields_of_each_event(name: str) -> None:
    code = getattr(Observer, name).__code__
    assert code.co_varnames[1 : code.co_argcount] == KINDS[name]._fields
