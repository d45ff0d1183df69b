"""A whole JobState can be saved and loaded at any moment, and a log of its events replays to the same instructions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from job.conversation import Conversation
from paceline.job import JobConfig, JobState, snapshot
from paceline.job.accounting import Watcher
from paceline.job.events import Event
from paceline.job.instructions import Instruction
from paceline.observe.observer import Recorder
from paceline.policies import Policy, make
from paceline.policies.options import PolicyError
from paceline.simulate.protocol import run

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(8, 24))]


class SavedAndLoaded(JobState):
    """A job that is saved and loaded before each event. The loaded copy must give the same instructions."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        self.__class__ = JobState  # type: ignore[assignment]  # only classes of paceline can be loaded
        copy = snapshot.load(json.loads(json.dumps(snapshot.save(self))), Recorder(lambda _: None))
        self.__class__ = SavedAndLoaded
        theirs = copy.handle(event, now)
        mine = super().handle(event, now)
        assert theirs == mine
        return mine


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_is_saved_and_loaded_at_every_event_continues_unchanged(seed: int) -> None:
    assert not run(seed, SavedAndLoaded).problems


@pytest.mark.parametrize("seed", SEEDS)
def test_a_log_of_events_replays_to_the_same_instructions(seed: int) -> None:
    generations: list[tuple[JobConfig, Mapping[str, Any] | None, float, list[Any]]] = []

    class Logged(JobState):
        def __init__(
            self, policy: Policy, config: JobConfig, watcher: Watcher, restored: Mapping[str, Any] | None, now: float
        ) -> None:
            self.lines: list[tuple[Event, float, list[Instruction]]] = []
            generations.append((config, restored, now, self.lines))
            super().__init__(policy, config, watcher, restored, now)

        def handle(self, event: Event, now: float) -> list[Instruction]:
            out = super().handle(event, now)
            self.lines.append((event, now, list(out)))
            return out

    outcome = run(seed, Logged)
    assert generations
    for config, restored, began, lines in generations:
        policy = make(outcome.setting.policy)
        policy.streamed = outcome.setting.streamed and policy.streamable
        again = JobState(policy, config, Recorder(lambda _: None), restored, began)
        for event, now, out in lines:
            assert again.handle(event, now) == out


def test_the_watcher_is_not_saved_and_stays_in_place() -> None:
    talk = Conversation("asp")
    watcher = talk.state.ledger.watcher
    text = json.dumps(snapshot.save(talk.state))
    assert "Recorder" not in text
    assert talk.state.ledger.watcher is watcher


def test_only_a_saved_job_can_be_loaded() -> None:
    with pytest.raises(PolicyError, match="not a job"):
        snapshot.load([1, 2], Recorder(lambda _: None))
    with pytest.raises(PolicyError, match="may not name"):
        snapshot.load({"object": "subprocess:Popen", "number": 0, "state": {}}, Recorder(lambda _: None))
