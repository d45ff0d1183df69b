"""A cluster as TOML text, as `cluster_reader` reads it."""

from __future__ import annotations

from itertools import groupby

from paceline.simulate import units
from paceline.simulate.cluster_spec import ClusterSpec, Jitter, WorkerSpec


def as_toml(spec: ClusterSpec, about: str = "") -> str:
    """Return the description of a cluster as TOML, headed by the comment `about`.

    A description does not say whether servers are colocated.
    """
    lines = [f"# {line}".rstrip() for line in about.splitlines()]
    exchange = [
        *([f"local_steps = {spec.local_steps}"] if spec.local_steps > 1 else []),
        *([f'updates = "{spec.updates}"'] if spec.updates else []),
        *(["overlap = true"] if spec.overlap else []),
    ]
    lines += [
        *([""] if lines else []),
        *([*exchange, ""] if exchange else []),
        "[model]",
        f"bytes = {_number(spec.model_bytes)}",
        f"slices = {spec.slices}",
        "",
        "[servers]",
        f"count = {spec.servers}",
        f"link = {_rate(spec.server_link)}",
        *([f"link_in = {_rate(spec.server_link_in)}"] if spec.server_link_in else []),
        f"latency = {_time(spec.latency)}",
        f"apply = {_number(spec.apply_rate)}",
        f"lease = {_number(spec.lease)}",
    ]
    for worker, same in groupby(spec.workers):
        lines += ["", "[[workers]]", *_worker(worker, len(list(same)))]
    for fault in spec.faults:
        lines += ["", "[[faults]]", f"time = {_number(fault.time)}", f"worker = {fault.worker}"]
        lines += [f'kind = "{fault.kind}"', *([f"seconds = {_number(fault.seconds)}"] if fault.seconds else [])]
    return "\n".join(lines) + "\n"


def _worker(worker: WorkerSpec, count: int) -> list[str]:
    return [
        f"count = {count}",
        f"link = {_rate(worker.link)}",
        f"batch = {worker.batch}",
        f"samples_per_second = {_number(worker.samples_per_second)}",
        *([f"overhead = {_number(worker.overhead)}"] if worker.overhead else []),
        *([f"jitter = {_jitter(worker.jitter)}"] if worker.jitter.kind != "none" else []),
    ]


def _jitter(jitter: Jitter) -> str:
    if jitter.kind == "straggle":
        values = f"probability = {_number(jitter.probability)}, mean = {_number(jitter.mean)}, "
        return f'{{ kind = "straggle", {values}deviation = {_number(jitter.deviation)} }}'
    if jitter.kind == "delay":
        return f'{{ kind = "delay", mu = {_number(jitter.mu)}, sigma = {_number(jitter.sigma)} }}'
    return f'{{ kind = "{jitter.kind}", sigma = {_number(jitter.sigma)} }}'


def _rate(rate: float) -> str:
    """Return a rate as people write it if that is exact, else in bytes per second."""
    for unit, bits in (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)):
        text = f"{8 * rate / bits:g}"
        if "e" not in text and float(text) >= 1 and float(text) * bits / 8 == rate:
            return f'"{text}{unit}"'
    return _number(rate)


def _time(seconds: float) -> str:
    text = f"{seconds * 1e6:g}us"
    return f'"{text}"' if units.seconds(text) == seconds else _number(seconds)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
