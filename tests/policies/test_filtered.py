"""Who is blacklisted, who is not, and what becomes of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.policies import Apply, Cancel, Decision, Discard, Grant, PolicyError, Update, load, make, save
from paceline.policies.filtered import Filtered


class Federation:
    """Clients that are all equally quick, under a barrier, with cosines as they are told."""

    def __init__(self, clients: int, policy: Filtered | None = None, **options: object) -> None:
        self.policy = policy or Filtered(make("bsp:weights=mean"), **options)  # type: ignore[arg-type]
        self.now = 0.0
        self.grants = dict.fromkeys(range(clients), 0)
        self.incarnations = dict.fromkeys(range(clients), 1)
        self.waiting: list[int] = []  # who was granted
        self.sent: set[Update] = set()  # what is undecided
        self.version = 0
        self.applied: list[tuple[int, ...]] = []
        self.cancelled: list[int] = []
        self.discarded: list[Update] = []
        for client in range(clients):
            self.take(self.policy.joined(client, 0.0))

    def rejoin(self, client: int) -> None:
        self.grants[client] = 0
        self.incarnations[client] += 1
        self.take(self.policy.joined(client, self.now))

    def take(self, decisions: list[Decision]) -> list[Apply]:
        applies = []
        for decision in decisions:
            match decision:
                case Grant(worker):
                    self.grants[worker] += 1
                    self.waiting.append(worker)
                case Cancel(worker):
                    self.cancelled.append(worker)
                    self.waiting.remove(worker)
                case Discard(update):
                    self.sent.remove(update)
                    self.discarded.append(update)
                case Apply():
                    self.version += 1
                    for update in decision.updates:  # they are named as they were sent
                        self.sent.remove(update)
                    self.applied.append(tuple(sorted(update.worker for update in decision.updates)))
                    applies.append(decision)
        return applies

    def round(self, cosines: dict[int, float], usual: float = 0.8) -> None:
        """Everyone who was granted returns; the cosines of what is applied are told."""
        self.now += 1
        going, self.waiting = self.waiting, []
        applies = []
        for client in going:
            update = Update(client, self.grants[client], self.version, 10, 1.0, incarnation=self.incarnations[client])
            self.sent.add(update)
            applies += self.take(self.policy.arrived(update, self.now))
        for apply in applies:
            for update in apply.updates:
                self.take(self.policy.measured("cosine", update, cosines.get(update.worker, usual), self.now))


def test_five_low_cosines_and_a_client_is_left_out() -> None:
    some = Federation(6)
    for _ in range(4):
        some.round({4: 0.3})
    assert not some.policy.blacklist
    some.round({4: 0.2})
    assert some.policy.blacklist == {4: (0.3, 0.3, 0.3, 0.3, 0.2)}
    assert some.policy.explain() == ["client 4: 0.30, 0.30, 0.30, 0.30, 0.20"]
    assert some.cancelled == [4]  # it had been granted with the others
    some.round({})
    assert some.applied[-1] == (0, 1, 2, 3, 5)


def test_what_still_comes_from_it_is_dropped() -> None:
    some = Federation(5)
    for _ in range(5):
        some.round({4: 0.1})
    late = Update(4, some.grants[4], 0, 10, 1.0)
    assert some.policy.arrived(late, some.now) == [Discard(late)]


def test_it_is_the_mean_that_counts_so_one_lucky_round_saves_nobody() -> None:
    some = Federation(9)
    for cosine in (0.1, 0.1, 0.7, 0.1, 0.1):
        some.round({4: cosine})
    assert list(some.policy.blacklist) == [4]


def test_what_is_usual_is_what_the_others_have() -> None:
    some = Federation(8)
    for _ in range(10):
        some.round({3: 0.17}, usual=0.2)  # below the paper's 0.5 are all
    assert not some.policy.blacklist  # 0.85 of the median
    for _ in range(5):
        some.round({3: 0.05}, usual=0.2)
    assert list(some.policy.blacklist) == [3]


def test_where_cosines_are_wide_apart_anyway_a_low_one_is_not_odd() -> None:
    spread = {client: 0.1 + 0.1 * client for client in range(9)}  # 0.1 to 0.9, and 0.1 is 1.3 spreads below 0.5
    some = Federation(9)
    for _ in range(10):
        some.round(spread)
    assert not some.policy.blacklist


def test_among_noise_who_is_small_is_odd() -> None:
    """Of twelve that are noise each has a cosine of 1/√12 with the whole, and one half as long half of that."""
    some = Federation(12)
    for _ in range(5):
        some.round({2: 0.15}, usual=0.29)
    assert list(some.policy.blacklist) == [2]


def test_what_counts_as_a_spread_shrinks_with_the_cosines() -> None:
    """Of a hundred that are noise each has 0.1, all alike: 0.07 is far below that, in units of it."""
    some = Federation(12)
    for _ in range(5):
        some.round({2: 0.07}, usual=0.1)
    assert list(some.policy.blacklist) == [2]


def test_where_updates_cancel_one_another_out_nobody_is_judged() -> None:
    some = Federation(12)
    for _ in range(10):
        some.round({2: -0.5}, usual=0.0)
    assert not some.policy.blacklist


def by_the_letter(clients: int) -> Federation:
    return Federation(clients, Filtered("bsp:weights=mean", beta=0.5, relative=False, strikes=3))


def test_by_the_letter_of_the_paper() -> None:
    some = by_the_letter(9)
    for _ in range(2):
        some.round({3: 0.49, 4: 0.51}, usual=0.9)
    assert not some.policy.blacklist
    some.round({3: 0.49, 4: 0.51}, usual=0.9)
    assert list(some.policy.blacklist) == [3]


def test_by_the_letter_one_good_round_and_it_starts_anew() -> None:
    some = by_the_letter(6)
    for low in (True, True, False) * 4:
        some.round({4: 0.2} if low else {})
    assert not some.policy.blacklist


def test_by_the_letter_where_most_are_low_nobody_is() -> None:
    some = by_the_letter(7)
    for _ in range(10):
        some.round(dict.fromkeys(range(4), 0.1), usual=0.9)
    assert not some.policy.blacklist


def test_of_four_updates_nobody_can_tell_whose_is_odd() -> None:
    some = Federation(4)
    for _ in range(10):
        some.round({1: -1.0})
    assert not some.policy.blacklist


def test_not_a_number_is_low() -> None:
    some = Federation(6)
    for _ in range(5):
        some.round({1: float("nan")})
    assert list(some.policy.blacklist) == [1]


def test_the_blacklisted_are_tried_again_after_a_while() -> None:
    some = Federation(6, retest=4)
    for _ in range(5):
        some.round({4: 0.1})
    assert list(some.policy.blacklist) == [4]
    for _ in range(6):
        some.round({})
    assert not some.policy.blacklist
    assert some.applied[-1] == (0, 1, 2, 3, 4, 5)


def test_one_can_be_taken_back_by_hand() -> None:
    some = Federation(8)
    for _ in range(5):
        some.round({4: 0.1, 5: 0.1})
    assert list(some.policy.blacklist) == [4, 5]
    some.take(some.policy.pardon([5, 77], some.now))
    assert list(some.policy.blacklist) == [4]
    some.round({})
    assert some.applied[-1] == (0, 1, 2, 3, 5, 6, 7)


def test_one_who_is_taken_back_is_a_new_incarnation_to_the_policy_inside() -> None:
    inside = make("bsp:weights=mean")
    told, arrived = list[Update](), inside.arrived

    def noted(update: Update, now: float) -> list[Decision]:
        told.append(update)
        return arrived(update, now)

    inside.arrived = noted  # type: ignore[method-assign]
    some = Federation(6, Filtered(inside))
    for _ in range(2):
        for _ in range(5):
            some.round({4: 0.1})
        assert list(some.policy.blacklist) == [4]
        some.take(some.policy.pardon([4], some.now))
        some.round({})
        assert told[-1].iteration == 1, "the policy inside counts its Grants anew"
    identities = [(update.worker, update.incarnation, update.iteration) for update in told]
    assert len(set(identities)) == len(identities)
    assert {update.incarnation for update in told if update.worker != 4} == {1}
    assert len({update.incarnation for update in told if update.worker == 4}) == 3
    assert not some.policy.sent


def test_only_a_person_pardons_not_a_worker_itself() -> None:
    """What a worker says it has measured is about itself: a number, where a person names several."""
    some = Federation(8)
    for _ in range(5):
        some.round({4: 0.1, 5: 0.1})
    assert "cosines 0.10, 0.10" in some.policy.exclusion(4) and not some.policy.exclusion(3)
    assert some.policy.measured("pardon", 4, 1.0, some.now) == []
    assert list(some.policy.blacklist) == [4, 5]
    some.take(some.policy.measured("pardon", (4, 77), 1.0, some.now))
    assert list(some.policy.blacklist) == [5]
    assert not some.policy.exclusion(4)


def test_if_all_others_leave_the_blacklisted_are_better_than_nobody() -> None:
    some = Federation(6)
    for _ in range(5):
        some.round({3: 0.1})
    for client in (0, 1, 2, 4, 5):
        some.waiting = [each for each in some.waiting if each != client]
        some.take(some.policy.left(client, some.now))
    assert not some.policy.blacklist
    assert some.waiting == [3]
    some.round({})
    assert some.applied[-1] == (3,)


def test_who_leaves_and_comes_back_is_still_blacklisted() -> None:
    some = Federation(6)
    for _ in range(5):
        some.round({4: 0.1})
    some.take(some.policy.left(4, some.now))
    some.round({})
    some.rejoin(4)
    assert list(some.policy.blacklist) == [4]
    some.round({})
    assert 4 not in some.applied[-1]
    some.take(some.policy.pardon([4], some.now))
    some.round({})
    assert 4 in some.applied[-1]


def test_one_who_is_away_can_be_pardoned() -> None:
    some = Federation(6)
    for _ in range(5):
        some.round({4: 0.1})
    some.take(some.policy.left(4, some.now))
    assert some.policy.pardon([4], some.now) == []
    some.rejoin(4)
    some.round({})
    assert 4 in some.applied[-1]


def test_what_else_is_measured_is_for_the_policy_inside() -> None:
    heard: list[object] = []
    inside = make("bsp")
    inside.measured = lambda *told: heard.append(told) or []  # type: ignore[method-assign,func-returns-value]
    assert Filtered(inside).measured("momentum", None, 0.9, 1.0) == []
    assert heard == [("momentum", None, 0.9, 1.0)]


def test_it_survives_being_saved() -> None:
    some = Federation(6, retest=3)
    for _ in range(5):
        some.round({4: 0.1})
    again = load(save(some.policy))
    assert isinstance(again, Filtered)
    assert again.blacklist == some.policy.blacklist and again.seen == some.policy.seen
    some.policy = again
    for _ in range(5):
        some.round({})
    assert not some.policy.blacklist


@pytest.mark.parametrize("inside", ["safa", "bsp:pipeline=true"])
def test_what_cannot_be_filtered_is_refused(inside: str) -> None:
    with pytest.raises(PolicyError, match="filtered: a p"):
        Filtered(inside)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_whatever_is_measured_somebody_goes_on_and_everything_is_decided_once(data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 9))
    relative = data.draw(st.booleans())
    retest = data.draw(st.sampled_from((0, 2, 5)))
    inside = data.draw(st.sampled_from(("bsp:weights=mean", "bsp:fraction=0.5", "asp", "r2sp:groups=2")))
    some = Federation(clients, Filtered(inside, 0.5, relative, 1, retest))
    members = set(range(clients))
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.integers(0, 4)) == 0 and len(members) < clients:
            back = data.draw(st.sampled_from(sorted(set(range(clients)) - members)))
            members.add(back)
            some.rejoin(back)
        if data.draw(st.integers(0, 9)) == 0 and len(members) > 1:
            gone = data.draw(st.sampled_from(sorted(members)))
            members.remove(gone)
            some.waiting = [each for each in some.waiting if each != gone]
            some.take(some.policy.left(gone, some.now))
        cosines = {client: data.draw(st.floats(-1, 1)) for client in members}
        some.round(cosines)
        some.take(some.policy.woke(some.now + 100))
        some.now += 100
        assert some.waiting, "somebody must be at work"
        assert not set(some.waiting) & some.policy.blacklist.keys()
        assert some.policy.aside == some.policy.blacklist.keys() & members
        assert some.policy.aside < members
