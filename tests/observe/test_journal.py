"""A journal of a policy: calls and decisions in lines of JSON, and their repetition."""

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
def test_a_stream_decision_is_written_and_repeated(spec: str, streamed: bool) -> None:
    journal, lines = journalled(spec, streamed)
    journal.joined(0, 0.0)
    decisions = journal.ready(0, 32, 1.0)
    journal.arrived(Update(0, 1, 0, 32, 1.0), 1.5)
    in_order, expected = spec != "asp", 0 if spec.startswith("r2sp") else None
    assert Stream((0,), (1.0,), in_order, expected) in decisions
    assert ["Stream", [0], [1.0], in_order, expected] in json.loads(lines[2])["decided"]
    policy, entries = read(lines)
    targets: list[Policy | Ledger] = [policy, Ledger(read(lines)[0], Observer())]
    for entry in entries:
        assert [in_plain_values(tell(target, entry)) for target in targets] == [entry.decided] * 2


def test_a_new_incarnation_is_written_and_repeated() -> None:
    journal, lines = journalled("asp", streamed=False)
    for incarnation in (1, 2):
        journal.joined(0, 0.0)
        journal.arrived(Update(0, 1, 0, 32, 1.0, incarnation=incarnation), 1.5)
        journal.left(0, 2.0)
    policy, entries = read(lines)
    repeated = [(entry, in_plain_values(tell(policy, entry))) for entry in entries]
    assert all(entry.decided == decided for entry, decided in repeated)
    arrived = [entry for entry, _ in repeated if entry.told == "arrived"]
    assert [Update(*entry.of[0]).incarnation for entry in arrived] == [1, 2]
    assert [Update(*entry.decided[0][1][0]).incarnation for entry in arrived] == [1, 2]


def test_a_journal_that_predates_incarnations_is_repeated() -> None:
    entry = {"told": "arrived", "now": 1.5, "of": [[0, 1, 0, 32, 1.0, None]]}
    entry["decided"] = [["Apply", [[0, 1, 0, 32, 1.0, None]], [1.0], None, []], ["Grant", 0, None, None]]
    policy, entries = read([json.dumps({"policy": "asp", "streamed": False}), json.dumps(entry)])
    policy.joined(0, 0.0)
    assert [in_plain_values(tell(policy, entry)) == entry.decided for entry in entries] == [True]


def test_every_ready_call_is_written() -> None:
    journal, _ = journalled("asp", streamed=False)
    assert not Ledger(journal, Observer()).pushes_freely  # type: ignore[arg-type]


def test_a_pardon_is_repeated() -> None:
    lines: list[str] = []
    spec = "filtered:policy=(bsp:weights=mean)"
    Journal(make(spec), spec, lines.append).measured("pardon", (4, 77), 1.0, 2.5)
    policy, entries = read(lines)
    policy.blacklist[4], policy.since[4] = (0.1,), 0  # type: ignore[attr-defined]
    assert [tell(policy, entry) for entry in entries] == [[]]
    assert not policy.blacklist  # type: ignore[attr-defined]
