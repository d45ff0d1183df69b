"""Records: frozen dataclasses that are fast to create and behave as those of the standard library."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from paceline.policies import Grant, Turn, Update

UPDATE = Update(1, 2, 3, 4, 5.0, incarnation=6)


def test_a_record_has_its_fields_and_defaults() -> None:
    assert asdict(UPDATE) == {
        "worker": 1,
        "iteration": 2,
        "base_version": 3,
        "batch_size": 4,
        "compute_seconds": 5.0,
        "loss": None,
        "incarnation": 6,
    }
    assert repr(Grant(worker=7)) == "Grant(worker=7, batch_size=None, expected_staleness=None)"
    with pytest.raises(TypeError, match="iteration"):
        Update(1)  # type: ignore[call-arg]


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        UPDATE.loss = 1.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del UPDATE.loss
    assert replace(UPDATE, loss=1.0).loss == 1.0 and UPDATE.loss is None


def test_records_are_equal_if_their_classes_and_fields_are() -> None:
    assert type(UPDATE) is Update
    assert Update(1, 2, 3, 4, 5.0, None, 6) == UPDATE
    assert {UPDATE: 1}[replace(UPDATE)] == 1
    assert replace(UPDATE, incarnation=7) != UPDATE
    assert len({Grant(1), Turn(1)}) == 2


def test_a_record_can_be_copied_and_pickled() -> None:
    for made in (copy.copy(UPDATE), copy.deepcopy(UPDATE), pickle.loads(pickle.dumps(UPDATE))):
        assert made == UPDATE and type(made) is Update
