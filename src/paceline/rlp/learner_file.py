"""A learner as a checkpoint file. A resumed learner learns what an uninterrupted one would have learned."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.rlp.features import StateFeatures
from paceline.rlp.learner import LearnerSettings, LearningProgress, Lessons, RuleLearner
from paceline.rlp.network_file import save
from paceline.rlp.rule_network import weights_of
from paceline.workloads.data import Data

VERSION = "3"


class LearnerFileError(ValueError):
    """A checkpoint cannot be read. The message says what to do."""


def save_learner(learner: RuleLearner, log: Sequence[LearningProgress], path: Path) -> None:
    """Write a checkpoint. It replaces the old one in one step, so the file is complete at any time."""
    tensors = {f"network.{name}": each for name, each in learner.network.state_dict().items()}
    for at, lessons in enumerate(learner.kept):
        tensors |= {f"kept{at}.{part}": each for part, each in lessons._asdict().items()}
    metadata = {
        "version": VERSION,
        "settings": json.dumps(asdict(learner.settings)),
        "iteration": str(learner.iteration),
        "log": json.dumps([asdict(each) for each in log]),
    }
    unfinished = path.with_name(path.name + ".new")
    save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, unfinished, metadata)
    os.replace(unfinished, path)


def load_learner(
    path: Path, data: Data, device: str = "cpu", pool: Executor | None = None
) -> tuple[RuleLearner, list[LearningProgress]]:
    """Return the learner of a checkpoint, and its log. Raise LearnerFileError if there is none."""
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except FileNotFoundError:
        raise LearnerFileError(f"There is no checkpoint {path}; leave out --resume to start.") from None
    except (SafetensorError, OSError):
        raise LearnerFileError(
            f"{path} is not a checkpoint, or is broken; leave out --resume to start again."
        ) from None
    try:
        if metadata["version"] != VERSION:
            raise LearnerFileError(
                f"{path} was written by another version of paceline; leave out --resume to start again."
            )
        learner = RuleLearner(_settings(metadata["settings"]), data, device, pool)
        learner.iteration = int(metadata["iteration"])
        learner.network.load_state_dict(
            {name.removeprefix("network."): each for name, each in tensors.items() if name.startswith("network.")}
        )
        parts = {name.partition(".")[0] for name in tensors} - {"network"}
        found = {part: Lessons(*(tensors[f"{part}.{each}"] for each in Lessons._fields)) for part in parts}
        learner.kept.extend(found[f"kept{at}"] for at in range(len(found)))
        log = [LearningProgress(**each) for each in json.loads(metadata["log"])]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, LearnerFileError):
            raise
        raise LearnerFileError(f"{path} does not hold a whole learner; leave out --resume to start again.") from None
    return learner, log


def export(learner: RuleLearner, log: Sequence[LearningProgress], path: Path) -> None:
    """Write the network of a learner to a file that the policy `rlp` reads."""
    settings = learner.settings
    about = {"settings": json.dumps(asdict(settings)), "iterations": str(learner.iteration)}
    if log:
        about["episodes"] = str(log[-1].episodes)
    save(weights_of(learner.network, settings.state, settings.rules), path, about)


def _settings(text: str) -> LearnerSettings:
    plain = json.loads(text)
    tuples = {name: tuple(plain[name]) for name in ("depths", "workers")}
    return LearnerSettings(**{**plain, **tuples, "state": StateFeatures(**plain["state"])})
