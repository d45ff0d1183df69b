"""Whole jobs under random faults, one per seed: the real JobState and WorkerState under a virtual clock.

Each seed draws a small job (policy, workers, shards, checkpoints) and its faults: workers, shards and servers that are
killed, stopped or cut off, duplicate workers, full disks, and lost messages. After each run, these properties are
checked: the job has ended, every sample counted once per epoch, every update was applied at most once and in order, and
the policy kept its promise in every generation of the server. A seed always gives the same run.

python benchmarks/seeds.py --seeds 10000
python benchmarks/seeds.py --only 17                     # one seed, with a log of events and instructions
python benchmarks/seeds.py --seeds 1000 --mistake all    # check that deliberate mistakes in JobState are found
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # for the judge and the deliberate mistakes

from conformance.judge import judge_of
from paceline.job import JobState
from paceline.simulate.protocol import ProtocolOutcome, run
from simulate.mistakes import MISTAKES

Result = tuple[int, str, list[str]]  # a seed, its policy, and its problems


def problems_of(outcome: ProtocolOutcome) -> list[str]:
    """Return the promises that a run broke: those that the run noticed, and those that a judge finds in its traces."""
    problems = list(outcome.problems)
    setting = outcome.setting
    for number, trace in enumerate(outcome.traces, start=1):
        judge = judge_of(setting.policy, setting.streamed)
        judge.version = trace.version
        try:
            judge.watch(trace.events)
        except AssertionError as error:
            notes = " ".join(getattr(error, "__notes__", []))
            problems.append(f"The judge of generation {number} says: {error} {notes}")
    return problems


def check(seed: int, mistake: str = "") -> Result:
    """Run a seed and return its problems. An exception is a problem too."""
    make_state = MISTAKES[mistake] if mistake else JobState
    try:
        outcome = run(seed, make_state)
    except Exception as error:
        return seed, "", [f"The run failed: {error!r}", traceback.format_exc()]
    return seed, outcome.setting.policy, problems_of(outcome)


def in_processes(seeds: Iterable[int], mistake: str, jobs: int) -> Iterator[Result]:
    call = functools.partial(check, mistake=mistake)
    if jobs == 1:
        yield from map(call, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(call, seeds, chunksize=10)


def run_all(first: int, count: int, jobs: int) -> bool:
    """Run the seeds. Return True if none has a problem."""
    began = reported = time.monotonic()
    failed: list[Result] = []
    policies: Counter[str] = Counter()
    for done, result in enumerate(in_processes(range(first, first + count), "", jobs), start=1):
        seed, policy, problems = result
        policies[policy] += 1
        if problems:
            failed.append(result)
            print(f"seed {seed}, {policy}: {problems[0]}", flush=True)
        if time.monotonic() - reported > 10.0:
            reported = time.monotonic()
            print(
                f"{done} of {count} seeds, {len(failed)} failed, {reported - began:.0f} s", file=sys.stderr, flush=True
            )
    print(f"{count} seeds from {first} in {time.monotonic() - began:.0f} s, {jobs} at a time: {len(failed)} failed.")
    print("Jobs by policy: " + ", ".join(f"{policy} {number}" for policy, number in sorted(policies.items())))
    if failed:
        print(f"Look at one with: python benchmarks/seeds.py --only {failed[0][0]}")
    return not failed


def run_mistake(mistake: str, first: int, count: int, jobs: int) -> bool:
    """Run the seeds with a mistake in JobState. Return True if some seed finds it."""
    failed = [result for result in in_processes(range(first, first + count), mistake, jobs) if result[2]]
    what = (MISTAKES[mistake].__doc__ or "").splitlines()[0]
    print(f"{mistake} ({what}) {len(failed)} of {count} seeds fail", end="")
    print(f", seed {failed[0][0]} first: {failed[0][2][0]}" if failed else ".", flush=True)
    return bool(failed)


def look_at(seed: int, mistake: str) -> bool:
    """Run one seed, and print all events of the job and its instructions."""
    history: list[str] = []
    try:
        outcome = run(seed, MISTAKES[mistake] if mistake else JobState, history=history)
        problems = problems_of(outcome)
        lines = [str(outcome.setting), *map(str, outcome.faults)]
    except Exception:
        lines, problems = [], [traceback.format_exc()]
    print("\n".join([*history, *lines, *(problems or ["Every promise was kept."])]))
    return not problems


def main() -> int:
    parser = argparse.ArgumentParser(description="Whole jobs under random faults, one per seed.")
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of processes (default: one per core)"
    )
    parser.add_argument("--only", type=int, metavar="SEED", help="run only this seed, and show its log")
    parser.add_argument(
        "--mistake", choices=[*MISTAKES, "all"], default="", help="put a mistake into JobState; some seeds must fail"
    )
    args = parser.parse_args()
    if args.only is not None:
        return 0 if look_at(args.only, args.mistake) else 1
    if args.mistake:
        names = list(MISTAKES) if args.mistake == "all" else [args.mistake]
        found = [run_mistake(name, args.first, args.seeds, args.jobs) for name in names]
        return 0 if all(found) else 1
    return 0 if run_all(args.first, args.seeds, args.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
