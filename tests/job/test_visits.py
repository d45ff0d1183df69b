"""Visits: every part of every shard is visited once a push, in the order of the pushes, two at a time."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from job.conversation import Conversation, only
from paceline.job import events, instructions
from paceline.job.visits import AT_ONCE, Visit, Visits, _first_fit, _one_more, parts_of


def at_same_machine(visits: set[Visit]) -> dict[int, int]:
    """Return machine → the number of its visits."""
    count: dict[int, int] = defaultdict(int)
    for visit in visits:
        count[visit.worker] += 1
        count[visit.shard] += 1
    return count


@given(shards=st.integers(1, 7), parts=st.integers(1, 3), more=st.integers(0, 2), data=st.data())
def test_every_part_is_visited_once_and_in_the_order_of_the_pushes(
    shards: int, parts: int, more: int, data: st.DataObject
) -> None:
    visits, under_way = Visits(shards, parts), set[Visit]()
    order: list[int] = []  # workers, in the order of their pushes
    visited: dict[tuple[int, int], list[int]] = defaultdict(list)  # shard, part → workers
    dropped: set[int] = set()
    waiting = list(range(shards + more))
    while waiting or under_way:
        choices = ["begin"] * bool(waiting) + ["end", "drop"] * bool(under_way)
        match data.draw(st.sampled_from(choices)):
            case "begin":
                order.append(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
                begun = visits.begin(order[-1])
            case "end":
                ended = data.draw(st.sampled_from(sorted(under_way)))
                under_way.remove(ended)
                visited[ended.shard, ended.part].append(ended.worker)
                begun = visits.end(ended)
            case _:
                worker = data.draw(st.sampled_from(sorted(under_way))).worker
                dropped.add(worker)
                under_way -= {visit for visit in under_way if visit.worker == worker}
                begun = visits.drop(worker)
        assert not under_way & set(begun)
        under_way |= set(begun)
        assert max(at_same_machine(under_way).values(), default=0) <= AT_ONCE
        assert not any(visit.worker == visit.shard for visit in begun), "the part beside a worker needs no visit"
        busy = {visit.worker for visit in under_way}
        assert busy or all(visits.is_done(worker) for worker in order), "some visit is always under way"
    places = [(shard, part) for shard in range(shards) for part in range(parts)]
    for shard, part in places:
        whole = [worker for worker in order if worker != shard and worker not in dropped]
        assert [worker for worker in visited[shard, part] if worker not in dropped] == whole
        assert [worker for worker in order if worker in visited[shard, part]] == visited[shard, part]


def test_as_many_visits_as_possible_begin() -> None:
    """The oldest push alone would take the machines that two other visits need."""
    visits = Visits(4, parts=1, at_once=1)
    assert visits.begin(0) == [Visit(0, 1, 0)]
    assert visits.begin(1) == []
    # Worker 1 may visit shard 0, whose part beside worker 0 is done, or wait for shards 2 and 3.
    begun = visits.end(Visit(0, 1, 0))
    assert begun == [Visit(0, 2, 0)]
    assert visits.end(Visit(0, 2, 0)) == [Visit(0, 3, 0), Visit(1, 2, 0)]


@pytest.mark.parametrize("shards", [2, 3, 4, 7])
def test_links_are_full_while_everybody_pushes(shards: int) -> None:
    """All visits take equally long here. At least 85% of what the machines could do is done."""
    visits, done, rounds = Visits(shards, parts_of(shards)), 0, 0
    under_way = [visit for worker in range(shards) for visit in visits.begin(worker)]
    pushes = [shards]
    while rounds < 200:
        rounds += 1
        done += len(under_way)
        ended, under_way = under_way, []
        for visit in ended:
            under_way += visits.end(visit)
            if visits.is_done(visit.worker) and not any(each.worker == visit.worker for each in under_way):
                under_way += visits.begin(visit.worker)
                pushes[0] += 1
    assert done >= 0.85 * rounds * shards * AT_ONCE / 2
    assert pushes[0] > 10


def test_two_visits_take_the_place_of_one() -> None:
    possible = [Visit(0, 1, 0), Visit(0, 2, 0), Visit(3, 1, 0)]
    free = dict.fromkeys(range(4), 1)
    chosen = _first_fit(possible, free)
    assert chosen == [Visit(0, 1, 0)]
    better = _one_more(chosen, possible, free)
    assert better is not None
    assert set(better) == {Visit(0, 2, 0), Visit(3, 1, 0)}
    assert _one_more(better, possible, free) is None


@pytest.mark.parametrize(("pieces", "parts"), [(3, 3), (16, 16), (40, 16), (None, 16)])
def test_a_visit_exchanges_whole_pieces(pieces: int | None, parts: int) -> None:
    talk = Conversation("r2sp", workers=2, streams=True, shards=2, visits=16)
    talk.tell(events.ModelDescribed(0.9, pieces))
    talk.begin(2)
    (turn,) = only(instructions.SendPushNow, talk.ready(0, 1))
    assert turn.parts == parts


def test_a_visit_that_is_not_under_way_changes_nothing() -> None:
    visits = Visits(3, parts=4)
    begun = visits.begin(0)
    assert visits.end(Visit(1, 2, 0)) == []
    assert visits.drop(2) == []
    assert visits.under_way(0) == sorted(begun)


def test_there_are_fewer_parts_of_a_shard_if_there_are_more_shards() -> None:
    assert [parts_of(shards) for shards in range(1, 11)] == [0, 16, 16, 16, 10, 7, 5, 4, 0, 0]
