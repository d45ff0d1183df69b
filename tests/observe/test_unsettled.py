"""Updates between their arrival and what becomes of them."""

from __future__ import annotations

from paceline.observe.unsettled import Unsettled


def test_an_update_is_settled_once() -> None:
    unsettled: Unsettled[str] = Unsettled()
    unsettled.add(1, 7, "a")
    assert unsettled.settle(1, 8) is None
    assert unsettled.settle(1, 7) == "a"
    assert unsettled.settle(1, 7) is None
    assert len(unsettled) == 0


def test_of_two_of_one_name_the_first_is_settled_first() -> None:
    unsettled: Unsettled[str] = Unsettled()
    for note in "abc":
        unsettled.add(1, 7, note)
    assert len(unsettled) == 3
    assert [unsettled.settle(1, 7) for _ in range(4)] == ["a", "b", "c", None]


def test_what_is_left_at_the_end() -> None:
    unsettled: Unsettled[str] = Unsettled()
    unsettled.add(1, 7, "a")
    unsettled.add(2, 7, "b")
    unsettled.add(1, 7, "c")
    assert unsettled.settle_all() == ["a", "b", "c"]
    assert len(unsettled) == 0
