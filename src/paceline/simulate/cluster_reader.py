"""Clusters by name or from TOML files, checked key by key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.model.codecs import NAMES, codec
from paceline.observe.driver import Fault
from paceline.simulate import units
from paceline.simulate.cluster_spec import ClusterSpec, Jitter, WorkerSpec

MAX_SIGMA = 3.0  # of jitter; with more, a mean has no meaning
MAX_STEPS = 1_000_000  # of a round
MAX_MU = 10.0  # of a log-normal delay; exp(10) s is six hours


class ClusterError(ValueError):
    """A cluster that cannot be read. The message names the file, the key, and the expected value."""


def builtin_names() -> list[str]:
    """Return the names of the built-in clusters."""
    folder = resources.files("paceline.simulate") / "clusters"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def describe(name: str) -> str:
    """Return one line that describes a built-in cluster."""
    text = (resources.files("paceline.simulate") / "clusters" / f"{name}.toml").read_text()
    return text.splitlines()[0].lstrip("# ")


def load_cluster(name: str) -> ClusterSpec:
    """Return a built-in cluster by its name, or the cluster in a TOML file."""
    if name in builtin_names():
        text = (resources.files("paceline.simulate") / "clusters" / f"{name}.toml").read_text()
        return parse_cluster(text, name, name)
    path = Path(name)
    if not path.is_file():
        close = difflib.get_close_matches(name, builtin_names(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        known = ", ".join(builtin_names())
        raise ClusterError(f"There is no cluster {name!r}, neither built in nor as a file.{hint} Built in: {known}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{name}: cannot be read: {error}.") from None
    return parse_cluster(text, path.stem, name)


def parse_cluster(text: str, name: str, source: str) -> ClusterSpec:
    """Return the cluster that a TOML text describes. Errors mention `source`."""
    try:
        root = _Table(tomllib.loads(text), source, "")
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{source}: is not valid TOML: {error}.") from None
    model, servers = root.table("model"), root.table("servers")
    worker_tables, fault_tables = root.tables("workers"), root.tables("faults", needed=False)
    workers: list[WorkerSpec] = []
    for table in worker_tables:
        worker = WorkerSpec(
            link=table.get("link", _rate, _RATE),
            batch=table.get("batch", _count, _COUNT),
            samples_per_second=table.get("samples_per_second", _positive, "a number greater than 0"),
            overhead=table.get("overhead", _seconds, _SECONDS, 0.0),
            jitter=_jitter(table),
        )
        workers += [worker] * table.get("count", _count, _COUNT, 1)
        table.check_all_read()
    spec = ClusterSpec(
        name=name,
        model_bytes=model.get("bytes", _size, 'a size greater than 0, such as 552e6 or "552MB"'),
        slices=model.get("slices", _count, _COUNT, 16),
        servers=servers.get("count", _count, _COUNT),
        server_link=servers.get("link", _rate, _RATE),
        server_link_in=servers.get("link_in", _rate, _RATE, 0.0),
        latency=servers.get("latency", _seconds, _SECONDS, 0.0),
        apply_rate=servers.get("apply", _rate, 'a rate greater than 0, such as "10GB/s"', 10e9),
        lease=servers.get("lease", _seconds, _SECONDS, 30.0),
        workers=tuple(workers),
        faults=tuple(_fault(table, len(workers)) for table in fault_tables),
        local_steps=root.get("local_steps", _steps, f"a whole number from 1 to {MAX_STEPS}", 1),
        updates=root.get("updates", _codec, f"{NAMES} (leave it out for float32)", ""),
        overlap=root.get("overlap", _truth, "true or false", False),
    )
    for table in (model, servers, root):
        table.check_all_read()
    return spec


_MISSING = object()
_RATE = 'a rate greater than 0, such as "10Gbit" or "488MB/s"'
_COUNT = "a whole number of at least 1"
_SECONDS = 'a time of at least 0, such as "50us" or "0.2s"'


class _Table:
    """A TOML table that knows its place in the file, and which of its keys were read."""

    def __init__(self, values: Mapping[str, Any], source: str, path: str) -> None:
        self._values, self._source, self._path = values, source, path
        self._known: list[str] = []

    def get(self, key: str, read: Callable[[Any], Any], expected: str, default: Any = _MISSING) -> Any:
        """Return the value of a key, converted by `read`.

        Raise ClusterError if the value is wrong, or if the key is missing and has no default.
        """
        self._known.append(key)
        if key not in self._values:
            if default is _MISSING:
                raise self._error(key, f"is missing; expected {expected}")
            return default
        value = self._values[key]
        try:
            return read(value)
        except (ValueError, TypeError, OverflowError):
            raise self._error(key, f"is {value!r}; expected {expected}") from None

    def table(self, key: str, default: Mapping[str, Any] | None = None) -> _Table:
        """Return the table under a key."""
        path = f"{self._path}{key}."
        return _Table(self.get(key, _mapping, "a table", _MISSING if default is None else default), self._source, path)

    def tables(self, key: str, needed: bool = True) -> list[_Table]:
        """Return the tables in the array under a key."""
        values = self.get(
            key, _list_of_tables, f"one or more tables, each headed [[{key}]]", _MISSING if needed else []
        )
        return [_Table(value, self._source, f"{key}[{i}].") for i, value in enumerate(values)]

    def check_all_read(self) -> None:
        """Raise ClusterError if a key was not read: it may be misspelt."""
        for key in self._values:
            if key not in self._known:
                close = difflib.get_close_matches(key, self._known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise self._error(key, f"is not known; {hint}expected one of {', '.join(self._known)}")

    def _error(self, key: str, what: str) -> ClusterError:
        return ClusterError(f"{self._source}: {self._path}{key} {what}.")


def _jitter(table: _Table) -> Jitter:
    inner = table.table("jitter", {"kind": "none"})
    kinds = ("none", "normal", "lognormal", "straggle", "delay")
    kind = inner.get("kind", _one_of(kinds), "one of " + ", ".join(kinds))
    jitter = Jitter(kind=kind)
    if kind in ("normal", "lognormal"):
        jitter = Jitter(kind, sigma=inner.get("sigma", _sigma, f"a number from 0 to {MAX_SIGMA:g}"))
    elif kind == "delay":
        sigma = inner.get("sigma", _sigma, f"a number from 0 to {MAX_SIGMA:g}")
        jitter = Jitter(kind, sigma, mu=inner.get("mu", _within(MAX_MU), f"a number from −{MAX_MU:g} to {MAX_MU:g}"))
    elif kind == "straggle":
        jitter = Jitter(
            kind,
            probability=inner.get("probability", _share, "a number from 0 to 1"),
            mean=inner.get("mean", _seconds, _SECONDS),
            deviation=inner.get("deviation", _seconds, _SECONDS, 0.0),
        )
    inner.check_all_read()
    return jitter


def _fault(table: _Table, workers: int) -> Fault:
    kinds = ("kill", "pause", "cut", "rejoin")
    kind = table.get("kind", _one_of(kinds), "one of " + ", ".join(kinds))
    fault = Fault(
        time=table.get("time", _seconds, _SECONDS),
        worker=table.get("worker", _below(workers), f"a worker's number, from 0 to {workers - 1}"),
        kind=kind,
        seconds=table.get("seconds", _seconds, _SECONDS) if kind in ("pause", "cut") else 0.0,
    )
    table.check_all_read()
    return fault


def _mapping(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(value)
    return value


def _list_of_tables(value: Any) -> Any:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ValueError(value)
    return value


def _positive(value: Any) -> float:
    number = units.plain(value)
    if number <= 0:
        raise ValueError(value)
    return number


def _from_zero(value: Any) -> float:
    number = units.plain(value)
    if number < 0:
        raise ValueError(value)
    return number


def _share(value: Any) -> float:
    return _up_to(1.0, value)


def _sigma(value: Any) -> float:
    return _up_to(MAX_SIGMA, value)


def _up_to(most: float, value: Any) -> float:
    number = _from_zero(value)
    if number > most:
        raise ValueError(value)
    return number


def _within(most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        number = units.plain(value)
        if not -most <= number <= most:
            raise ValueError(value)
        return number

    return read


def _size(value: Any) -> float:
    return _positive(units.size(value))


def _rate(value: Any) -> float:
    return _positive(units.rate(value))


def _seconds(value: Any) -> float:
    return _from_zero(units.seconds(value))


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(value)
    return value


def _steps(value: Any) -> int:
    if (steps := _count(value)) > MAX_STEPS:
        raise ValueError(value)
    return steps


def _codec(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return codec(value).name


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _below(limit: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
            raise ValueError(value)
        return value

    return read


def _one_of(words: tuple[str, ...]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value not in words:
            raise ValueError(value)
        return value

    return read
