"""Exchange schedules: a plan says which worker steps when, and which workers push and pull after which step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.local_steps.model import elements
from benchmarks.local_steps.size import WORKERS, Size


@dataclass(frozen=True)
class Exchange:
    """Some workers push a part of the model. Then some workers pull this part."""

    pushing: slice
    pulling: slice
    part: slice
    averaged: bool = False  # by the mean, without the rules of the arm


ALL = slice(0, WORKERS)
NOBODY = slice(0, 0)


@dataclass(frozen=True)
class Plan:
    """The steps and the exchanges of a training."""

    steps: npt.NDArray[np.int64]  # [steps of the plan, workers]: the number of the worker's own step; -1: it waits
    exchanges: dict[int, list[Exchange]]  # by the number of the plan's steps that are done


def staggered(size: Size, groups: int, first: int = 0, final: int = 0, pulls: int = 1) -> Plan:
    """Return the plan of groups that exchange one after another.

    first, final: synchronous rounds at the beginning and at the end. pulls: of a worker in a round.
    """
    between = size.rounds - first - final  # rounds in which the groups take turns
    if groups < 1 or WORKERS % groups:
        raise ValueError(f"{WORKERS} workers cannot be in {groups} equal groups")
    if between < 1 or min(first, final) < 0:
        raise ValueError(f"{first} first and {final} final rounds of {size.rounds} leave no round for turns")
    if not 1 <= pulls <= size.local_steps:
        raise ValueError(f"{pulls} pulls in a round of {size.local_steps} steps")
    H, members, whole = size.local_steps, WORKERS // groups, slice(0, elements(size))
    offsets = [round(group * H / groups) for group in range(groups)]
    alone, begin = between * H, first * H
    end = begin + alone + offsets[-1]
    steps = np.full((end + final * H, WORKERS), -1, np.int64)
    steps[:begin] = np.arange(begin)[:, None]
    steps[end:] = np.arange(begin + alone, begin + alone + final * H)[:, None]
    exchanges: dict[int, list[Exchange]] = {}
    for done in itertools.chain(range(H, begin + 1, H), range(end + H, end + final * H + 1, H)):
        exchanges[done] = [Exchange(ALL, ALL, whole, averaged=True)]
    for group, offset in enumerate(offsets):
        workers = slice(group * members, (group + 1) * members)
        steps[begin + offset : begin + offset + alone, workers] = np.arange(begin, begin + alone)[:, None]
        for turn in range(1, between * pulls + 1):
            due = exchanges.setdefault(begin + offset + round(turn * H / pulls), [])
            pulling = workers
            if final and turn == between * pulls:  # the group waits for the others before a synchronous round
                pulling = ALL if offset == offsets[-1] else NOBODY
            due.append(Exchange(workers if turn % pulls == 0 else NOBODY, pulling, whole))
    return Plan(steps, exchanges)


def in_parts(size: Size, parts: int, rotated: bool = False, by_turns: bool = False) -> Plan:
    """Return the plan of workers that exchange one part of the model at a time.

    rotated: no two workers exchange the same part at once, if there are enough parts. by_turns: all workers exchange a
    part one after another, evenly staggered, before the next part follows.
    """
    if not 1 <= parts <= size.local_steps:
        raise ValueError(f"{parts} parts in a round of {size.local_steps} steps")
    H, count, total = size.local_steps, size.rounds * size.local_steps, elements(size)
    borders = [round(part * total / parts) for part in range(parts + 1)]
    pieces = [slice(*pair) for pair in itertools.pairwise(borders)]
    each = [slice(worker, worker + 1) for worker in range(WORKERS)] if rotated or by_turns else [ALL]
    offsets = [round(number * H / parts / WORKERS) if by_turns else 0 for number in range(len(each))]
    steps = np.full((count + offsets[-1], WORKERS), -1, np.int64)
    exchanges: dict[int, list[Exchange]] = {}
    for number, (workers, offset) in enumerate(zip(each, offsets, strict=True)):
        steps[offset : offset + count, workers] = np.arange(count)[:, None]
        first = number if rotated else 0
        for turn in range(1, size.rounds * parts + 1):
            due = exchanges.setdefault(offset + round(turn * H / parts), [])
            due.append(Exchange(workers, workers, pieces[(first + turn) % parts]))
        for part in range(parts):  # at the end, each part that has changed since its last exchange
            if part != (first + size.rounds * parts) % parts:
                exchanges[offset + count].append(Exchange(workers, workers, pieces[part], averaged=True))
    return Plan(steps, exchanges)
