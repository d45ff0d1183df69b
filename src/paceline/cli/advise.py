"""`paceline advise`: which scheme a script wants on a cluster, and what it would gain."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from paceline.advise import links as linking
from paceline.advise import profile
from paceline.advise.advice import DDP, NEAR, Advice, Candidate, Estimate
from paceline.advise.advice import advise as advise_on
from paceline.cli.shared import check_script, check_target, errors, refuse
from paceline.cli.simulate import progress_bar
from paceline.lab.namespaces import Lab, LabError
from paceline.launch.processes import JobError
from paceline.observe.table import duration, ruled
from paceline.policies import make
from paceline.simulate import ClusterSpec, load_cluster, units
from paceline.simulate.cluster_writer import as_toml
from paceline.simulate.measured_cluster import StepTime, cluster_of, measured_as

if TYPE_CHECKING:
    from paceline.advise.verify import VerifiedEstimate

LAB_ITERATIONS = 24  # of each worker, where a candidate is measured


def advise(
    script: Annotated[list[str], typer.Argument(help="The training script and its arguments.")],
    link: Annotated[str | None, typer.Option(help='Every host\'s link, each direction: "1Gbit".')] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="How many workers, with --link; 4 if left out.")] = None,
    servers: Annotated[
        int | None, typer.Option(min=1, help="How many servers, with --link or --hosts; 1 if left out.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A cluster by name or in a TOML file: its links, and how its workers compare.")
    ] = None,
    lab: Annotated[
        str | None, typer.Option(help="The same, but built on this machine, and its links measured. Needs root.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Measure the links of these machines, the workers, over ssh: a,b,c.")
    ] = None,
    now: Annotated[str, typer.Option(help="What there is now: ddp, or a policy. Gains are over that.")] = DDP,
    steps: Annotated[int, typer.Option(min=10, help="Steps of the script that are timed.")] = 100,
    seconds: Annotated[float, typer.Option(min=0.1, help="Or for how long, if that is less.")] = 20.0,
    patience: Annotated[float, typer.Option(min=1.0, help="Seconds after which the script is given up.")] = 600.0,
    jitter: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="The spread of compute times, where this machine is too busy to say."),
    ] = None,
    iterations: Annotated[int, typer.Option(min=8, help="Iterations of each worker that are simulated.")] = 200,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    write: Annotated[Path | None, typer.Option(help="Write the cluster as it was measured to this TOML file.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Measure the fastest candidates in the lab, and what is advised.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="How many of the fastest are measured.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time a training script on this machine, and say which scheme it wants on a cluster, what that gains, and why."""
    current = _check(script, (link, cluster, lab, hosts), now, verify)
    if hosts is None and link is None and (workers or servers):
        refuse("--workers and --servers go with --link; a cluster's file says how many there are.")
    if hosts is not None and workers:
        refuse("--workers goes with --link; with --hosts there is a worker on each.")
    check_target(write, "--write")
    described = load_cluster(file) if (file := cluster or lab) else None
    names = _names(hosts) if hosts is not None else []
    rate = _rate(link) if link is not None else None
    try:
        with ExitStack() as stack:
            built = _lab(stack, described) if lab and described else None
            with progress_bar(quiet=as_json) as progress:
                timed = _timed(script, steps, seconds, patience, progress)
                step = StepTime(
                    timed.seconds, timed.batch, timed.jitter if jitter is None else jitter, timed.model_bytes
                )
                if rate is not None:
                    spec = cluster_of(Path(script[0]).stem, step, [rate] * (workers or 4), servers or 1, rate)
                elif described:
                    spec = measured_as(described, step)
                    if built:
                        spec = _with_links(spec, _measure_lab(built, described, progress))
                else:
                    found = _measure(linking.SshAccess(), linking.HERE, names, progress)
                    name = Path(script[0]).stem
                    spec = cluster_of(name, step, found.workers, servers or 1, found.server, found.latency)
                if current.policy != DDP and make(current.policy).least_workers > len(spec.workers):
                    refuse(f"--now {now} needs more than {len(spec.workers)} workers.")
                tasks: dict[str, Any] = {}
                advice = advise_on(spec, current, iterations, seed, _shown(progress, tasks), timed.optimizer)
                verified = _verified(built, advice, top, seed, progress) if verify and built else []
    except (JobError, LabError) as error:
        refuse(str(error))
    command = _command(advice, script, hosts)
    text = as_toml(spec, f"{Path(script[0]).name}: as `paceline advise` measured it.")
    if write:
        write.write_text(text)
    if as_json:
        typer.echo(json.dumps(_as_json(timed, advice, verified, text) | {"command": command}, indent=2))
    else:
        _show(Path(script[0]).name, timed, advice, verified)
        if command:
            typer.echo(f"\n  {command}")
    if write:
        errors.print(Text(f"Written: {write}"))


