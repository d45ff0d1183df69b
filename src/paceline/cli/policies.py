"""`paceline rlp learn`: learn a network for the policy `rlp`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli.shared import check_target, errors, refuse
from paceline.cli.simulate import progress_bar

if TYPE_CHECKING:
    from paceline.rlp.learner import LearningProgress
    from paceline.workloads.data import Data

rlp = typer.Typer(help="The learned policy: learn a network of your own for it.", no_args_is_help=True)
INTERRUPTED = 130
BARS = "▁▂▃▄▅▆▇█"


@rlp.callback()
def about() -> None:
    """The learned policy: learn a network of your own for it."""


@rlp.command()
def learn(
    out: Annotated[Path, typer.Option(help="Where the network is written; beside it, a checkpoint.")] = Path(
        "rlp.safetensors"
    ),
    episodes: Annotated[int, typer.Option(min=1, help="Trainings to learn from, in all.")] = 20_000,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint beside --out.")] = False,
    size: Annotated[
        str, typer.Option(help="Of what is trained: tiny, small or whole (MNIST); bundled (digits).")
    ] = "tiny",
    data: Annotated[Path | None, typer.Option(help="The folder where MNIST lies; else $PACELINE_DATA.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    instances: Annotated[int, typer.Option(min=4, help="An iteration has so many, each played 16 times.")] = 128,
    workers: Annotated[str, typer.Option(help="Of an instance; several numbers, as in 4,10,16, take turns.")] = "10",
    budget: Annotated[int, typer.Option(min=10, help="Updates after which a training has failed.")] = 800,
    history: Annotated[int, typer.Option(min=1, help="H: updates that the network is shown.")] = 10,
    validated: Annotated[
        bool, typer.Option("--validated", help="Show it the loss of a validation batch, not the workers' own.")
    ] = False,
    scene: Annotated[
        bool, typer.Option(help="Show it more than the paper does: how unequal workers are, momentum and the like.")
    ] = True,
    pretrained: Annotated[bool, typer.Option(help="Play by fixed rules first.")] = True,
    ring: Annotated[bool, typer.Option("--ring", help="Let it also choose turns in a fixed order.")] = False,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper", help="Learn as the paper does: deep Q-learning over single actions. Cannot be resumed."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that play side by side.")] = min(os.cpu_count() or 1, 4),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Learn a network for the policy rlp on simulated clusters, with real gradients."""
    if importlib.util.find_spec("torch") is None:
        refuse("Learning needs PyTorch: pip install 'paceline[torch]'.")
    from paceline.rlp import learner_file
    from paceline.rlp.features import StateFeatures
    from paceline.rlp.instance import SIZES
    from paceline.rlp.learner import LearnerSettings
    from paceline.rlp.pretraining import learned
    from paceline.simulate.task import TrainingError, device_named
    from paceline.workloads.data import DataError, load

    if size not in SIZES:
        refuse(f"There is no size {size!r}; say {', '.join(SIZES)}.")
    if paper and resume:
        refuse("--paper keeps no checkpoint to resume from; leave out one of the two.")
    check_target(out, "--out")
    kept = out.with_name(out.name + ".checkpoint")
    settings = LearnerSettings(
        seed,
        StateFeatures(history, scene, validated),
        ring=ring,
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

            def told(newest: LearningProgress) -> None:
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
                told,
                lambda done, of: bar.update(task, completed=done / of),
            )
    except (DataError, TrainingError, learner_file.LearnerFileError) as error:
        refuse(f"{error}" if str(error).endswith(".") else f"{error}.")
    except KeyboardInterrupt:
        said = (
            f"what {log[-1].episodes:,} episodes taught is in {kept}: go on with --resume" if log else "nothing is kept"
        )
        errors.print(Text(f"Interrupted; {said}."))
        sys.exit(INTERRUPTED)
    learner_file.export(learner, whole, out)
    _show(whole)
    errors.print(Text(f"Written: {out}. Use it with --policy rlp:network={out}"))


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        refuse(f"--workers: {text!r} is not numbers from 1 on, with commas between.")
    return tuple(int(part) for part in parts)


def _as_in_the_paper(
    data: Data, out: Path, episodes: int, seed: int, size: str, budget: int, pretrained: bool, ring: bool
) -> None:
    from paceline.rlp import dqn
    from paceline.rlp.network_file import save
    from paceline.rlp.rule_network import weights_of

    settings = dqn.DqnSettings(seed, ring=ring, size=size, budget=budget, pretraining=100 if pretrained else 0)
    learner = dqn.DqnLearner(settings, data)
    if pretrained:
        errors.print("Playing by fixed policies, to begin with ...")
        learner.pretrain()
    try:
        learner.learn(
            episodes,
            lambda done, seconds: errors.print(f"{done:>9,} episodes; the newest took {seconds:.0f} mean steps"),
        )
    except KeyboardInterrupt:  # hours may have gone into it
        errors.print(f"Interrupted after {learner.episodes:,} episodes.")
    save(weights_of(learner.network, settings.state, settings.rules), out, {"episodes": str(learner.episodes)})
    errors.print(Text(f"Written: {out}. Use it with --policy rlp:network={out}"))


def _line(newest: LearningProgress) -> str:
    fixed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in newest.fixed.items())
    return f"{newest.episodes:>9,} episodes: the network {newest.network:.2f}; {fixed}"


def _curve(log: list[LearningProgress]) -> str:
    """The network's times, one bar an iteration: lower is better."""
    times = [each.network for each in log[-40:]]
    low, high = min(times), max(times)
    return "".join(BARS[round((each - low) / (high - low or 1) * (len(BARS) - 1))] for each in times)


def _show(log: list[LearningProgress]) -> None:
    table = Table(
        box=None, title="Times beside the best of four fixed policies, by chance in part", title_justify="left"
    )
    for name in ("episodes", "network", *(log[-1].fixed if log else ())):
        table.add_column(name, justify="right")
    for each in log[-8:]:
        table.add_row(f"{each.episodes:,}", f"{each.network:.2f}", *(f"{ratio:.2f}" for ratio in each.fixed.values()))
    errors.print(table)
