"""`paceline collective`: server-centric networks, and the time of an all-reduce on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from paceline.cli.options import AsJson
from paceline.cli.shared import errors, need, progress_bar, refuse
from paceline.collectives.algorithms import ALGORITHMS, AlgorithmError, algorithm_named, make, stages_of
from paceline.collectives.choose import MAX_SIMULATED, Choice, best_stages, fastest
from paceline.collectives.draw import draw
from paceline.collectives.flows import forwards_packets, simulate
from paceline.collectives.formula import gst, least
from paceline.collectives.topology import KINDS, BCube, Topology, TopologyError, Torus
from paceline.collectives.topology import topology as made
from paceline.observe.table import duration, ruled
from paceline.simulate import units

if TYPE_CHECKING:
    from paceline.lab.fabric import Fabric

GLOO = "gloo"
MAX_BYTES = 1e15
MAX_IN_LAB = 32
MIN_PATIENCE = 120.0  # seconds
SHOWN = 16


@dataclass(frozen=True)
class CollectiveTimes:
    """The time of one algorithm: by formula, simulated and measured. None: there is no such figure."""

    algorithm: str
    stages: tuple[str, ...] | None  # the algorithm of each stage of HiPS
    formula_seconds: float | None
    exact: bool  # False: the formula is a bound or an estimate
    simulated_seconds: float | None
    measured_seconds: float | None = None


def collective(
    topology: Annotated[str, typer.Option(help=f"One of {', '.join(KINDS)}.")] = "bcube",
    n: Annotated[int, typer.Option("--n", help="Servers in a group; in a fat tree, ports of a switch.")] = 4,
    levels: Annotated[int, typer.Option(help="Levels, h: NICs of a server in a BCube, dimensions of a torus.")] = 2,
    sizes: Annotated[str, typer.Option(help="Unequal dimensions of a torus, such as 3x4, instead of --n.")] = "",
    size: Annotated[
        str, typer.Option("--bytes", help="The size of the gradients on each server, such as 100e6 or 100MB.")
    ] = "100e6",
    link: Annotated[
        str,
        typer.Option(
            help="The rate of each NIC in each direction, or one for each level, level 0 first: 600Gbit/100Gbit."
        ),
    ] = "10Gbit",
    latency: Annotated[str, typer.Option(help="The latency between two servers, such as 20us.")] = "0s",
    algorithm: Annotated[
        str,
        typer.Option("--algorithm", "-a", help=f"One or several of {', '.join(ALGORITHMS)}, separated by commas."),
    ] = "hips,ring,mesh,ps",
    stages: Annotated[
        str,
        typer.Option(
            help="The algorithm of each HiPS stage (ring, mesh or ps), or one for all. auto chooses them, and says "
            "which algorithm is the fastest."
        ),
    ] = "ring",
    describe: Annotated[
        bool, typer.Option("--describe", help="Show the servers, their addresses and their peers instead.")
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="With --describe: draw the network to a PNG file.")] = False,
    lab: Annotated[
        bool, typer.Option("--lab", help="Also measure on real links between network namespaces (needs root).")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Measure each algorithm this often; show the median.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Compare all-reduce algorithms on server-centric networks.

    Each algorithm's time is calculated by formula, simulated, and with --lab measured.
    """
    if describe:
        picture = f"{topology}-{sizes or f'{n}-{levels}'}.png" if plot else ""
        return _describe(_network(topology, n, levels, sizes), picture, as_json)
    if plot:
        refuse("--plot needs --describe.")
    net = _network(topology, n, levels, sizes)
    work, rates = _quantity("--bytes", size, units.size), _rates(link)
    rate = min(rates)
    delay = _quantity("--latency", latency, units.seconds)
    if not 4 <= work <= MAX_BYTES or rate <= 0 or delay < 0:
        refuse(f"--bytes must be from 4 to {MAX_BYTES:g}, --link greater than 0, and --latency not less than 0.")
    if lab and delay:
        refuse("--latency is for the formula and the simulation; links of a lab have their own latency.")
    if lab and net.servers > MAX_IN_LAB:
        refuse(f"{net.name} has {net.servers:,} servers; a lab can hold {MAX_IN_LAB}.")
    try:
        names = [algorithm_named(name, net) for name in _listed(algorithm)]
        if not names:
            raise AlgorithmError(f"--algorithm: name at least one of {', '.join(ALGORITHMS)}.")
        net = net.with_rates(rates) if len(rates) > 1 else net
        answer = fastest(net, work, rate, delay) if stages == "auto" else None
        if answer is None:
            chosen = stages_of(net, _listed(stages))
        elif "hips" in names and answer.algorithm != "hips":
            chosen = best_stages(net, work, rate, delay)
        else:
            chosen = answer.stages or stages_of(net, ["ring"])
    except (AlgorithmError, TopologyError) as error:
        refuse(str(error))
    if answer and answer.algorithm not in names:
        names.append(answer.algorithm)
    lines = []
    with progress_bar(quiet=as_json) as bar:
        task = bar.add_task("simulating", total=len(names))
        for name in names:
            bar.update(task, description=f"simulating {name}")
            lines.append(_line(net, name, work, rate, delay, chosen))
            bar.advance(task)
    if lab:
        lines = _measured(net, lines, work, rate, chosen, repeats, as_json)
    if as_json:
        rows = [asdict(line) for line in lines]
        found = {"topology": net.name, "servers": net.servers, "bytes": work, "least_seconds": least(net, work, rate)}
        typer.echo(json.dumps({**found, "fastest": asdict(answer) if answer else None, "rows": rows}))
    else:
        _show_lines(net, lines, work, lab, delay > 0)
        _show_remarks(net, lines, least(net, work, rate), answer)


