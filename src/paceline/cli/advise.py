"""`paceline advise`: which scheme suits a script on a cluster, and what it gains."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.text import Text

from paceline.advise import links as link_measurement
from paceline.advise import profile
from paceline.advise.candidates import DDP, DILOCO, RINGS, Candidate
from paceline.advise.explain import Advice
from paceline.advise.explain import advise as advise_on
from paceline.cli import advise_output
from paceline.cli.job_checks import check_updates
from paceline.cli.options import AsJson, Replicas, Seed
from paceline.cli.shared import check_script, check_target, errors, need, progress_bar, refuse
from paceline.lab.namespaces import Lab, LabError
from paceline.launch.processes import JobError
from paceline.policies import make
from paceline.simulate import ClusterSpec, load_cluster, units
from paceline.simulate.cluster_reader import MAX_STEPS
from paceline.simulate.cluster_writer import as_toml
from paceline.simulate.measured_cluster import StepTime, cluster_of, measured_as

if TYPE_CHECKING:
    from paceline.advise.verify import VerifiedEstimate

LAB_ITERATIONS = 24  # iterations of each worker when a candidate is measured
ITERATIONS = 200  # of each worker when a candidate is simulated
ROUNDS = 60  # the same with local steps; a round averages the times of its steps


def advise(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            help="The training script and its arguments. Without one, --cluster FILE also describes the model and the "
            "time of a step."
        ),
    ] = None,
    link: Annotated[str | None, typer.Option(help='The link of every host, in each direction: "1Gbit".')] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="The number of workers, with --link; 4 if left out.")
    ] = None,
    servers: Annotated[
        int | None, typer.Option(min=1, help="The number of servers, with --link or --hosts; 1 if left out.")
    ] = None,
    replicas: Replicas = 0,
    cluster: Annotated[
        str | None,
        typer.Option(help="A built-in cluster or a TOML file: its links, and the relative speed of its workers."),
    ] = None,
    lab: Annotated[
        str | None,
        typer.Option(help="Like --cluster, but build the cluster on this machine and measure its links. Needs root."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Measure the links of these machines over ssh; each runs a worker: a,b,c.")
    ] = None,
    local_steps: Annotated[
        str | None,
        typer.Option(
            metavar="H[,H]",
            help="Compare schemes that exchange once in H steps of the workers' own optimizers, for one or several H.",
        ),
    ] = None,
    updates: Annotated[
        str | None,
        typer.Option(
            help="Compare policies whose updates, and changes of the model, are sent as int8, int4, topk:F or "
            "int4/P. All-reduce sends float32."
        ),
    ] = None,
    now: Annotated[
        str,
        typer.Option(
            help="The present set-up: ddp, diloco (with --local-steps) or a policy. Gains are relative to it."
        ),
    ] = DDP,
    steps: Annotated[int, typer.Option(min=10, help="The number of steps of the script to time.")] = 100,
    seconds: Annotated[float, typer.Option(min=0.1, help="Stop timing after this many seconds of training.")] = 20.0,
    patience: Annotated[float, typer.Option(min=1.0, help="Stop the script after this many seconds.")] = 600.0,
    jitter: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Use this relative spread of compute times, not the measured one; 0.05 is ±5%."
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="The number of iterations of each worker to simulate. "
            f"If left out: {ITERATIONS}, or {ROUNDS} rounds of local steps.",
        ),
    ] = None,
    seed: Seed = 0,
    write: Annotated[Path | None, typer.Option(help="Write the measured cluster to this TOML file.")] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Measure the fastest candidates and the advised one in the lab. Needs --lab."),
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="The number of fastest candidates to measure.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Choose a policy for your script on your cluster.

    Time the script on this machine, take or measure the links, and compare the policies and all-reduce. The advice says
    what the best one gains, and why.
    """
    script = script or []
    _check(script, (link, cluster, lab, hosts), verify)
    if hosts is None and link is None and (workers or servers):
        refuse("--workers needs --link, and --servers needs --link or --hosts. A cluster's file has its own numbers.")
    if hosts is not None and workers:
        refuse("--workers cannot be used with --hosts: each host runs one worker.")
    check_target(write, "--write")
    described = load_cluster(file) if (file := cluster or lab) else None
    rounds, codec = _exchanges(described, local_steps, updates)
    if lab and (codec or rounds != (1,) or (described and described.overlap)):
        refuse("--lab is for float32 gradients in every step; leave local steps, updates and overlap out.")
    current = _present(now, rounds)
    iterations = iterations or (ITERATIONS if max(rounds) == 1 else ROUNDS)
    host_names = _host_names(hosts) if hosts is not None else []
    rate = _rate(link) if link is not None else None
    name = Path(script[0]).stem if script else ""
    profiled: profile.ScriptProfile | None = None
    try:
        with ExitStack() as stack:
            built = stack.enter_context(_lab_of(described, replicas)) if lab and described else None
            with progress_bar(quiet=as_json) as progress:
                if script:
                    profiled = _profile(script, steps, seconds, patience, progress)
                    spread = profiled.jitter if jitter is None else jitter
                    step = StepTime(profiled.seconds, profiled.batch, spread, profiled.model_bytes)
                if described and not script:
                    spec = dataclasses.replace(described, faults=())
                    spec = spec if jitter is None else spec.with_jitter(jitter)
                elif rate is not None:
                    spec = cluster_of(name, step, [rate] * (workers or 4), servers or 1, rate)
                elif described:
                    spec = measured_as(described, step)
                    if built:
                        spec = _with_links(spec, _measure_lab_links(built, described, progress))
                else:
                    found = _measure_links(link_measurement.SshAccess(), link_measurement.HERE, host_names, progress)
                    spec = cluster_of(name, step, found.workers, servers or 1, found.server, found.latency)
                spec = dataclasses.replace(spec, replicas=replicas)
                _check_workers(current, spec)
                optimizer = profiled.optimizer if profiled else None
                advice = advise_on(spec, current, iterations, seed, _shown_in(progress), optimizer, rounds, codec)
                verified = _verify(built, advice, top, seed, progress) if verify and built else []
    except (JobError, LabError) as error:
        refuse(str(error))
    if profiled and (note := profile.disturbance(profiled, jitter)):
        errors.print(Text(f"Note: {note}"))
    command = _command(advice, script or ["SCRIPT"], hosts)
    about = f"{Path(script[0]).name}: as `paceline advise` measured it." if script else f"{spec.name}: as described."
    toml = as_toml(spec, about)
    if write:
        write.write_text(toml)
    if as_json:
        result = advise_output.as_json(profiled, advice, verified, toml)
        typer.echo(json.dumps(result | {"command": command}, indent=2))
    else:
        advise_output.show(Path(script[0]).name if script else spec.name, profiled, advice, verified)
        if command:
            typer.echo(f"\n  {command}")
    if write:
        errors.print(Text(f"Written: {write}"))


