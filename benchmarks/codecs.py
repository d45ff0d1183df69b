"""Measures the codecs of --updates on one core: GB of float32 that are encoded, with error feedback, and decoded.

    taskset -c 0 python benchmarks/codecs.py [--megabytes 64] [--repeats 5]

The figure is the best of the repeats. `copy` is that of copying the numbers, for comparison with other machines.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks.output import Output
from paceline.model.codecs import Encoder, decode

CODECS = ("int8", "int4", "topk:0.02", "int4/4", "float32/4")


def best(repeats: int, run: Callable[[], object]) -> float:
    """Return the shortest time of a run, in seconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    elements = int(args.megabytes * 1e6) // 4
    update = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    into = np.empty_like(update)

    def rate(run: Callable[[], object]) -> str:
        return f"{update.nbytes / best(args.repeats, run) / 1e9:.2f}"

    rows: list[list[object]] = [["copy", "32.00", rate(lambda: np.copyto(into, update)), ""]]
    for name in CODECS:
        encoder = Encoder(name, elements)
        body = encoder.encode(update.data, "float32", 0, elements)
        encoding = rate(lambda encoder=encoder: encoder.encode(update.data, "float32", 0, elements))  # type: ignore[misc]
        decoding = rate(lambda body=body, name=name: decode(body, name, into))  # type: ignore[misc]
        rows.append([name, f"{8 * body.nbytes / elements:.2f}", encoding, decoding])
    title = f"{elements:,} numbers, GB of float32 a second"
    Output(None).table(title, ("", "bits a number", "encode", "decode"), rows)


if __name__ == "__main__":
    main()