def _describe(net: Topology, picture: str, as_json: bool) -> None:
    """Show a network. If `picture` is not empty, draw the network to a file of that name."""
    if as_json:
        servers = [{"server": server, "address": net.address(server)} for server in range(net.servers)]
        cables = [cable._asdict() for cable in net.cables]
        typer.echo(json.dumps({"name": net.name, "sizes": net.sizes, "servers": servers, "cables": cables}))
    else:
        _show(net)
    if picture:
        need("matplotlib", "--plot", "plot")
        try:
            draw(net, Path(picture))
        except TopologyError as error:
            refuse(str(error))
        errors.print(Text(f"Written: {picture}"))


def _network(kind: str, n: int, levels: int, sizes: str) -> Topology:
    try:
        each = [int(part) for part in sizes.lower().replace("×", "x").split("x")] if sizes else []
    except ValueError:
        refuse(f"--sizes: {sizes!r} is not a list of numbers such as 3x4.")
    try:
        return made(kind, n, levels, each)
    except TopologyError as error:
        refuse(str(error))


def _quantity(option: str, text: str, unit: Callable[[object], float]) -> float:
    try:
        value = float(text)
    except ValueError:
        try:
            value = unit(text)
        except ValueError:
            value = math.nan
    if not math.isfinite(value):
        refuse(
            f"{option}: {text!r} is not a quantity; write a number, with a unit or without: 100MB, 10Gbit, 20us, 1e6."
        )
    return value


def _rates(text: str) -> list[float]:
    """Return the rate of all NICs, or one for each level."""
    try:
        found = units.rates(text)
    except ValueError:
        found = [_quantity("--link", text, units.rate)]
    return found


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _line(net: Topology, name: str, work: float, rate: float, delay: float, stages: tuple[str, ...]) -> CollectiveTimes:
    formula = gst(net, name, work, rate, delay, stages)
    seconds = None
    if net.servers <= MAX_SIMULATED:
        seconds = simulate(net, make(name, net, round(work / 4), stages), rate, delay)
    return CollectiveTimes(
        name,
        stages if name == "hips" else None,
        formula.seconds if formula else None,
        bool(formula and formula.exact),
        seconds,
    )


def _measured(
    net: Topology,
    lines: Sequence[CollectiveTimes],
    work: float,
    rate: float,
    stages: tuple[str, ...],
    repeats: int,
    quiet: bool,
) -> list[CollectiveTimes]:
    from paceline.lab.collective_run import measure
    from paceline.lab.fabric import Fabric
    from paceline.lab.namespaces import LabError

    found = []
    try:
        with Fabric(net, rate) as fabric, progress_bar(quiet=quiet) as bar:
            every = [*lines, CollectiveTimes(GLOO, None, None, False, None)]
            for line in every:
                _check_routes(fabric, line, stages)
            task = bar.add_task("measuring", total=len(every))
            # The parameter server takes by far the longest: all bytes pass through one server.
            patience = max(MIN_PATIENCE, 4 * 2 * net.servers * work / rate)
            for line in every:
                bar.update(task, description=f"measuring {line.algorithm}")
                seconds = measure(fabric, line.algorithm, work, stages, repeats, patience)
                found.append(CollectiveTimes(**{**asdict(line), "stages": line.stages, "measured_seconds": seconds}))
                bar.advance(task)
    except LabError as error:
        refuse(str(error))
    return found