def _check(script: list[str], given: Sequence[str | None], now: str, verify: bool) -> Candidate:
    if importlib.util.find_spec("torch") is None:
        refuse("Timing a script needs torch: pip install 'paceline[torch]'.")
    check_script(script[0])
    if sum(each is not None for each in given) != 1:
        refuse("Say which links there are, in one way: --link 1Gbit, --cluster FILE, --lab FILE or --hosts a,b,c.")
    if verify and given[2] is None:
        refuse("--verify measures in a lab: use it with --lab FILE.")
    if now != DDP:
        make(now)
    return Candidate(now)


def _rate(link: str) -> float:
    try:
        rate = units.rate(link)
    except ValueError:
        rate = 0.0
    if rate <= 0:
        refuse(f"--link is a rate greater than 0, such as 1Gbit or 100MB/s, not {link!r}.")
    return rate


def _names(hosts: str) -> list[str]:
    names = [name for name in hosts.split(",") if name]
    if not names:
        refuse("--hosts names the workers' machines: a,b,c.")
    if len(set(names)) < len(names):
        refuse("--hosts names a machine twice; name each worker's once.")
    return names


def _lab(stack: ExitStack, described: ClusterSpec) -> Lab:
    from paceline.lab.hosts import hosts

    return stack.enter_context(Lab(hosts(described)))


def _timed(script: list[str], steps: int, seconds: float, patience: float, progress: Progress) -> profile.ScriptProfile:
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > cores:
        errors.print(f"Note: this machine is busy, with a load of {busy:.0f} on {cores} cores: a step takes longer.")
    progress.add_task(f"timing {Path(script[0]).name}", total=None)
    timed = asyncio.run(profile.timed(script, steps, seconds, patience))
    for task in progress.task_ids:
        progress.remove_task(task)
    return timed


def _measure_lab(lab: Lab, described: ClusterSpec, progress: Progress) -> linking.Links:
    from paceline.lab.hosts import server_host, worker_host

    server = server_host(described, 0)
    workers = [worker_host(number) for number in range(len(described.workers))]
    return _measure(linking.LabAccess(lab), server, workers, progress)


def _measure(reach: linking.HostAccess, server: str, workers: list[str], progress: Progress) -> linking.Links:
    task = progress.add_task("measuring links", total=1.0)
    found = asyncio.run(linking.measured(reach, server, workers, lambda part: progress.update(task, completed=part)))
    progress.remove_task(task)
    return found


def _with_links(spec: ClusterSpec, found: linking.Links) -> ClusterSpec:
    """The cluster with the links that were measured."""
    pairs = zip(spec.workers, found.workers, strict=True)
    return dataclasses.replace(
        spec,
        server_link=found.server,
        latency=found.latency,
        workers=tuple(dataclasses.replace(worker, link=link) for worker, link in pairs),
    )


def _shown(progress: Progress, tasks: dict[str, Any]) -> Callable[[str, float], None]:
    def show(name: str, part: float) -> None:
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=1.0)
        progress.update(tasks[name], completed=part)

    return show


def _verified(lab: Lab, advice: Advice, top: int, seed: int, progress: Progress) -> list[VerifiedEstimate]:
    from paceline.advise import verify

    chosen = verify.contenders(advice, top)
    task = progress.add_task("measuring in the lab", total=len(chosen))
    found = []
    for each in chosen:
        found.append(verify.measured(lab, advice.spec, each, LAB_ITERATIONS, seed))
        progress.advance(task)
    return found


def _show(name: str, timed: profile.ScriptProfile, advice: Advice, verified: list[VerifiedEstimate]) -> None:
    console = Console(highlight=False)
    spec = advice.spec
    links = sorted({worker.link for worker in spec.workers})
    slowest, fastest = _bits(links[0]), _bits(links[-1])
    console.print()
    console.print(
        Text(
            f"{name} computes {duration(timed.seconds)} for {timed.batch} samples here (±{timed.jitter:.0%}, "
            f"{timed.steps} steps, on {timed.device}); its model is {_size(timed.model_bytes)}, its optimizer "
            f"{timed.optimizer_name}."
        )
    )
    title = (
        f"{len(spec.workers)} workers with links of {slowest if slowest == fastest else f'{slowest} to {fastest}'}, "
        f"{spec.servers} server{'s' if spec.servers > 1 else ''} with {_bits(spec.server_link)}"
    )
    console.print(_table(advice, verified, title, console.width))
    gain = advice.chosen.worth / advice.now.worth - 1
    stay = advice.chosen is advice.now
    console.print()
    console.print(
        Text(
            f"Advice: stay with {advice.now.candidate.name}."
            if stay
            else f"Advice: {advice.chosen.candidate.name}. It is {gain:.0%} faster than {advice.now.candidate.name}.",
            style="bold",
        )
    )
    for line in (*advice.reasons, *advice.steps):
        console.print(Text(f"- {line}"))
    if verified:
        console.print(Text(f"- {_verdict(advice, verified)}"))


