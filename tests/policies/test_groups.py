"""Groups: an inner policy in each group, an outer one across. a and c are in group 0, b and d in group 1."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from paceline.policies import Apply, Grant, Keep, Policy, PolicyError, Update, load, make, save
from paceline.policies.asp import ASP
from paceline.policies.bsp import BSP
from paceline.policies.groups import Groups
from paceline.policies.ksync import KSync
from paceline.policies.r2sp import R2SP
from paceline.policies.safa import SAFA
from paceline.policies.ssp import SSP
from policies.cluster import run, steady
from policies.conversation import Conversation, applied, cancelled, discarded, granted, wake_at


def fl_r2sp(fraction: float = 1.0) -> Groups:
    return Groups(count=2, inner=BSP(fraction=fraction), outer=R2SP(relax=1.0))


def test_a_barrier_inside_and_round_robin_outside() -> None:
    talk = Conversation(fl_r2sp())
    talk.joins("a").answers(granted("a"))  # group 0 is the pilot
    talk.joins("b").answers()
    talk.joins("c").answers(granted("c"))
    talk.joins("d").answers()
    talk.arrives("c", at=1.0).answers()
    talk.arrives("a", at=4.0).answers(granted("b"), granted("d"), wake_at(6.0))  # T is 4 s, the gap 2 s
    talk.wakes().answers(applied("ca"), granted("c", staleness=1), granted("a", staleness=1))
    talk.arrives("d", at=7.0).answers()
    talk.arrives("b", at=8.0).answers(applied("db"), granted("d"), granted("b"))
    assert talk.staleness == [0, 0, 1, 1]


def test_group_order_is_fixed_and_turns_are_a_gap_apart() -> None:
    story = run(fl_r2sp(), {worker: steady(1.0 + worker / 10) for worker in range(6)}, updates=240)
    order = [workers[0] % 2 for _, workers in story.applied[2:]]
    assert order == [order[0], 1 - order[0]] * (len(order) // 2) + [order[0]] * (len(order) % 2)
    times = [time for time, _ in story.applied]
    assert min(b - a for a, b in pairwise(times[4:])) >= 1.5 / 2 - 0.1
    assert max(story.staleness) == 1


def test_a_late_update_is_discarded_and_its_worker_gets_the_newest_model() -> None:
    talk = Conversation(fl_r2sp(fraction=0.5), workers="ac")
    talk.arrives("c", at=1.0).answers(applied("c"), granted("c"))  # one of two members is enough
    talk.arrives("a", at=1.5).answers(discarded("a"), granted("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"))


def test_a_late_worker_waits_while_its_group_waits_for_its_turn() -> None:
    talk = Conversation(fl_r2sp(fraction=0.5), workers="acbd")
    talk.arrives("c", at=4.0).answers(granted("b"), granted("d"), wake_at(6.0))
    talk.arrives("a", at=5.0).answers(discarded("a"))
    talk.wakes().answers(applied("c"), granted("c"), granted("a"))


def test_updates_that_arrive_while_the_group_waits_are_applied_with_it() -> None:
    talk = Conversation(Groups(count=2, inner=ASP(), outer=R2SP(relax=1.0)), workers="acbd")
    talk.arrives("c", at=4.0).answers(granted("b"), granted("d"), wake_at(6.0))
    talk.arrives("a", at=5.0).answers()
    talk.wakes().answers(applied("ca"), granted("c"), granted("a"))


def test_a_group_that_is_ahead_waits_under_ssp() -> None:
    talk = Conversation(Groups(count=2, inner=BSP(), outer=SSP(staleness=0)), workers="acb")
    talk.arrives("a", at=1.0).answers()
    talk.arrives("c", at=2.0).answers(applied("ac"))  # group 1 has done none
    talk.arrives("b", at=3.0).answers(applied("b"), granted("b"), granted("a"), granted("c"))


def test_a_group_that_ksync_cancels_starts_again() -> None:
    talk = Conversation(Groups(count=2, inner=BSP(), outer=KSync(k=1)), workers="abcd")
    talk.arrives("b", at=1.0).answers()
    talk.arrives("a", at=2.0).answers()
    talk.arrives("c", at=3.0).answers(
        applied("ac"), cancelled("d"), discarded("b"), granted("a"), granted("c"), granted("b"), granted("d")
    )
    talk.arrives("d", at=4.0, iteration=1).answers(discarded("d"))
    talk.arrives("d", at=5.0).answers()
    talk.arrives("b", at=6.0).answers(
        applied("db"), cancelled("a"), cancelled("c"),
        granted("a"), granted("c"), granted("d"), granted("b"),
    )  # fmt: skip


def test_decisions_name_an_update_as_it_was_sent_even_if_its_worker_has_left() -> None:
    """After a Cancel the inner policy counts iterations anew, and the driver does not."""
    talk = Conversation(Groups(count=2, inner=BSP(), outer=KSync(k=1)), workers="abd")
    talk.arrives("a", at=1.0)  # cancels b and d
    talk.arrives("b", at=2.0).answers()
    talk.leaves("b", at=3.0).answers()
    talk.arrives("d", at=4.0)
    (apply,) = [decision for decision in talk.last if isinstance(decision, Apply)]
    assert [(update.worker, update.iteration) for update in apply.updates] == [(1, 2), (3, 2)]


def test_a_group_whose_last_member_leaves_passes_its_turn() -> None:
    talk = Conversation(fl_r2sp(), workers="ab")
    talk.arrives("a", at=4.0).answers(granted("b"))
    talk.wakes().answers(applied("a"), granted("a"))
    talk.arrives("a", at=9.0).answers()  # it is b's turn
    talk.leaves("b", at=10.0).answers(applied("a"), granted("a"))


def test_a_group_that_empties_and_fills_again_is_woken() -> None:
    """An inner ring remembers its WakeAt, so it must be woken then, even if its group is empty at that time."""
    talk = Conversation(Groups(count=1, inner=R2SP(relax=1.0), outer=ASP()), workers="ab")
    talk.arrives("a", at=4.0).answers(granted("b"), wake_at(6.0))
    talk.leaves("a", at=4.5)
    talk.leaves("b", at=4.5)
    talk.joins("a", at=5.0).answers()
    while not talk.open:
        talk.wakes()
    talk.answers(granted("a"))


@pytest.mark.parametrize("saved", [False, True])
def test_a_group_that_empties_and_fills_again_is_a_new_incarnation_to_the_outer_policy(saved: bool) -> None:
    talk = Conversation(Groups(count=2, inner=ASP(), outer=BSP()), workers="ab")
    for now in (0.0, 10.0):
        talk.arrives("a", at=now + 1.0).answers()
        talk.leaves("a", at=now + 2.0).answers()
        talk.joins("a", at=now + 10.0).answers(granted("a"))
    policy: Any = load(json.loads(json.dumps(save(talk.policy)))) if saved else talk.policy
    talk.policy = policy
    alike = [replace(update, incarnation=0) for update in policy.undecided]
    assert alike == [Update(0, 1, 0, 32, 1.0, incarnation=0)] * 2, "equal except for the incarnation"
    assert [update.incarnation for update in policy.undecided] == [1, 2]
    talk.arrives("a", at=21.0).answers()
    talk.arrives("b", at=22.0).answers(applied("aaab"), granted("a"), granted("b"))
    (apply,) = [decision for decision in talk.last if isinstance(decision, Apply)]
    assert [update.incarnation for update in apply.updates] == [1, 2, 3, 1]
    assert not policy.undecided


@pytest.mark.parametrize("inner", ["asp", "bsp", "bsp:fraction=0.5"])
def test_a_groups_size_does_not_scale_the_learning_rate(inner: str) -> None:
    """With weights=sum every update weighs 1, however many updates of its group are applied with it."""
    policy = Groups(count=2, inner=inner, outer="r2sp")
    story = run(policy, {worker: steady(1.0 + worker / 9) for worker in range(7)}, updates=150)
    assert {weight for weights in story.weights for weight in weights} == {1.0}


def test_a_group_counts_as_the_mean_of_its_members_under_safa() -> None:
    talk = Conversation(Groups(count=2, inner=BSP(), outer=SAFA(fraction=1.0)), workers="abc")
    for worker in "acb":
        talk.arrives(worker, at=1.0)
    (apply,) = [decision for decision in talk.last if isinstance(decision, Apply)]
    assert [update.worker for update in apply.updates] == [0, 2, 1]
    assert apply.weights == pytest.approx((1 / 3, 1 / 3, 1 / 3))  # group 0 has two thirds of the data
    assert apply.mix == pytest.approx(1.0)


def test_each_kept_update_has_its_own_slot() -> None:
    """A group's update may hold two updates of one worker. Neither may replace the other."""
    talk = Conversation(Groups(count=2, inner=ASP(), outer=SAFA(fraction=1.0)), workers="abc")
    talk.arrives("a", at=1.0).answers()
    talk.arrives("c", at=2.0).answers()
    talk.arrives("b", at=3.0)
    keeps = [decision for decision in talk.last if isinstance(decision, Keep)]
    assert [keep.update.worker for keep in keeps] == [0, 2, 1]
    assert len({keep.slot for keep in keeps}) == 3


