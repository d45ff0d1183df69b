"""Compares exchange schedules of workers that make local steps: by loss, bytes and simulated time.

    PYTHONPATH=src python benchmarks/gpt.py --arms sync,turns,groups:2 --rates 0.7,1 --seeds 0,1,2 --out runs.jsonl
    PYTHONPATH=src python benchmarks/gpt.py --table runs.jsonl                # in Markdown, on any machine
    PYTHONPATH=src python benchmarks/gpt.py --time runs.jsonl --step-seconds 0.5 --link 100
    PYTHONPATH=src python benchmarks/gpt.py --size cpu --arms sync,turns --out cpu.jsonl   # minutes on two cores

Eight workers train a small GPT. They make local steps of AdamW, and exchange with a server every 50 steps (24 with
`--size cpu`). One device trains all of them at once: the model's tensors have a first dimension of eight. The training
is real, and the exchanges need no network. The data are the bytes of Python's standard library. The validation loss is
in nats a byte.

An arm is a schedule, and rules with a plus sign: `turns+blend:0.5`, `sync+nesterov@0.7`. The number behind @ is the
server's rate. Without it the first seed tries all --rates, and the other seeds take the best of them. Schedules:

- `sync`: all workers exchange at once.
- `groups:M`: the workers of a group exchange at once. The groups exchange one after another, evenly staggered.
- `turns`: the workers exchange one after another, evenly staggered (R2SP).
- `turns:P`: by turns, and each worker exchanges one of P parts of the model every 50/P steps. All workers exchange a
  part before the next one follows.
- `streaming:P`: all workers exchange one of P parts of the model every 50/P steps (Streaming DiLoCo).
- `parts:P`: every 50/P steps each worker exchanges one of P parts. The workers' parts differ.

A worker of the staggered schedules begins later and ends later, so all workers make equally many steps. Rules:

- Without a rule the server averages: it adds each difference, divided by the number of workers.
- `nesterov`: the server steps by Nesterov momentum of 0.9 at every exchange (DiLoCo).
- `naive`: the same, and each difference counts in full, like the mean of all differences (asynchronous DiLoCo).
- `delayed`: the momentum changes once for each N differences (delayed Nesterov: Liu et al., 2024).
- `blend:SHARE`: a worker measures its difference from a mean of two models: the model with which it began, and its own
  last end point, which has this SHARE. With 1, the server's model is the mean of the newest end points.
- `predict:SHARE`: a worker begins ahead of the model that it has received. It adds this SHARE of the model's movement
  since the worker's last pull, because the others have made steps that they have not pushed yet.
- `keep:SHARE`: a worker begins between the model that it has received and its own end point, which has this SHARE.
- `pulls:K`: a worker pulls K times in a round. A pull between its pushes adds the movement of the server's model.
- `rounds:R`: the training has R rounds, and the local rate falls more slowly or faster. Without it the size says how
  many.
- `first:R`, `final:R`: the first or the last R rounds are synchronous, and average.

--updates encodes the pushes in few bytes, with error feedback. It also encodes the pulls, as differences to the model
that a worker has.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks.local_steps.arms import arm_of
from benchmarks.local_steps.codecs import EXACT
from benchmarks.local_steps.data import python_sources
from benchmarks.local_steps.records import Recorder, read, record_all
from benchmarks.local_steps.size import SIZES
from benchmarks.local_steps.tables import loss_table
from benchmarks.local_steps.times import time_table
from benchmarks.local_steps.training import machine
from benchmarks.output import Output
from paceline.model.codecs import encoded_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="sync,turns,groups:2", help="separated by commas")
    parser.add_argument("--rates", default="1", help="of the server, separated by commas")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument("--updates", default=EXACT, help="float32, int8, int4 or topk:F, separated by commas")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model and its training")
    parser.add_argument("--out", type=Path, help="append each run to this file; runs that it has are skipped")
    parser.add_argument("--limit", type=float, default=math.inf, help="start no run that may end after these seconds")
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a folder of .py files")
    parser.add_argument("--eager", action="store_true", help="do not compile on a GPU; a CPU never compiles")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the losses of recorded runs")
    parser.add_argument("--time", type=Path, nargs="+", metavar="FILE", help="print the simulated times of them")
    parser.add_argument("--step-seconds", default="0.1,0.5,1", help="for --time: seconds of a worker's step")
    parser.add_argument("--target", type=float, help="for --time: the loss to reach, if it is not that of `sync`")
    parser.add_argument("--link", type=float, default=100.0, help="for --time: Mbit/s of the server's link")
    args = parser.parse_args()
    try:
        if args.table:
            loss_table(read(args.table), Output(None))
        if args.time:
            seconds = [float(each) for each in args.step_seconds.split(",")]
            time_table(read(args.time), seconds, args.link, Output(None), args.target)
        for arm in args.arms.split(","):  # a wrong name is refused before the first run
            arm_of(arm.partition("@")[0], SIZES[args.size])
        for updates in args.updates.split(","):
            encoded_size(updates, 1)
    except ValueError as error:
        parser.error(str(error))
    if args.table or args.time:
        return
    if args.out is None:
        parser.error("--out needs a file")
    train(args)


def train(args: argparse.Namespace) -> None:
    """Make the runs that are not recorded yet."""
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    data = python_sources(args.data)
    print(f"{len(data.training):,} bytes to train on, {len(data.validation):,} to validate with", flush=True)
    recorder = Recorder(args.out, data, machine(device, device == "cuda" and not args.eager), args.limit)
    rates, seeds = [float(each) for each in args.rates.split(",")], [int(each) for each in args.seeds.split(",")]
    try:
        for updates in args.updates.split(","):
            record_all(recorder, args.arms.split(","), rates, seeds, updates, args.size)
    except TimeoutError:
        print(f"stopped after {time.monotonic() - began:.0f} s; the same command continues", flush=True)


if __name__ == "__main__":
    main()