def _check(script: list[str], given: Sequence[str | None], verify: bool) -> None:
    """Refuse the command if its options contradict each other.

    given: the values of --link, --cluster, --lab and --hosts.
    """
    if script and script[0].endswith(".toml"):
        refuse(f"{script[0]} describes a cluster and is no training script; use --cluster {script[0]}.")
    if script:
        need("torch", "Timing a script", "torch")
        check_script(script[0])
    elif given[1] is None:
        refuse("Name the training script, or describe its model and the time of a step with --cluster FILE.")
    if sum(each is not None for each in given) != 1:
        refuse("Describe the links in exactly one way: --link 1Gbit, --cluster FILE, --lab FILE or --hosts a,b,c.")
    if verify and given[2] is None:
        refuse("--verify measures in a lab: use it with --lab FILE.")


def _exchanges(
    described: ClusterSpec | None, local_steps: str | None, updates: str | None
) -> tuple[tuple[int, ...], str]:
    """Return the numbers of local steps and the codec to compare: those of the options, or else of the cluster."""
    codec = updates if updates is not None else described.updates if described else ""
    check_updates(codec, "bsp", None)
    if local_steps is None:
        own = described.local_steps if described else 1
        _check_parts(codec, (own,))
        return (own,), codec
    try:
        counts = tuple(int(each) for each in local_steps.split(","))
    except ValueError:
        counts = (0,)
    if not all(1 <= each <= MAX_STEPS for each in counts):
        refuse(
            f"--local-steps must be whole numbers from 1 to {MAX_STEPS}, separated by commas, such as 50,200; got "
            f"{local_steps!r}."
        )
    _check_parts(codec, counts)
    return counts, codec


def _check_parts(updates: str, counts: Sequence[int]) -> None:
    """Refuse parts of the model without local steps: a worker must keep what it has not sent."""
    if "/" in updates and min(counts) == 1:
        refuse(
            f"{updates} sends one part of the model at a time, for several local steps; give --local-steps 2 or more."
        )


def _present(now: str, rounds: tuple[int, ...]) -> Candidate:
    """Return the present set-up that --now names. Policies and ddp exchange a float32 gradient in every step."""
    if now == DILOCO:
        if max(rounds) == 1:
            refuse("--now diloco exchanges once in several steps: use it with --local-steps 50, say.")
        return Candidate(DILOCO, local_steps=min(each for each in rounds if each > 1))
    if now != DDP:
        make(now)
    return Candidate(now)


