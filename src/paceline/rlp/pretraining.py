"""A whole course of learning: side by side in processes, kept as it goes on, told as it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.rlp import learner_file
from paceline.rlp.learner import LearnerSettings, LearningProgress, RuleLearner
from paceline.rlp.process_pool import pool_of
from paceline.workloads.data import Data


def learned(
    settings: LearnerSettings,
    data: Data,
    episodes: int,
    kept: Path,
    resume: bool = False,
    device: str = "cpu",
    jobs: int = 1,
    told: Callable[[LearningProgress], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[RuleLearner, list[LearningProgress]]:
    """Learn from so many episodes, in whole iterations. After each, all is kept in a file.

    resume: go on from that file, with its settings. jobs: processes that play side by side.
    """
    with pool_of(jobs, {data.name: data}) as pool:
        if resume:
            learner, log = learner_file.go_on(kept, data, device, pool)
        else:
            learner, log = RuleLearner(settings, data, device, pool), []
        each = learner.settings.instances * learner.settings.times
        while learner.iteration * each < episodes:
            log.append(learner.iterate(progress))
            learner_file.keep(learner, log, kept)
            if told:
                told(log[-1])
    return learner, log
