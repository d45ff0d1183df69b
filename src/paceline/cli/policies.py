"""`paceline policies` and `paceline clusters`: list what comes with paceline, and learn a network for `rlp`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.options import DataFolder, Device, Seed
from paceline.cli.shared import INTERRUPTED, check_target, errors, need_torch, progress_bar, refuse, sentence
from paceline.policies import names, policy_class, policy_options
from paceline.policies.options import shown
from paceline.simulate import builtin_names
from paceline.simulate.cluster_reader import describe

if TYPE_CHECKING:
    from paceline.rlp.learner import LearningProgress
    from paceline.workloads.data import Data

BARS = "▁▂▃▄▅▆▇█"

policies = typer.Typer()


@policies.callback(invoke_without_command=True)
def list_policies(context: typer.Context) -> None:
    """List the synchronization policies and their options."""
    if context.invoked_subcommand:
        return
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in names():
        table.add_row(Text(name, style="bold"), policy_class(name).summary)
        for option in policy_options(name).values():
            table.add_row("", Text(f"{option.name}={shown(option.default)}: {option.help}", style="dim"))
    console.print(table)
    console.print("\nWrite options after a colon: ssp:staleness=5. Your own policy: module:Class.")


def clusters() -> None:
    """List the simulated clusters that come with paceline."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in builtin_names():
        table.add_row(Text(name, style="bold"), describe(name))
    Console(highlight=False).print(table)


@policies.command()
def learn(
    out: Annotated[Path, typer.Option(help="Write the network to this file, and a checkpoint beside it.")] = Path(
        "rlp.safetensors"
    ),
    episodes: Annotated[int, typer.Option(min=1, help="The number of episodes to learn from.")] = 20_000,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint beside --out.")] = False,
    size: Annotated[
        str, typer.Option(help="The training problem: tiny, small or whole (MNIST), or bundled (digits).")
    ] = "tiny",
    data: DataFolder = None,
    seed: Seed = 0,
    instances: Annotated[int, typer.Option(min=4, help="Instances per iteration. Each is played 16 times.")] = 128,
    workers: Annotated[
        str, typer.Option(help="Workers of an instance. Several numbers, as in 4,10,16, alternate.")
    ] = "10",
    budget: Annotated[int, typer.Option(min=10, help="An episode fails after this many updates.")] = 800,
    history: Annotated[int, typer.Option(min=1, help="H, the number of past updates in the state.")] = 10,
    validated: Annotated[
        bool, typer.Option("--validated", help="Use the loss of a validation batch, not the workers' own.")
    ] = False,
    scene: Annotated[
        bool, typer.Option(help="Add features that the paper lacks: inequality of workers, momentum and others.")
    ] = True,
    links: Annotated[
        bool, typer.Option(help="Let the workers of some instances share a link, and add features of the network.")
    ] = True,
    pretrained: Annotated[bool, typer.Option(help="Play by fixed rules first.")] = True,
    ring: Annotated[bool, typer.Option("--ring", help="Also offer turns in a fixed order as an action.")] = False,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper", help="Learn as the paper does: deep Q-learning over single actions. Cannot be resumed."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="The number of processes that play episodes.")] = min(
        os.cpu_count() or 1, 4
    ),
    device: Device = "cpu",
) -> None:
    """Learn a network for the policy rlp on simulated clusters.

    Time is simulated, and gradients are real. Use the network with --policy rlp:network=FILE.
    """
    need_torch()
    from paceline.rlp import learner_file
    from paceline.rlp.features import StateFeatures
    from paceline.rlp.instance import SIZES
    from paceline.rlp.learner import LearnerSettings
    from paceline.rlp.pretraining import learned
    from paceline.simulate.task import TrainingError, device_named
    from paceline.workloads.data import load
    from paceline.workloads.errors import DataError

    if size not in SIZES:
        refuse(f"There is no size {size!r}; choose one of {', '.join(SIZES)}.")
    if paper and resume:
        refuse("--paper writes no checkpoint; leave out --paper or --resume.")
    check_target(out, "--out")
    kept = out.with_name(out.name + ".checkpoint")
    settings = LearnerSettings(
        seed,
        StateFeatures(history, scene, validated, links),
        ring=ring,
        links=links,
        instances=instances,
        budget=budget,
        pretrained=pretrained,
        size=size,
        workers=_counts(workers),
    )
    log: list[LearningProgress] = []
    try:
        device_named(device)
        table = load(str(SIZES[size].get("dataset", "mnist")), data)
        if paper:
            _as_in_the_paper(table, out, episodes, seed, size, budget, pretrained, ring)
            return
        with progress_bar(quiet=False) as bar:
            task = bar.add_task("playing", total=1.0)

            def report(newest: LearningProgress) -> None:
                log.append(newest)
                errors.print(Text(_line(newest)))
                bar.update(task, completed=0.0, description=f"playing; so far {_curve(log)}")

            learner, whole = learned(
                settings,
                table,
                episodes,
                kept,
                resume,
                device,
                jobs,
                report,
                lambda done, of: bar.update(task, completed=done / of),
            )
    except (DataError, TrainingError, learner_file.LearnerFileError) as error:
        refuse(sentence(error))
    except KeyboardInterrupt:
        said = f"{kept} holds {log[-1].episodes:,} episodes. Continue with --resume." if log else "Nothing was written."
        errors.print(Text(f"Interrupted. {said}"))
        sys.exit(INTERRUPTED)
    learner_file.export(learner, whole, out)
    _show(whole)
    errors.print(Text(f"Written: {out}. Use it with --policy rlp:network={out}"))


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        refuse(f"--workers must be numbers from 1, separated by commas; got {text!r}.")
    return tuple(int(part) for part in parts)


def _as_in_the_paper(
    data: Data, out: Path, episodes: int, seed: int, size: str, budget: int, pretrained: bool, ring: bool
) -> None:
    from paceline.rlp import dqn
    from paceline.rlp.network_file import save

    settings = dqn.DqnSettings(seed, ring=ring, size=size, budget=budget, pretraining=100 if pretrained else 0)
    learner = dqn.DqnLearner(settings, data)
    if pretrained:
        errors.print("Pre-training: episodes under fixed policies ...")
        learner.pretrain()
    try:
        learner.learn(
            episodes,
            lambda done, seconds: errors.print(f"{done:>9,} episodes; the newest took {seconds:.0f} mean steps"),
        )
    except KeyboardInterrupt:  # hours may have gone into it
        errors.print(f"Interrupted after {learner.episodes:,} episodes.")
    save(learner.weights(), out, {"episodes": str(learner.episodes)})
    errors.print(Text(f"Written: {out}. Use it with --policy rlp:network={out}"))


def _line(newest: LearningProgress) -> str:
    fixed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in newest.fixed.items())
    return f"{newest.episodes:>9,} episodes: the network {newest.network:.2f}; {fixed}"


def _curve(log: list[LearningProgress]) -> str:
    """The network's times as a row of bars, one per iteration. Lower is better."""
    times = [each.network for each in log[-40:]]
    low, high = min(times), max(times)
    return "".join(BARS[round((each - low) / (high - low or 1) * (len(BARS) - 1))] for each in times)


def _show(log: list[LearningProgress]) -> None:
    table = Table(box=None, title="Time relative to the best of four fixed policies (noisy)", title_justify="left")
    for name in ("episodes", "network", *(log[-1].fixed if log else ())):
        table.add_column(name, justify="right")
    for each in log[-8:]:
        table.add_row(f"{each.episodes:,}", f"{each.network:.2f}", *(f"{ratio:.2f}" for ratio in each.fixed.values()))
    errors.print(table)