def _check_workers(current: Candidate, spec: ClusterSpec) -> None:
    """Refuse the command if the present set-up needs more workers than the cluster has."""
    least = 1 if current.policy in RINGS else make(current.policy).least_workers
    if least > len(spec.workers):
        refuse(f"--now {current.policy} needs at least {least} workers; this cluster has {len(spec.workers)}.")


def _rate(link: str) -> float:
    """Return the rate that --link gives, in bytes per second."""
    try:
        rate = units.rate(link)
    except ValueError:
        rate = 0.0
    if rate <= 0:
        refuse(f"--link must be a rate greater than 0, such as 1Gbit or 100MB/s; got {link!r}.")
    return rate


def _host_names(hosts: str) -> list[str]:
    """Return the machines that --hosts names."""
    names = [name for name in hosts.split(",") if name]
    if not names:
        refuse("--hosts must name the workers' machines, such as a,b,c.")
    if len(set(names)) < len(names):
        refuse("--hosts names a machine twice. Name each worker's machine once.")
    return names


def _lab_of(described: ClusterSpec, replicas: int) -> Lab:
    from paceline.lab.hosts import hosts

    return Lab(hosts(dataclasses.replace(described, replicas=replicas)))


def _profile(
    script: list[str], steps: int, seconds: float, patience: float, progress: Progress
) -> profile.ScriptProfile:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    task = progress.add_task(f"timing {Path(script[0]).name}", total=None)
    profiled = asyncio.run(profile.timed(script, steps, seconds, patience))
    progress.remove_task(task)
    if profiled.waited is None and load > cores:  # a system that does not count how long threads wait for a core
        errors.print(
            f"Note: this machine was busy (load {load:.0f} on {cores} cores); fix the jitter with --jitter 0.05."
        )
    return profiled


def _measure_lab_links(lab: Lab, described: ClusterSpec, progress: Progress) -> link_measurement.Links:
    from paceline.lab.hosts import server_host, worker_host

    server = server_host(described, 0)
    workers = [worker_host(number) for number in range(len(described.workers))]
    return _measure_links(link_measurement.LabAccess(lab), server, workers, progress)


def _measure_links(
    access: link_measurement.HostAccess, server: str, workers: list[str], progress: Progress
) -> link_measurement.Links:
    task = progress.add_task("measuring links", total=1.0)
    advance = _advance(progress, task)
    found = asyncio.run(link_measurement.measure_links(access, server, workers, advance))
    progress.remove_task(task)
    return found


def _advance(progress: Progress, task: Any) -> Callable[[float], None]:
    return lambda part: progress.update(task, completed=part)


def _with_links(spec: ClusterSpec, found: link_measurement.Links) -> ClusterSpec:
    """Return the cluster with the links that were measured."""
    pairs = zip(spec.workers, found.workers, strict=True)
    return dataclasses.replace(
        spec,
        server_link=found.server,
        latency=found.latency,
        workers=tuple(dataclasses.replace(worker, link=link) for worker, link in pairs),
    )


def _shown_in(progress: Progress) -> Callable[[str, float], None]:
    """Return a function that shows a named task in the progress bar."""
    tasks: dict[str, Any] = {}

    def show(name: str, part: float) -> None:
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=1.0)
        progress.update(tasks[name], completed=part)

    return show


def _verify(lab: Lab, advice: Advice, top: int, seed: int, progress: Progress) -> list[VerifiedEstimate]:
    """Measure the fastest candidates, the advised one and the present set-up in the lab."""
    from paceline.advise import verify

    contenders = verify.contenders(advice, top)
    task = progress.add_task("measuring in the lab", total=len(contenders))
    found = []
    for each in contenders:
        found.append(verify.measure(lab, advice.spec, each, LAB_ITERATIONS, seed))
        progress.advance(task)
    return found


def _command(advice: Advice, script: list[str], hosts: str | None) -> str | None:
    """Return the command that follows the advice. None if nothing changes, or if the advice is all-reduce."""
    candidate, spec = advice.chosen.candidate, advice.spec
    if candidate.policy in RINGS or advice.chosen is advice.now:
        return None
    words = ["paceline", "run", "--workers", str(len(spec.workers)), "--policy", candidate.policy]
    words += ["--apply", "streamed"] if candidate.streamed else []
    words += ["--colocate"] if candidate.colocated else ["--servers", str(spec.servers)]
    words += ["--replicas", "1"] if spec.replicas else []
    words += ["--updates", candidate.updates] if candidate.updates else []
    words += ["--hosts", hosts or "HOST,HOST,…", "--tls", "auto"]
    return " ".join(words + [shlex.quote(word) for word in script])
