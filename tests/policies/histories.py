"""Random histories: the steps that an arbitrary driver may take."""

from __future__ import annotations

from typing import TypeAlias

from hypothesis import strategies as st

from policies.any_driver import AnyDriver

IDS = 7  # the number of worker ids
SHADOWS = 2  # the number of copies of a policy that run along

DELAYS = st.sampled_from([0.0, 1.0, 0.25, 0.001, 3.0, 10.0, 100.0])

Step: TypeAlias = tuple[str, int, float, bool]
#: An action, the worker (an index into those that can do it), the time that passes before it, and whether a WakeAt that
#: comes due at the end of that time is delivered first.
STEP = st.tuples(
    st.sampled_from(["answer"] * 6 + ["join", "join", "leave", "compute", "late", "hold", "wait", "wake"]),
    st.integers(0, IDS - 1),
    DELAYS,
    st.booleans(),
)
STEPS = st.lists(STEP, max_size=50)


def act(driver: AnyDriver, step: Step) -> None:
    """Let time pass, then take the step if a worker can take it."""
    action, which, seconds, dutiful = step
    driver.time_passes(seconds, dutiful)
    busy = [task for task in driver.running.values() if not driver.waiting_for_turn(task)]
    match action:
        case "join":
            absent = [worker for worker in range(IDS) if worker not in driver.progress]
            if absent:
                driver.joins(absent[which % len(absent)])
        case "leave" if driver.progress:
            driver.leaves(list(driver.progress)[which % len(driver.progress)])
        case "answer" if busy:
            driver.answers(busy[which % len(busy)])
        case "compute" if busy:
            task = busy[which % len(busy)]
            if task.computed_at is None:
                driver.computes(task)
        case "hold" if can_be_held := [task for task in busy if driver.can_be_held(task)]:
            driver.holds(can_be_held[which % len(can_be_held)])
        case "late" if driver.cancelled:
            late = driver.cancelled[which % len(driver.cancelled)]
            driver.answers(late)
        case "wake":
            driver.wakes_for_no_reason()