def _check_routes(fabric: Fabric, line: CollectiveTimes, stages: tuple[str, ...]) -> None:
    from paceline.lab.namespaces import LabError

    net = fabric.net
    name = "mesh" if line.algorithm == GLOO else line.algorithm
    if not fabric.forwards and forwards_packets(net, make(name, net, net.servers**2 * net.ports, stages)):
        raise LabError(
            f"{line.algorithm} routes transfers over other servers, and this kernel does not let servers of the lab "
            "forward packets; leave it out."
        )


def _show(net: Topology) -> None:
    console = Console(highlight=False)
    switches = len({cable.other for cable in net.cables if cable.other >= net.servers})
    table = ruled(f"{net.name}: {net.servers:,} servers, {net.ports} NICs each; {switches:,} switches")
    table.add_column("server", justify="right")
    table.add_column("address")
    for level in range(net.levels):
        table.add_column(f"peers of level {level}", overflow="fold")
    for server in range(min(net.servers, SHOWN)):
        peers = [
            " ".join(str(peer) for peer in net.peers(server, level) if peer != server) for level in range(net.levels)
        ]
        table.add_row(str(server), "⟨" + " ".join(map(str, net.address(server))) + "⟩", *peers)
    console.print(table)
    if net.servers > SHOWN:
        console.print(f"and {net.servers - SHOWN:,} more.")


def _show_lines(net: Topology, lines: Sequence[CollectiveTimes], work: float, lab: bool, delayed: bool) -> None:
    console = Console(highlight=False)
    nics = f"{net.ports} NIC{'s' if net.ports > 1 else ''}"
    said = f"{net.name}: all-reduce of {work / 1e6:g} MB on {net.servers:,} servers with {nics} each"
    console.print(Text(said, style="bold"), soft_wrap=True)
    table = ruled(None)
    table.add_column("algorithm", overflow="fold")
    for heading in ["formula", "simulated", *(["measured", "× formula"] if lab else []), ""]:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    best = [line.measured_seconds or line.simulated_seconds or line.formula_seconds or 0.0 for line in lines]
    for line, seconds in zip(lines, best, strict=True):
        name = _titled(line.algorithm, line.stages)
        formula = _time(line.formula_seconds)
        if line.formula_seconds is not None and not line.exact:
            formula = f"≈ {formula}" if delayed else f"≥ {formula}"
        ratio = line.measured_seconds / line.formula_seconds if line.measured_seconds and line.formula_seconds else None
        real = [_time(line.measured_seconds), f"{ratio:.2f}" if ratio else "–"] if lab else []
        bar = Text("█" * max(1, round(20 * seconds / max(best))), style="green" if seconds == min(best) else "blue")
        table.add_row(name, formula, _time(line.simulated_seconds), *real, bar)
    console.print(table)
    if any(line.simulated_seconds is None and line.algorithm != GLOO for line in lines):
        console.print(f"Networks of more than {MAX_SIMULATED} servers are not simulated.")


def _show_remarks(net: Topology, lines: Sequence[CollectiveTimes], bound: float, answer: Choice | None) -> None:
    """Name the fastest algorithm and the lower bound of all algorithms, and say why HiPS misses that bound."""
    console = Console(highlight=False)
    if answer:
        found = f"The fastest is {_titled(answer.algorithm, answer.stages)}: {_time(answer.seconds)}."
        console.print(Text(found, style="bold"), soft_wrap=True)
    console.print(f"No all-reduce on these links can take less than {_time(bound)}.", soft_wrap=True)
    unequal = isinstance(net, BCube | Torus) and (len(set(net.sizes)) > 1 or len(set(net.rates)) > 1)
    times = [line.simulated_seconds or line.formula_seconds for line in lines if line.algorithm == "hips"]
    if unequal and times and times[0] and times[0] > 1.005 * bound:
        console.print(
            f"HiPS takes {times[0] / bound:.2f} times as long: the levels are unequal, so at times a level is idle "
            "while the processes are at others.",
            soft_wrap=True,
        )


def _titled(algorithm: str, stages: Sequence[str] | None) -> str:
    """Return the name of an algorithm with its stages, if it has some."""
    alike = stages and stages[: 1 if len(set(stages)) == 1 else None]
    return f"{algorithm} ({', '.join(alike)})" if alike else algorithm


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)
