"""Checks of the options of a job, before anything is started. Each refuses in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.shared import errors, refuse
from paceline.model.codecs import codec
from paceline.model.correction import CorrectionOption, checked
from paceline.policies import Policy, make
from paceline.simulate import ClusterSpec

CARRIED = 0.8  # a lab whose links carry a smaller share of their rates is not the cluster that it should be


def check_policy(policy: str, workers: int, apply: str, correct: str, option: str = "--workers") -> None:
    """Refuse a policy that cannot be made or has too few workers. Note options that have no effect.

    option: the one that gives the number of workers.
    """
    if apply not in ("whole", "streamed"):
        refuse(f"--apply must be whole or streamed, not {apply!r}.")
    asked = correction(correct)
    made = make(policy)
    least = made.least_workers
    if least > workers:
        whom = option.removeprefix("--")
        refuse(f"{policy} needs at least {least} {whom}, and there are {workers}; use {option} {least}.")
    if made.mixes and asked not in ("auto", "none"):
        errors.print(f"Note: --correct has no effect, since workers make their own steps under {policy}.")
    elif not made.takes_turns and asked not in ("auto", "none"):
        errors.print(f"Note: --correct has no effect, since {policy} does not know in advance how stale updates are.")
    note_effects(policy, made, workers, apply == "streamed")


def note_links(share: float) -> None:
    """Print a note if this machine cannot carry the links of a lab.

    share: of the links' rates, as a bare TCP stream reaches it. A healthy lab reaches more than 0.95.
    """
    if share < CARRIED:
        errors.print(
            f"Note: this machine carries only {share:.1%} of the links' rates, so these figures are not those of such "
            "a cluster. Describe slower links, or use a machine with more cores."
        )


def note_effects(spec: str, policy: Policy, workers: int, streamed: bool) -> None:
    """Print a note if a policy cannot be streamed, or cannot have as many groups as the user asked for."""
    if streamed and not (policy.streamable or policy.pipelined):
        errors.print(f"Note: {spec} cannot be streamed. Its updates are applied whole.")
    if policy.asked_groups and policy.asked_groups > workers:
        errors.print(
            f"Note: {spec} has more groups than workers ({workers}). Each worker takes its own turn, as without groups."
        )


def check_replicas(replicas: int, policy: str, apply: str, record: Path | None, link: str | None = None) -> None:
    """Refuse options that cannot be had with backups yet."""
    if not replicas:
        return
    made = make(policy)
    if _streams(made, apply):
        refuse("Streamed updates cannot be replicated yet; leave --replicas out, or apply updates whole.")
    for option, value in (("--record-updates", record), ("--link", link)):
        if value:
            refuse(f"{option} cannot be used with --replicas yet; leave one of them out.")


def names_of(hosts: str | None) -> list[str]:
    """Return the names of a list of hosts such as a,b,c."""
    return [name for name in (hosts or "").split(",") if name]


def check_server_hosts(hosts: list[str], servers: int | None, colocate: bool) -> None:
    """Refuse hosts of servers for a job whose shards run elsewhere, or that has none."""
    if hosts and colocate:
        refuse("--colocate puts the shards beside the workers; leave it or --server-hosts out.")
    if hosts and servers == 0:
        refuse("--servers 0 starts no shards; leave it or --server-hosts out.")


def check_shards_join(joins: bool, servers: int, colocate: bool, replicas: int) -> None:
    """Refuse options that contradict each other if a server does not start its shards."""
    if joins and colocate:
        refuse("--colocate puts the shards beside the workers; leave it or --shards-join out.")
    if joins and not servers:
        refuse("--servers 0 needs no shards; leave it or --shards-join out.")
    if replicas and (joins or colocate):
        option = "--colocate" if colocate else "--shards-join"
        refuse(f"--replicas with {option} needs `paceline run`, which starts the backups; leave one of them out.")


def check_max_norm(max_norm: float | None, policy: str, apply: str) -> None:
    """Refuse --max-norm if updates are never whole, or are not gradients."""
    if max_norm is None:
        return
    if math.isinf(max_norm):
        refuse("--max-norm must be a number from 1 up, such as 10.")
    made = make(policy)
    if _streams(made, apply):
        refuse("Streamed updates are applied before they are whole; leave --max-norm out, or apply updates whole.")
    if made.mixes:
        refuse(f"Workers push whole models under {policy}; leave --max-norm out, and use the policy's own filter.")


def check_updates(updates: str, policy: str, servers: int | None) -> None:
    """Refuse --updates if it names no codec, or if workers push no gradients."""
    if not updates:
        return
    try:
        codec(updates)
    except ValueError as error:
        refuse(f"--updates: {error}.")
    if make(policy).mixes:
        refuse(
            f"Workers push whole models under {policy}, and --updates is for gradients and differences; leave it out."
        )
    if servers == 0:
        refuse("--servers 0 starts no shards that receive updates; leave it or --updates out.")


def check_described_updates(described: ClusterSpec, policies: Sequence[str]) -> None:
    """Refuse a described cluster with small updates if workers push no gradients under one of the policies."""
    if described.updates and (mixing := [policy for policy in policies if make(policy).mixes]):
        refuse(f"Workers push whole models under {mixing[0]}; leave updates out of the cluster's file.")


def _streams(policy: Policy, apply: str) -> bool:
    return policy.pipelined or (apply == "streamed" and policy.streamable)


def correction(correct: str) -> CorrectionOption:
    """Return the correction that --correct names. Refuse any other name."""
    try:
        return checked(correct)
    except ValueError as error:
        refuse(f"--{error}.")


def check_reduce(text: str, ranks: int) -> None:
    """Refuse an all-reduce that does not fit the number of ranks, before anything is started."""
    from paceline.collectives.algorithms import AlgorithmError
    from paceline.collectives.named import named
    from paceline.collectives.topology import TopologyError

    if not text:
        return
    if ranks == 1:
        refuse("--reduce joins the ranks of one worker; give their number with --ranks-per-worker.")
    try:
        named(text).fits(ranks)
    except (AlgorithmError, TopologyError) as error:
        refuse(f"--reduce: {error}")


def note_tasks(workers: int, started: int | None) -> None:
    """Print a note if Slurm or torchrun starts another number of processes than the job begins with."""
    if started is None or started == workers:
        return
    if started < workers:
        effect = "it waits until others have joined too"
    else:
        effect = "the others join while it runs; give --workers to begin with all of them"
    errors.print(
        f"Note: the launcher starts {started} tasks, and the job begins with {workers} workers: {effect}.",
        highlight=False,
    )
