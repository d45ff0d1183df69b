"""The filter for outliers: which clients it blacklists, and how it takes them back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies import Apply, Cancel, Decision, Discard, Grant, PolicyError, Update, load, make, save
from paceline.policies.filtered import Filtered
from tries import tries


class Federation:
    """Equally fast clients under a barrier. The test chooses the cosines."""

    def __init__(self, clients: int, policy: Filtered | None = None, **options: object) -> None:
        self.policy = policy or Filtered(make("bsp:weights=mean"), **options)  # type: ignore[arg-type]
        self.now = 0.0
        self.grants = dict.fromkeys(range(clients), 0)
        self.incarnations = dict.fromkeys(range(clients), 1)
        self.waiting: list[int] = []  # clients that hold a Grant
        self.sent: set[Update] = set()  # undecided updates
        self.version = 0
        self.applied: list[tuple[int, ...]] = []
        self.cancelled: list[int] = []
        self.discarded: list[Update] = []
        self.reports = True  # are the cosines of updates that are applied together reported?
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
                    for update in decision.updates:  # an Apply names updates as they were sent
                        self.sent.remove(update)
                    self.applied.append(tuple(sorted(update.worker for update in decision.updates)))
                    applies.append(decision)
        return applies

    def round(self, cosines: dict[int, float], others: float = 0.8) -> None:
        """Let every client that holds a Grant return its update, and report the cosines of the applied updates."""
        self.now += 1
        granted, self.waiting = self.waiting, []
        applies = []
        for client in granted:
            update = Update(client, self.grants[client], self.version, 10, 1.0, incarnation=self.incarnations[client])
            self.sent.add(update)
            applies += self.take(self.policy.arrived(update, self.now))
        for apply in applies:
            if self.reports and len(apply.updates) > 1:
                for update in apply.updates:
                    self.take(self.policy.measured("cosine", update, cosines.get(update.worker, others), self.now))


def test_a_client_is_blacklisted_after_five_low_cosines() -> None:
    some = Federation(6)
    for _ in range(4):
        some.round({4: 0.3})
    assert not some.policy.blacklist
    some.round({4: 0.2})
    assert some.policy.blacklist == {4: (0.3, 0.3, 0.3, 0.3, 0.2)}
    assert some.policy.explain() == ["client 4: 0.30, 0.30, 0.30, 0.30, 0.20"]
    assert some.cancelled == [4]  # it held a Grant, like the others
    some.round({})
    assert some.applied[-1] == (0, 1, 2, 3, 5)


def test_updates_of_a_blacklisted_client_are_discarded() -> None:
    some = Federation(5)
    for _ in range(5):
        some.round({4: 0.1})
    late = Update(4, some.grants[4], 0, 10, 1.0)
    assert some.policy.arrived(late, some.now) == [Discard(late)]


def test_the_mean_counts_so_one_good_round_does_not_save_an_outlier() -> None:
    some = Federation(9)
    for cosine in (0.1, 0.1, 0.7, 0.1, 0.1):
        some.round({4: cosine})
    assert list(some.policy.blacklist) == [4]


def test_a_cosine_is_judged_relative_to_the_median() -> None:
    some = Federation(8)
    for _ in range(10):
        some.round({3: 0.17}, others=0.2)  # all cosines are below the paper's β of 0.5
    assert not some.policy.blacklist  # client 3 is at 0.85 of the median
    for _ in range(5):
        some.round({3: 0.05}, others=0.2)
    assert list(some.policy.blacklist) == [3]


def test_a_low_cosine_is_no_outlier_if_cosines_spread_widely() -> None:
    spread = {client: 0.1 + 0.1 * client for client in range(9)}  # from 0.1 to 0.9; 0.1 is 1.3 spreads below 0.5
    some = Federation(9)
    for _ in range(10):
        some.round(spread)
    assert not some.policy.blacklist


def test_a_small_update_among_noise_is_an_outlier() -> None:
    """Each of twelve noisy updates has a cosine of 1/√12 with their sum. One of half the length has half of that."""
    some = Federation(12)
    for _ in range(5):
        some.round({2: 0.15}, others=0.29)
    assert list(some.policy.blacklist) == [2]


def test_the_least_spread_shrinks_with_the_cosines() -> None:
    """Each of a hundred noisy updates has a cosine of 0.1. In units of that, 0.07 is far below."""
    some = Federation(12)
    for _ in range(5):
        some.round({2: 0.07}, others=0.1)
    assert list(some.policy.blacklist) == [2]


def test_no_client_is_judged_if_the_updates_cancel_out() -> None:
    some = Federation(12)
    for _ in range(10):
        some.round({2: -0.5}, others=0.0)
    assert not some.policy.blacklist


def with_the_papers_rule(clients: int) -> Federation:
    return Federation(clients, Filtered("bsp:weights=mean", beta=0.5, relative=False, strikes=3))


def test_the_papers_rule_blacklists_after_three_cosines_below_beta() -> None:
    some = with_the_papers_rule(9)
    for _ in range(2):
        some.round({3: 0.49, 4: 0.51}, others=0.9)
    assert not some.policy.blacklist
    some.round({3: 0.49, 4: 0.51}, others=0.9)
    assert list(some.policy.blacklist) == [3]


def test_the_papers_rule_starts_to_count_anew_after_a_good_round() -> None:
    some = with_the_papers_rule(6)
    for low in (True, True, False) * 4:
        some.round({4: 0.2} if low else {})
    assert not some.policy.blacklist


def test_the_papers_rule_judges_every_round() -> None:
    """Also one in which most clients are below β, and one of two clients."""
    some = with_the_papers_rule(7)
    for _ in range(3):
        some.round(dict.fromkeys(range(4), 0.1), others=0.9)
    assert list(some.policy.blacklist) == [0, 1, 2, 3]
    some = with_the_papers_rule(2)
    for _ in range(3):
        some.round({0: 0.1}, others=0.9)
    assert list(some.policy.blacklist) == [0]


def test_the_papers_rule_counts_no_streak_across_a_round_that_broke_it() -> None:
    """Most clients are below β in every third round. There client 4 is not."""
    some = with_the_papers_rule(7)
    for number in range(12):
        if number % 3 < 2:
            some.round({4: 0.1}, others=0.9)
        else:
            some.round({4: 0.9}, others=0.1)
    assert not some.policy.blacklist


def test_the_papers_rule_leaves_one_client_if_all_are_below_beta() -> None:
    some = with_the_papers_rule(4)
    for _ in range(9):
        some.round({}, others=0.2)
    assert list(some.policy.blacklist) == [0, 1, 2]


def test_an_update_that_is_applied_alone_breaks_a_streak_of_the_papers_rule() -> None:
    """It is the whole, so its cosine is 1."""
    some = with_the_papers_rule(2)
    for _ in range(6):
        for _ in range(2):
            some.round({0: 0.1}, others=0.9)
        some.waiting.remove(1)
        some.take(some.policy.left(1, some.now))
        some.round({})
        some.rejoin(1)
    assert not some.policy.blacklist


def test_a_round_that_cannot_be_judged_ends_a_streak() -> None:
    """Four low cosines, then a round whose median is not above 0, or one of four clients, or one without a report."""
    some = Federation(6)
    for _ in range(4):
        some.round({4: 0.1})
    some.round({4: 0.1}, others=0.0)
    for _ in range(4):
        some.round({4: 0.1})
    for client in (0, 1):
        some.waiting.remove(client)
        some.take(some.policy.left(client, some.now))
    some.round({4: 0.1})
    for client in (0, 1):
        some.rejoin(client)
    for _ in range(4):
        some.round({4: 0.1})
    some.reports = False
    some.round({})
    some.reports = True
    for _ in range(4):
        some.round({4: 0.1})
    assert not some.policy.blacklist
    some.round({4: 0.1})
    assert list(some.policy.blacklist) == [4]


def test_a_round_in_which_a_client_is_late_neither_counts_nor_ends_its_streak() -> None:
    some = with_the_papers_rule(3)
    some.round({2: 0.1})
    some.round({2: 0.1})
    some.waiting.remove(2)
    some.policy.policy.backup = 1  # type: ignore[attr-defined]
    some.round({})
    assert some.applied[-1] == (0, 1)
    some.policy.policy.backup = 0  # type: ignore[attr-defined]
    late = Update(2, some.grants[2], some.version, 10, 1.0)
    some.sent.add(late)
    some.take(some.policy.arrived(late, some.now))
    assert some.discarded == [late] and not some.policy.blacklist
    some.round({2: 0.1})
    assert list(some.policy.blacklist) == [2]


def test_no_client_is_judged_among_only_four_updates() -> None:
    some = Federation(4)
    for _ in range(10):
        some.round({1: -1.0})
    assert not some.policy.blacklist


def test_nan_counts_as_a_low_cosine() -> None:
    some = Federation(6)
    for _ in range(5):
        some.round({1: float("nan")})
    assert list(some.policy.blacklist) == [1]


def test_a_blacklisted_client_is_tried_again_after_retest_versions() -> None:
    some = Federation(6, retest=4)
    for _ in range(5):
        some.round({4: 0.1})
    assert list(some.policy.blacklist) == [4]
    for _ in range(6):
        some.round({})
    assert not some.policy.blacklist
    assert some.applied[-1] == (0, 1, 2, 3, 4, 5)


def test_the_operator_can_take_a_client_back() -> None:
    some = Federation(8)
    for _ in range(5):
        some.round({4: 0.1, 5: 0.1})
    assert list(some.policy.blacklist) == [4, 5]
    some.take(some.policy.pardon([5, 77], some.now))
    assert list(some.policy.blacklist) == [4]
    some.round({})
    assert some.applied[-1] == (0, 1, 2, 3, 5, 6, 7)


def test_a_client_that_is_taken_back_is_a_new_incarnation_to_the_inner_policy() -> None:
    inner = make("bsp:weights=mean")
    told, arrived = list[Update](), inner.arrived

    def noted(update: Update, now: float) -> list[Decision]:
        told.append(update)
        return arrived(update, now)

    inner.arrived = noted  # type: ignore[method-assign]
    some = Federation(6, Filtered(inner))
    for _ in range(2):
        for _ in range(5):
            some.round({4: 0.1})
        assert list(some.policy.blacklist) == [4]
        some.take(some.policy.pardon([4], some.now))
        some.round({})
        assert told[-1].iteration == 1, "the inner policy counts its Grants anew"
    identities = [(update.worker, update.incarnation, update.iteration) for update in told]
    assert len(set(identities)) == len(identities)
    assert {update.incarnation for update in told if update.worker != 4} == {1}
    assert len({update.incarnation for update in told if update.worker == 4}) == 3
    assert not some.policy.sent


def test_a_client_cannot_pardon_itself() -> None:
    """A worker's own measurement names one client, by a number. The operator names several, in a tuple."""
    some = Federation(8)
    for _ in range(5):
        some.round({4: 0.1, 5: 0.1})
    assert "cosines 0.10, 0.10" in some.policy.exclusion(4) and not some.policy.exclusion(3)
    assert some.policy.measured("pardon", 4, 1.0, some.now) == []
    assert list(some.policy.blacklist) == [4, 5]
    some.take(some.policy.measured("pardon", (4, 77), 1.0, some.now))
    assert list(some.policy.blacklist) == [5]
    assert not some.policy.exclusion(4)