def test_inner_and_outer_cannot_both_keep_updates() -> None:
    with pytest.raises(PolicyError, match="cannot both keep"):
        Groups(inner="safa", outer="safa")
    with pytest.raises(PolicyError, match="cannot both keep"):
        Groups(inner=make("groups:outer=safa"), outer="safa")


def test_only_inner_may_tune_batches() -> None:
    with pytest.raises(PolicyError, match="only inner can tune"):
        Groups(outer="r2sp:tune_batches=true")


def test_each_group_has_its_own_inner_policy() -> None:
    inner = BSP()
    policy = Groups(count=2, inner=inner, outer="asp")
    Conversation(policy, workers="ab")
    assert policy.groups[0].inner is not policy.groups[1].inner
    assert inner.granted == {}


class Listening(ASP):
    """Records the measurements that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[object] = []

    def measured(self, kind: str, subject: object, value: float, now: float) -> list[Any]:
        self.heard.append((kind, value))
        return []


def test_all_policies_receive_a_measurement_without_a_subject() -> None:
    outer = Listening()
    policy = Groups(count=2, inner=Listening(), outer=outer)
    policy.joined(0, 0.0)
    assert policy.measured("momentum", None, 0.9, 0.0) == []
    policy.joined(1, 1.0)  # a group that forms later knows it too
    assert policy.measured("cosine", Update(0, 1, 0, 1, 1.0), 0.5, 1.0) == []
    for each in (outer, policy.groups[0].inner, policy.groups[1].inner):
        assert isinstance(each, Listening)
        assert each.heard == [("momentum", 0.9)]


@pytest.mark.parametrize("policy", [fl_r2sp(), Groups(outer="asp")])
def test_groups_take_turns_if_the_outer_policy_does(policy: Policy) -> None:
    assert policy.takes_turns == policy.outer.takes_turns  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [{"inner": "bsp:pipeline=true"}, {"outer": "bsp:pipeline=true"}])
def test_neither_inner_nor_outer_can_be_pipelined(given: dict[str, str]) -> None:
    with pytest.raises(PolicyError, match="neither inner nor outer can be pipelined"):
        Groups(**given)  # type: ignore[arg-type]


def test_fl_r2sp_moves_the_model_by_an_mth_of_a_groups_mean() -> None:
    """Two groups of two: `model` mixes in one half of the group's mean model, `update` adds half of its mean change."""
    for moves, mix, weights in (("model", 0.5, (0.25, 0.75)), ("update", None, (0.125, 0.375))):
        policy = make(f"fl-r2sp:groups=2,fraction=1,moves={moves}")
        assert policy.mixes == (moves == "model")
        assert not policy.takes_turns
        for worker in range(4):
            policy.joined(worker, 0.0)
        policy.arrived(Update(0, 1, 0, 10, 1.0), 1.0)
        (apply,) = (each for each in policy.arrived(Update(2, 1, 0, 30, 1.0), 1.0) if isinstance(each, Apply))
        assert apply.mix == mix
        assert apply.weights == pytest.approx(weights)


