"""Each sample once an epoch, whoever comes and goes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from paceline.serve.samples import Range, Samples


def test_ranges_follow_one_another_and_end_with_the_epoch() -> None:
    samples = Samples(size=10, epochs=2)
    assert samples.take(0, 4) == Range(0, 0, 4)
    assert samples.take(1, 4) == Range(0, 4, 8)
    assert samples.take(0, 4) == Range(0, 8, 10)
    assert samples.take(0, 4) == Range(1, 0, 4)


def test_what_a_departed_worker_had_is_handed_out_again() -> None:
    samples = Samples(size=8, epochs=1)
    samples.take(0, 4)
    samples.take(1, 4)
    samples.abandoned(0)
    assert samples.take(1, 3) == Range(0, 0, 3)
    assert samples.take(1, 3) == Range(0, 3, 4)
    assert samples.take(1, 3) is None
    samples.arrived(1, "update")
    assert not samples.all_done
    samples.done("update")
    assert samples.all_done


def test_what_is_done_is_not_handed_out_again() -> None:
    samples = Samples(size=4, epochs=1)
    samples.take(0, 4)
    samples.arrived(0, "update")
    samples.abandoned(0)  # its worker has left; the update is in all the same
    assert samples.take(1, 4) is None
    samples.done("update")
    assert samples.all_done


def test_the_samples_of_a_discarded_update_are_handed_out_again() -> None:
    samples = Samples(size=4, epochs=1)
    samples.take(0, 4)
    samples.arrived(0, "update")
    samples.dropped("update")
    assert samples.take(1, 4) == Range(0, 0, 4)


@settings(derandomize=True, deadline=None)
@given(
    size=st.integers(1, 60),
    epochs=st.integers(1, 3),
    steps=st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from(("applied", "discarded", "left", "still at it")), st.integers(1, 17)
        ),
        max_size=60,
    ),
)
def test_every_sample_is_done_once_an_epoch(size: int, epochs: int, steps: list[tuple[int, str, int]]) -> None:
    samples = Samples(size, epochs)
    done: Counter[tuple[int, int]] = Counter()
    held: dict[int, list[Range]] = {}

    def apply(worker: int) -> None:
        samples.arrived(worker, worker)
        samples.done(worker)
        for taken in held.pop(worker, []):
            done.update((taken.epoch, position) for position in range(taken.start, taken.stop))

    for worker, then, count in steps:
        taken = samples.take(worker, count)
        if taken is not None:
            assert 0 < taken.stop - taken.start <= count
            held.setdefault(worker, []).append(taken)
        if then == "applied":
            apply(worker)
        elif then == "discarded":
            samples.arrived(worker, worker)
            samples.dropped(worker)
            held.pop(worker, None)
        elif then == "left":
            samples.abandoned(worker)
            held.pop(worker, None)
    for worker in list(held):
        apply(worker)
    while (taken := samples.take(9, 7)) is not None:
        held.setdefault(9, []).append(taken)
    apply(9)
    assert samples.all_done
    assert done == Counter((epoch, position) for epoch in range(epochs) for position in range(size))
