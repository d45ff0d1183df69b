"""The promises that every job must keep, whatever faults happen in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from faults.scenario import Scenario
from paceline import policies
from paceline.model import checkpoint


def broken_promises(scenario: Scenario, checkpoints: Path, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each promise that a job has broken. events: the trace of all its servers."""
    found = checkpoint.newest(checkpoints)
    if found is None:
        return ["There is no checkpoint at the end."]
    broken = []
    weights = checkpoint.weights(found)
    cut_off = sum(map(_may_cut_off_a_push, events)) if scenario.streamed else 0
    if not cut_off and not np.array_equal(weights["once"], weights["again"]):
        broken.append("The shards hold different versions.")
    samples = found.job["samples"]
    if samples is None:
        return ["The model of the last checkpoint has not been trained."]
    if samples["open"] or samples["trained"] != scenario.samples * samples["epochs"]:
        broken.append(f"Not every sample was trained on: {samples}.")
    has_full_weight = not scenario.policy.startswith("fl-r2sp")  # there, an update is a part of its group's mean
    if has_full_weight and not policies.make(scenario.policy).keeps:
        for counts in (weights[name][: scenario.samples] for name in ("once", "again")):
            excess = counts - samples["epochs"]
            # The applied pieces of a streamed push that was cut off stay, and its samples are trained on again.
            if excess.min() < 0 or excess.sum() > cut_off * scenario.batch:
                broken.append(f"Every sample must count {samples['epochs']} times: {counts.tolist()}.")
    return broken + _broken_in_trace(events, found.version)


def _broken_in_trace(events: Sequence[Mapping[str, Any]], final: int) -> list[str]:
    """Check that versions follow one another in each generation, and that each update is decided exactly once."""
    broken: list[str] = []
    version, open_updates = 0, Counter[tuple[int, int]]()
    kept: set[tuple[int, int]] = set()
    for event in events:
        match event["event"]:
            case "generation":
                version, open_updates, kept = event["version"], Counter(), set()
            case "arrived":
                open_updates[event["worker"], event["iteration"]] += 1
            case "kept":
                kept.add((event["worker"], event["iteration"]))
            case "discarded":
                open_updates[event["worker"], event["iteration"]] -= 1
            case "applied":
                if event["version"] != version + 1:
                    broken.append(f"Version {event['version']} followed version {version}.")
                version = event["version"]
                for update in zip(event["workers"], event["iterations"], strict=True):
                    if update not in kept:
                        open_updates[update] -= 1
    for update in kept:
        open_updates.pop(update, None)
    if version != final:
        broken.append(f"The last version was {version}, but the last checkpoint has version {final}.")
    undecided = {update: count for update, count in open_updates.items() if count}
    if undecided:
        broken.append(f"These updates arrived, but were not applied or discarded exactly once: {undecided}.")
    return broken


def _may_cut_off_a_push(event: Mapping[str, Any]) -> bool:
    """Return whether a worker was lost or its push was cancelled, perhaps half-way through the push."""
    return event["event"] == "cancelled" or (event["event"] == "left" and bool(event["lost"]))