def test_blacklisted_clients_are_taken_back_if_all_others_leave() -> None:
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


def test_a_blacklisted_client_that_rejoins_stays_blacklisted() -> None:
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


def test_an_absent_client_can_be_pardoned() -> None:
    some = Federation(6)
    for _ in range(5):
        some.round({4: 0.1})
    some.take(some.policy.left(4, some.now))
    assert some.policy.pardon([4], some.now) == []
    some.rejoin(4)
    some.round({})
    assert 4 in some.applied[-1]


def test_other_measurements_reach_the_inner_policy() -> None:
    heard: list[object] = []
    inner = make("bsp")
    inner.measured = lambda *told: heard.append(told) or []  # type: ignore[method-assign,func-returns-value]
    assert Filtered(inner).measured("momentum", None, 0.9, 1.0) == []
    assert heard == [("momentum", None, 0.9, 1.0)]


def test_the_blacklist_survives_saving_and_loading() -> None:
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


@pytest.mark.parametrize("inner", ["safa", "bsp:pipeline=true"])
def test_policies_that_cannot_be_filtered_are_refused(inner: str) -> None:
    with pytest.raises(PolicyError, match=r"filtered: a (pipelined )?policy .* choose another one"):
        Filtered(inner)


@tries(20, 60)
@given(st.data())
def test_under_any_cosines_some_client_proceeds_and_every_update_is_decided_once(data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 9))
    relative = data.draw(st.booleans())
    retest = data.draw(st.sampled_from((0, 2, 5)))
    inner = data.draw(st.sampled_from(("bsp:weights=mean", "bsp:fraction=0.5", "asp", "r2sp:groups=2")))
    some = Federation(clients, Filtered(inner, 0.5, relative, 1, retest))
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
        assert some.waiting, "at least one client must hold a Grant"
        assert not set(some.waiting) & some.policy.blacklist.keys()
        assert some.policy.aside == some.policy.blacklist.keys() & members
        assert some.policy.aside < members
