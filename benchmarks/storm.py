"""Real jobs in a storm of faults: does each one end, with exact counts and the accuracy of a calm run?

`paceline run` trains a small network on the bundled digits. Its model also counts each sample and each update
(`storm_job.py`). Meanwhile workers, shards, the fork server and the coordinator are killed, stopped and continued, and
their connections are cut and reset, at random from a seed. After a fault of the server, a second one often follows
while the job recovers. Writes of checkpoints fail for a while, as on a full disk. The newest checkpoint is truncated,
or a bit of it is flipped, just before the server is killed.

python benchmarks/storm.py --minutes 10 --seed 1
python benchmarks/storm.py --minutes 1 --seed 7 --policy r2sp          # one policy
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import environment
from benchmarks.output import Output
from benchmarks.storm_faults import Storm
from benchmarks.storm_job import ACCURACY
from paceline.model import checkpoint
from paceline.observe.trace import Cancelled, Left, from_line

SCRIPT = Path(__file__).with_name("storm_job.py")
WORKERS, SHARDS, BATCH, LEASE = 3, 2, 16, 4.0
STARTS_WITHIN = 120.0  # seconds for the first checkpoint
CALM_SECONDS = 180.0  # for the rest of the job when the storm is over
STORMY = 0.6  # share of a policy's time in which faults happen
ACCURACY_BELOW = 0.02  # that the job may lie below the worst calm run: two standard errors of the test set
#: Names of the jobs, and the options of `paceline run` for each. The updates of a round add up, so counters are whole.
JOBS = {
    "bsp": ("-p", "bsp:weights=sum"),
    "ssp": ("-p", "ssp:staleness=2,weights=sum"),
    "r2sp": ("-p", "r2sp:weights=sum"),
    "r2sp-streamed": ("-p", "r2sp:weights=sum", "--apply", "streamed"),
    "r2sp-grouped": ("-p", "r2sp:groups=2,weights=sum"),
    "fl-r2sp": ("-p", "fl-r2sp:groups=2"),
}


@dataclass
class Result:
    """The outcome of one job."""

    seconds: float = 0.0
    accuracy: float = 0.0
    version: int = 0
    generations: int = 1
    strikes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)


def run_job(name: str, seed: int, epochs: int, pause: float, storm: Storm | None, folder: Path) -> Result:
    """Run a job to its end, with a storm or without, and check its counts."""
    checkpoints, trace = folder / "checkpoints", folder / "trace.jsonl"
    command = [sys.executable, "-m", "paceline", "run", "--workers", WORKERS, "--servers", SHARDS, *JOBS[name]]
    command += ["--lease", LEASE, "--restarts", 10_000, "--checkpoint", checkpoints, "--checkpoint-every", 5]
    command += ["--trace", trace, SCRIPT, "--epochs", epochs, "--batch-size", BATCH, "--seed", seed, "--pause", pause]
    result, began = Result(), time.monotonic()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [*map(str, command)], stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        try:
            if storm:
                storm.run(process, checkpoints, STARTS_WITHIN)
                result.strikes = storm.strikes
            code = process.wait(CALM_SECONDS)
            if code:
                result.problems.append(f"it ended with exit code {code}")
        except subprocess.TimeoutExpired:
            result.problems.append(f"it did not end within {CALM_SECONDS:g} s after the storm")
        finally:
            process.kill()
            process.wait()
    result.seconds = time.monotonic() - began
    result.output = (folder / "output").read_text(errors="replace").splitlines()
    restarts = [line for line in result.output if re.search("restarting it from its last|Going back to version", line)]
    result.generations += len(restarts)
    said = [line for line in result.output if ACCURACY in line]
    result.accuracy = float(said[-1].rpartition(" ")[2]) if said else 0.0
    if not result.problems:
        result.problems += count_problems(name, checkpoints, trace, epochs, result)
    return result


def count_problems(name: str, checkpoints: Path, trace: Path, epochs: int, result: Result) -> list[str]:
    """Return what is wrong with the samples and updates that the last checkpoint counts."""
    found = checkpoint.read(checkpoints)
    weights, samples = checkpoint.weights(found), found.job["samples"]
    result.version = found.version
    problems = []
    if samples["open"] or samples["trained"] != epochs * samples["size"]:
        problems.append(f"not all samples were trained on: {samples}")
    once, again = weights["once"], weights["again"]
    cut_off = 0  # streamed pushes that may have been applied in part; their samples are trained on again
    if "streamed" in name:
        events = [from_line(line) for line in trace.read_text().splitlines()]
        cut_off = sum(isinstance(event, Cancelled) or (isinstance(event, Left) and event.lost) for event in events)
    elif not np.array_equal(once, again):
        problems.append("the shards hold different updates")
    if name == "fl-r2sp":  # an update is a part of its group's mean, so its counters are fractions
        return problems
    for counts in (once, again):
        excess = counts - epochs
        if excess.min() < 0 or excess.sum() > cut_off * BATCH:
            wrong = {int(sample): float(counts[sample]) for sample in np.flatnonzero(excess)[:10]}
            problems.append(f"{np.count_nonzero(excess)} samples did not count {epochs} times: {wrong}")
    if name in ("ssp", "r2sp") and weights["updates"][0] != found.version:
        problems.append(f"{weights['updates'][0]:g} updates made version {found.version}")
    return problems


def storm_policy(name: str, seed: int, seconds: float, arguments: argparse.Namespace) -> tuple[list[object], bool]:
    """Run a policy calmly and in a storm. Return a row of the table, and whether all went well."""
    kept: Path | None = arguments.keep
    epochs = max(4, round(seconds / 10))
    calm: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="storm-") as temporary:
        for number in range(arguments.calm):
            (folder := Path(temporary) / f"calm-{number}").mkdir()
            calm.append(run_job(name, seed + number, epochs, 0.0, None, folder))
        (folder := Path(temporary) / "storm").mkdir()
        storm = Storm(random.Random(f"{seed} {name}"), seconds * STORMY, LEASE, arguments.damage)
        result = run_job(name, seed, epochs, 0.1, storm, folder)
        problems = [f"without faults {each}" for run in calm for each in run.problems] + result.problems
        least = min((run.accuracy for run in calm), default=0.0)
        if not result.problems and result.accuracy < least - ACCURACY_BELOW:
            problems.append(f"its accuracy is {result.accuracy:.4f}, and {least:.4f} without faults")
        if problems:
            print(f"{name}, seed {seed}: {'; '.join(problems)}.", flush=True)
            print("\n".join([*storm.log[-40:], "--- output", *result.output[-40:]]), flush=True)
            if kept:
                shutil.copytree(temporary, kept / f"{name}-{seed}", dirs_exist_ok=True)
    struck = result.strikes
    row: list[object] = [
        name,
        *(struck[kind] for kind in ("kill worker", "kill shard", "kill fork server", "kill coordinator")),
        sum(count for kind, count in struck.items() if kind.startswith("stop")),
        sum(count for kind, count in struck.items() if kind.startswith(("cut", "reset"))),
        struck["full disk"],
        struck["damage"],
        struck["during recovery"],
        result.generations,
        f"{result.seconds:.0f}",
        result.version,
        "; ".join(result.problems) or "exact",
        f"{result.accuracy:.3f}",
        ", ".join(f"{run.accuracy:.3f}" for run in calm),
    ]
    return row, not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="divided among the policies (default 10)")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and of the training (default: random)")
    parser.add_argument("--policy", action="append", choices=list(JOBS), help="only these; may be repeated")
    parser.add_argument("--calm", type=int, default=2, help="runs of each policy without faults (default 2)")
    parser.add_argument(
        "--damage", action=argparse.BooleanOptionalAction, default=True, help="damage checkpoints, too (default)"
    )
    parser.add_argument("--keep", type=Path, help="copy the files of jobs that fail to this folder")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if arguments.seed is None else arguments.seed
    names = arguments.policy or list(JOBS)
    print(f"seed {seed}", flush=True)
    rows, well = [], True
    for name in names:
        row, is_well = storm_policy(name, seed, arguments.minutes * 60 / len(names), arguments)
        rows.append(row)
        well = well and is_well
        print(*row, sep="  ", flush=True)
    kills = ("workers", "shards", "fork server", "coordinator")
    headings = ["policy", *(f"{party} killed" for party in kills), "stopped", "connections cut", "disk full", "damaged"]
    headings += ["during recovery", "generations", "seconds", "version", "samples and updates", "accuracy", "calm"]
    Output(None).table(f"{arguments.minutes:g} minutes of faults, seed {seed}", headings, rows)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