def test_fl_r2sp_with_equal_weights_counts_all_clients_alike() -> None:
    policy = make("fl-r2sp:groups=1,fraction=1,weights=equal")
    for worker in range(2):
        policy.joined(worker, 0.0)
    policy.arrived(Update(0, 1, 0, 10, 1.0), 1.0)
    (apply,) = (each for each in policy.arrived(Update(1, 1, 0, 30, 1.0), 1.0) if isinstance(each, Apply))
    assert apply.weights == pytest.approx((0.5, 0.5))


def test_as_printed_is_the_whole_letter_of_the_paper() -> None:
    """β = 0.5, three consecutive rounds, every round judged, and a plain mean of models, all at once."""
    policy: Any = make("fl-r2sp:groups=2,fraction=1,as_printed=true")
    assert (policy.mixes, policy.compares) == (True, True)
    assert (policy.beta, policy.strikes, policy.relative) == (0.5, 3, False)
    for worker in range(4):
        policy.joined(worker, 0.0)
    policy.arrived(Update(0, 1, 0, 10, 1.0), 1.0)
    (apply,) = (each for each in policy.arrived(Update(2, 1, 0, 30, 1.0), 1.0) if isinstance(each, Apply))
    assert apply.mix == pytest.approx(0.5) and apply.weights == pytest.approx((0.5, 0.5))
    assert policy.cohorts, "an Apply of two updates is judged too"


