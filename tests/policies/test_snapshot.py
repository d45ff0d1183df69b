"""Snapshots: a policy's whole state can be copied, saved and restored."""

import copy
import json
import random
from collections import Counter, deque
from enum import Enum
from typing import Any, NamedTuple

import pytest

from paceline.policies import Policy, PolicyError, Update, load, make, save
from paceline.policies.asp import ASP
from paceline.policies.r2sp import R2SP
from policies.any_driver import AnyDriver
from policies.cluster import run, steady
from policies.specs import SPECS, fresh


class Thing:
    """A part of a policy's state, defined in the policy's module."""

    def __init__(self, value: object) -> None:
        self.value = value


class Slotted:
    __slots__ = ("unset", "value")

    def __init__(self, value: object) -> None:
        self.value = value


class Pair(NamedTuple):
    a: int
    b: int


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Holds(ASP):
    """A policy that holds a value."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = None


def through_a_file(policy: Policy) -> Policy:
    return load(json.loads(json.dumps(save(policy), allow_nan=False)))


def held(value: object) -> Any:
    policy = Holds()
    policy.held = value
    return through_a_file(policy).held  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", SPECS)
def test_a_policy_restored_from_a_file_makes_the_same_decisions(spec: str) -> None:
    driver = AnyDriver(fresh(spec))
    for worker in range(6):
        driver.joins(worker)
    driver.calms_down(1.0, lambda: driver.version >= 5, steps=400)
    driver.leaves(2)
    driver.saves_and_loads()
    driver.copies()
    driver.calms_down(1.0, lambda: driver.version >= 12, steps=400)
    assert len(driver.shadows) == 2  # AnyDriver has compared all their decisions
    twice = through_a_file(driver.shadows[0])
    assert save(twice) == save(driver.policy)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        0.1,
        float("inf"),
        -float("inf"),
        "ü",
        [],
        [1, [2.5, "x"]],
        (1, (2,)),
        {3, 1, 2},
        {1: "a", (2, 3): {"dict": 1}, "object": 2},
        deque([1, 2], maxlen=5),
        deque(),
        Update(1, 2, 3, 4, 5.0),
        Update(1, 2, 3, 4, 5.0, 0.5, 6),
        {Update(1, 2, 3, 4, 5.0): [1]},
        {Update(1, 2, 3, 4, 5.0, incarnation=n): Update(1, 9, 3, 4, 5.0, incarnation=n) for n in (1, 2)},
    ],
    ids=repr,
)
def test_plain_values_are_restored(value: object) -> None:
    back = held(value)
    assert back == value
    assert type(back) is type(value)
    assert getattr(back, "maxlen", None) == getattr(value, "maxlen", None)


def test_nan_is_restored() -> None:
    assert held(float("nan")) != held(float("nan"))


def test_the_order_of_a_dict_is_restored() -> None:
    assert list(held({3: 0, 1: 0, 2: 0})) == [3, 1, 2]


def test_two_references_to_one_object_stay_so() -> None:
    thing = Thing([1])
    first, second = held([thing, thing])
    assert first is second
    assert first.value == [1]


def test_an_object_may_point_to_itself() -> None:
    thing = Thing(None)
    thing.value = thing
    back = held(thing)
    assert back.value is back


def test_slots_are_restored_and_unset_ones_stay_unset() -> None:
    back = held(Slotted(3))
    assert back.value == 3
    assert not hasattr(back, "unset")


@pytest.mark.parametrize("value", [frozenset({1, 2}), Pair(1, 2), Pair(1, (2, 3)), Colour.BLUE, {Colour.RED: 1}])  # type: ignore[arg-type]
def test_sets_named_tuples_and_enums_are_restored(value: object) -> None:
    back = held(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [len, lambda: 0, Thing, random.Random(0), Counter("a"), object(), b"bytes"],
    ids=["builtin", "function", "class", "random", "counter", "object", "bytes"],
)
def test_a_value_that_cannot_be_restored_is_refused_when_it_is_saved(value: object) -> None:
    policy = Holds()
    policy.held = value
    with pytest.raises(PolicyError, match="state must be plain data"):
        save(policy)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "collections:OrderedDict",
        "paceline.policies.snapshot:deque",  # imported by the module, but not defined in it
        "paceline.policies.snapshot:importlib.machinery.SourceFileLoader",
        "paceline.policies.snapshot:save",
        "paceline.policiesque:Evil",
    ],
)
def test_a_saved_state_that_names_a_foreign_class_is_refused(name: str) -> None:
    saved = save(make("asp"))
    saved["state"]["state"]["weigher"]["object"] = name
    with pytest.raises(PolicyError, match="may not name"):
        load(saved)


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {"object": "paceline.policies.asp:ASP"},
        {"object": "paceline.policies.nowhere:ASP", "number": 0, "state": {}},
        {"object": "paceline.policies.asp:Nothing", "number": 0, "state": {}},
        {"float": "much"},
        {"again": 4},
        {"object": "paceline.policies.components:IterationTime", "number": 0, "state": {}},
    ],
)
def test_an_invalid_state_is_refused_with_a_one_sentence_error(state: object) -> None:
    with pytest.raises(PolicyError, match="The saved state"):
        load({"policy": "x", "state": state})


def test_no_constructor_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(make("asp"))

    def never(self: object, *arguments: object) -> None:
        raise AssertionError("a constructor was called")

    monkeypatch.setattr(ASP, "__init__", never)
    assert isinstance(load(saved), ASP)


@pytest.mark.slow
def test_ten_thousand_workers_can_be_copied_and_saved() -> None:
    """Copying a ring linked by references would recurse ten thousand calls deep."""
    policy = R2SP(tune_batches=True)
    run(policy, {worker: steady(1.0) for worker in range(10_000)}, updates=100)
    copied, restored = copy.deepcopy(policy), through_a_file(policy)
    assert len(restored.ring) == 10_000  # type: ignore[attr-defined]
    now = 1e6
    assert copied.woke(now) == restored.woke(now) == policy.woke(now)
