"""A journal of decisions: what was told and said, in lines of JSON, and told again."""

from __future__ import annotations

import json

import pytest

from paceline.job import Ledger
from paceline.observe.journal import Journal, in_plain_values, read, tell
from paceline.observe.observer import Observer
from paceline.policies import Policy, Stream, Update, make


def journalled(spec: str, streamed: bool) -> tuple[Journal, list[str]]:
    policy, lines = make(spec), list[str]()
    policy.streamed = streamed
    return Journal(policy, spec, lines.append), lines


@pytest.mark.parametrize(
    ("spec", "streamed"), [("r2sp:weights=mean", True), ("asp", True), ("bsp:pipeline=true", False)]
)
def test_a_stream_is_written_down_and_said_again(spec: str, streamed: bool) -> None:
    journal, lines = journalled(spec, streamed)
    journal.joined(0, 0.0)
    said = journal.ready(0, 32, 1.0)
    journal.arrived(Update(0, 1, 0, 32, 1.0), 1.5)
    in_order, expected = spec != "asp", 0 if spec.startswith("r2sp") else None
    assert Stream((0,), (1.0,), in_order, expected) in said
    assert ["Stream", [0], [1.0], in_order, expected] in json.loads(lines[2])["decided"]
    policy, entries = read(lines)
    tellers: list[Policy | Ledger] = [policy, Ledger(read(lines)[0], Observer())]
    for entry in entries:
        assert [in_plain_values(tell(teller, entry)) for teller in tellers] == [entry.decided] * 2


def test_a_new_incarnation_is_written_down_and_said_again() -> None:
    journal, lines = journalled("asp", streamed=False)
    for incarnation in (1, 2):
        journal.joined(0, 0.0)
        journal.arrived(Update(0, 1, 0, 32, 1.0, incarnation=incarnation), 1.5)
        journal.left(0, 2.0)
    policy, entries = read(lines)
    told = [(entry, in_plain_values(tell(policy, entry))) for entry in entries]
    assert all(entry.decided == decided for entry, decided in told)
    arrived = [entry for entry, _ in told if entry.told == "arrived"]
    assert [Update(*entry.of[0]).incarnation for entry in arrived] == [1, 2]
    assert [Update(*entry.decided[0][1][0]).incarnation for entry in arrived] == [1, 2]


def test_a_journal_from_before_there_were_incarnations_is_said_again_as_it_was() -> None:
    entry = {"told": "arrived", "now": 1.5, "of": [[0, 1, 0, 32, 1.0, None]]}
    entry["decided"] = [["Apply", [[0, 1, 0, 32, 1.0, None]], [1.0], None, []], ["Grant", 0, None, None]]
    policy, entries = read([json.dumps({"policy": "asp", "streamed": False}), json.dumps(entry)])
    policy.joined(0, 0.0)
    assert [in_plain_values(tell(policy, entry)) == entry.decided for entry in entries] == [True]


def test_who_is_ready_is_always_written_down() -> None:
    journal, _ = journalled("asp", streamed=False)
    assert not Ledger(journal, Observer()).pushes_freely  # type: ignore[arg-type]


def test_a_pardon_is_said_again_as_it_was() -> None:
    lines: list[str] = []
    spec = "filtered:policy=(bsp:weights=mean)"
    Journal(make(spec), spec, lines.append).measured("pardon", (4, 77), 1.0, 2.5)
    policy, entries = read(lines)
    policy.blacklist[4], policy.since[4] = (0.1,), 0  # type: ignore[attr-defined]
    assert [tell(policy, entry) for entry in entries] == [[]]
    assert not policy.blacklist  # type: ignore[attr-defined]