def _table(advice: Advice, verified: list[VerifiedEstimate], title: str, width: int) -> Table:
    """Where there is little room, samples/s and staleness are left out: the last columns say what they come to."""
    found = {each.expected.candidate: each for each in verified}
    table = ruled(title)
    rows = [_cells(each, advice, found) for each in advice.ranked]
    narrow = width < (115 if verified else 95)
    shown = [heading for heading in rows[0] if not (narrow and heading in ("samples/s", "staleness"))]
    for heading in shown:
        if heading == "scheme":
            table.add_column(heading, overflow="fold", min_width=10)
        else:
            table.add_column(heading, justify="left" if heading == "servers" else "right", no_wrap=True)
    for each, cells in zip(advice.ranked, rows, strict=True):
        table.add_row(*(cells[heading] for heading in shown), style="green" if each is advice.chosen else None)
    return table


def _cells(each: Estimate, advice: Advice, found: Mapping[Candidate, VerifiedEstimate]) -> dict[str, RenderableType]:
    """A row of the table, by heading."""
    candidate = each.candidate
    mark = "→ " if each is advice.chosen else "  "
    cells: dict[str, RenderableType] = {
        "scheme": Text(mark + candidate.policy + (" streamed" if candidate.streamed else "")),
        "servers": _servers(candidate),
        "iteration": duration(each.iteration_seconds),
        "samples/s": f"{each.samples_per_second:,.0f}",
        "staleness": f"{each.mean_staleness:.1f} ≤{each.max_staleness}",
        "needs": "" if each.price == 1 else f"× {each.price:.4g}",
        f"× {advice.now.candidate.policy}": f"{each.worth / advice.now.worth:.2f}",
    }
    if found:
        measured = found.get(candidate)
        cells["measured"] = duration(measured.iteration_seconds) if measured else ""
        cells["off"] = f"{measured.off:+.0%}" if measured else ""
    return cells


def _verdict(advice: Advice, verified: list[VerifiedEstimate]) -> str:
    from paceline.advise.verify import right

    best = max(verified, key=lambda each: each.worth)
    own = next(each for each in verified if each.expected is advice.chosen)
    if right(verified, advice.chosen.candidate):
        return (
            f"Measured in the lab, the advice is right: {own.samples_per_second:,.0f} samples/s, and nothing that was "
            f"measured is more than {NEAR:.0%} faster."
        )
    ahead = best.worth / own.worth - 1
    return f"Measured in the lab, the advice is wrong: {best.expected.candidate.name} is {ahead:.0%} faster."


def _as_json(
    timed: profile.ScriptProfile, advice: Advice, verified: list[VerifiedEstimate], text: str
) -> dict[str, Any]:
    from paceline.advise.verify import right

    found = {each.expected.candidate: each for each in verified}

    def row(each: Estimate) -> dict[str, Any]:
        measured = found.get(each.candidate)
        return {
            **dataclasses.asdict(each),
            "gain": each.worth / advice.now.worth,
            "measured": None
            if measured is None
            else {
                "iteration_seconds": measured.iteration_seconds,
                "samples_per_second": measured.samples_per_second,
            },
        }

    return {
        "timing": dataclasses.asdict(timed),
        "cluster": text,
        "now": dataclasses.asdict(advice.now.candidate),
        "advice": dataclasses.asdict(advice.chosen.candidate),
        "gain": advice.chosen.worth / advice.now.worth,
        "reasons": advice.reasons,
        "what_else": advice.steps,
        "candidates": [row(each) for each in advice.ranked],
        "right": right(verified, advice.chosen.candidate) if verified else None,
    }


def _command(advice: Advice, script: list[str], hosts: str | None) -> str | None:
    """How to do what is advised; None if it is done already, or is not ours to do."""
    candidate, spec = advice.chosen.candidate, advice.spec
    if candidate.policy == DDP or advice.chosen is advice.now:
        return None
    words = ["paceline", "run", "--workers", str(len(spec.workers)), "--policy", candidate.policy]
    words += ["--apply", "streamed"] if candidate.streamed else []
    words += ["--colocate"] if candidate.colocated else ["--servers", str(spec.servers)]
    words += ["--hosts", hosts or "HOST,HOST,…"]
    return " ".join(words + [shlex.quote(word) for word in script])


def _servers(candidate: Candidate) -> str:
    return "none" if candidate.policy == DDP else "beside" if candidate.colocated else "apart"


def _bits(rate: float) -> str:
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if 8 * rate >= size:
            return f"{8 * rate / size:.3g} {unit}"
    return f"{8 * rate / 1e3:.3g} kbit/s"


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
