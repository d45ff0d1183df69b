"""Property tests: every policy, under a driver that can do everything the contract allows.

The state machine below joins, leaves, computes, pushes, waits and wakes in any order and at any time. `AnyDriver`
judges each decision, and the policy's promises are checked after each event. At the end, all workers behave well for a
while, to show that none waits forever. Then all leave, to show that no update is left undecided. Last, the whole
history is replayed with a fresh policy. `SPECS` begins with all registered names, so a newly registered policy is
included.

`make test-all` tries 200 other histories of each policy. To search ten times as long:
PACELINE_SEARCH=10 .venv/bin/python -m pytest tests/policies/test_promises.py
"""

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from policies.any_driver import AnyDriver
from policies.histories import DELAYS, IDS, SHADOWS, act
from policies.promises import promises_of
from policies.specs import APPLY_ALL_MEMBERS, MAY_WAIT_LONG, SPECS, fresh
from tries import tries

SETTINGS = tries(8, 200, stateful_step_count=40, suppress_health_check=list(HealthCheck))

WHICH = st.integers(0, IDS - 1)


class AnyHistory(RuleBasedStateMachine):
    spec: str

    def __init__(self) -> None:
        super().__init__()
        self.driver = AnyDriver(fresh(self.spec), promises_of(self.spec))

    def busy(self) -> bool:
        return any(not self.driver.waiting_for_turn(task) for task in self.driver.running.values())

    @rule(which=WHICH, seconds=DELAYS)
    def join(self, which: int, seconds: float) -> None:
        act(self.driver, ("join", which, seconds, True))

    @precondition(lambda self: self.driver.progress)
    @rule(which=WHICH, seconds=DELAYS)
    def leave(self, which: int, seconds: float) -> None:
        act(self.driver, ("leave", which, seconds, True))

    @precondition(busy)
    @rule(which=WHICH, seconds=DELAYS, dutiful=st.booleans())
    def answer(self, which: int, seconds: float, dutiful: bool) -> None:
        act(self.driver, ("answer", which, seconds, dutiful))

    @precondition(busy)
    @rule(others=st.lists(WHICH, min_size=2, max_size=6), seconds=DELAYS)
    def answer_in_a_row(self, others: list[int], seconds: float) -> None:
        for which in others:
            act(self.driver, ("answer", which, seconds, True))

    @precondition(busy)
    @rule(which=WHICH, seconds=DELAYS)
    def compute(self, which: int, seconds: float) -> None:
        act(self.driver, ("compute", which, seconds, True))

    @precondition(lambda self: self.driver.cancelled)
    @rule(which=WHICH, seconds=DELAYS)
    def answer_a_cancelled_grant(self, which: int, seconds: float) -> None:
        act(self.driver, ("late", which, seconds, True))

    @precondition(lambda self: any(len(tasks) > 1 for _, tasks in self.driver.streams))
    @rule(which=WHICH, seconds=DELAYS)
    def hold_an_update(self, which: int, seconds: float) -> None:
        act(self.driver, ("hold", which, seconds, True))

    @rule(seconds=DELAYS, dutiful=st.booleans())
    def wait(self, seconds: float, dutiful: bool) -> None:
        act(self.driver, ("wait", 0, seconds, dutiful))

    @rule()
    def wake_for_no_reason(self) -> None:
        act(self.driver, ("wake", 0, 0.0, False))

    @precondition(lambda self: len(self.driver.shadows) < SHADOWS)
    @rule(on_disk=st.booleans())
    def run_a_copy_along(self, on_disk: bool) -> None:
        if on_disk:
            self.driver.saves_and_loads()
        else:
            self.driver.copies()

    def teardown(self) -> None:
        driver = self.driver
        if driver.broken:
            return
        before = dict(driver.iterations)
        steps = 300 + 150 * len(before)
        if self.spec not in MAY_WAIT_LONG:
            driver.calms_down(1.0, lambda: all(driver.iterations[w] >= before[w] + 2 for w in before), steps)
        if self.spec in APPLY_ALL_MEMBERS:
            driver.applications.clear()
            driver.calms_down(1.0, lambda: all(driver.applications[worker] >= 2 for worker in before), steps)
        driver.everyone_leaves()
        driver.replays()


@pytest.mark.parametrize("spec", SPECS)
def test_any_history_keeps_every_promise(spec: str) -> None:
    machine = type("AnyHistory", (AnyHistory,), {"spec": spec})
    run_state_machine_as_test(machine, settings=SETTINGS)
