"""Runs a learner, from pre-training to the last iteration, with checkpoints and several processes."""

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
    report: Callable[[LearningProgress], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[RuleLearner, list[LearningProgress]]:
    """Learn until `episodes` episodes have been played, in whole iterations. Return the learner and its log.

    kept: the checkpoint, which is written after each iteration. resume: continue from the checkpoint, with its
    settings. jobs: the number of processes that play episodes. report: called after each iteration. progress: called
    while episodes are played, with the number of parts that are done and of all parts.
    """
    with pool_of(jobs, {data.name: data}) as pool:
        if resume:
            learner, log = learner_file.load_learner(kept, data, device, pool)
        else:
            learner, log = RuleLearner(settings, data, device, pool), []
        per_iteration = learner.settings.instances * learner.settings.times
        while learner.iteration * per_iteration < episodes:
            log.append(learner.iterate(progress))
            learner_file.save_learner(learner, log, kept)
            if report:
                report(log[-1])
    return learner, log