@pytest.mark.parametrize("option", ["moves=model", "weights=equal", "relative=false", "beta=0.3", "strikes=4"])
def test_as_printed_leaves_no_choice_of_what_it_sets(option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(PolicyError, match=rf"^fl-r2sp: as_printed=true sets {name}, so leave {option} out\.$"):
        make(f"fl-r2sp:{option},as_printed=true")


@pytest.mark.parametrize(("members", "quorum"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (10, 8), (16, 12)])
def test_a_group_waits_for_at_least_a_fraction_C_of_its_clients(members: int, quorum: int) -> None:
    policy = make("fl-r2sp:groups=1,fraction=0.75")
    for worker in range(members):
        policy.joined(worker, 0.0)
    applied = []
    for worker in range(members):
        decisions = policy.arrived(Update(worker, 1, 0, 10, 1.0), 1.0 + worker)
        applied += [len(each.updates) for each in decisions if isinstance(each, Apply)]
    assert applied == [quorum]


def test_T_of_fl_r2sp_is_one_average_over_all_groups_from_grant_to_quorum() -> None:
    policy = make("fl-r2sp:groups=2,fraction=1,relax=1,filter=false")
    for worker in range(2):
        policy.joined(worker, 0.0)
    policy.arrived(Update(0, 1, 0, 10, 1.0), 4.0)  # its turn comes at once, since T was unknown
    assert policy.outer.pace.T == 4.0  # type: ignore[attr-defined]
    policy.arrived(
        Update(1, 1, 0, 10, 1.0), 5.0
    )  # it waits for its turn, T/2 after the last; T does not count that wait
    assert policy.outer.pace.T == pytest.approx(4.0 + 0.1 * (5.0 - 4.0))  # type: ignore[attr-defined]
    assert [each for each in policy.woke(6.04) if isinstance(each, Apply)] == []
    assert len([each for each in policy.woke(6.06) if isinstance(each, Apply)]) == 1


def settled_federation(policy: Any, clients: int, rounds: int) -> float:
    """Run a federation where every client takes one second. Return the time when `rounds` rounds were over."""
    story = run(policy, {client: steady(1.0) for client in range(clients)}, updates=clients * rounds)
    return float(story.applied[-1][0])


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_fl_r2sp_remembers_T_the_turn_and_the_blacklist_across_a_restart(turn: int) -> None:
    policy: Any = make("fl-r2sp:groups=3,fraction=1,relax=1")
    settled_federation(policy, 6, 7)
    policy.blacklist[5] = (0.1, 0.2)
    memory = json.loads(json.dumps(policy.memory()))
    assert memory["T"] == pytest.approx(1.0)
    assert memory["turn"] in (0, 1, 2)
    memory["turn"] = turn
    again: Any = make("fl-r2sp:groups=3,fraction=1,relax=1")
    again.recall(memory)
    assert again.blacklist == {5: (0.1, 0.2)}
    granted_at: dict[int, float] = {}
    for client in (4, 0, 2, 1, 3, 5):  # in any order
        decisions = again.joined(client, 0.0)
        granted_at |= {each.worker: 0.0 for each in decisions if isinstance(each, Grant)}
    for now in (0.34, 0.68, 1.02):
        granted_at |= {each.worker: now for each in again.woke(now) if isinstance(each, Grant)}
    groups = {client % 3: at for client, at in granted_at.items()}
    others = sorted((0, 2), key=lambda group: (group < memory["turn"], group))
    assert groups == {1: 0.0, others[0]: 0.34, others[1]: 0.68}, "one gap apart, from the group that had the turn"
    assert 5 not in granted_at
    line = [group for seat in again.outer.ring for group in seat.members]
    assert line == [1, 2, 0]


def test_groups_take_turns_by_number_in_whatever_order_they_join() -> None:
    policy: Any = make("fl-r2sp:groups=5,fraction=1")
    for client in (3, 1, 4, 0, 2):
        policy.joined(client, 0.0)
    line = [group for seat in policy.outer.ring for group in seat.members]
    assert line == [3, 4, 0, 1, 2]


def test_T_is_recalled_even_if_no_group_had_the_turn() -> None:
    policy: Any = make("fl-r2sp")
    policy.recall({"T": 2.5, "turn": None, "blacklist": {}})
    assert (policy.outer.pace.T, policy.outer.first_turn) == (2.5, None)


@pytest.mark.parametrize("memory", [{}, {"T": None, "turn": None}, {"T": "x", "turn": 1}, {"T": -1.0, "turn": 0}])
def test_an_invalid_memory_is_ignored(memory: dict[str, Any]) -> None:
    policy: Any = make("fl-r2sp")
    policy.recall(memory)
    assert policy.outer.pace.T is None and not policy.blacklist
