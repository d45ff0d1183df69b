"""One training under each policy on table 1's workers: iterations and idle time (table 1), and a timeline (fig. 4)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

from paceline.model.optimizer_spec import OptimizerSpec
from paceline.observe.observer import Observer
from paceline.policies import Policy, Update, make
from paceline.policies.contract import Decisions
from paceline.reproduce.rlp.clusters import STEPS, severe
from paceline.reproduce.rlp.evaluation import LETTER_SSP, NAMES, rlp_row
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row
from paceline.rlp.instance import Instance
from paceline.simulate.task import Goal, Task
from paceline.simulate.training import train
from paceline.workloads.data import Data, load

#: Iterations of each worker, their sum, idle time and inference time in per cent. The paper does not name the threshold
#: of its SSP. Its slowest worker is 7 iterations behind, and of the paper's s = 2, 5 and 8 only the last allows that.
TABLE_1: dict[str, tuple[tuple[int, ...], int, float, float]] = {
    "bsp": ((28,) * 10, 279, 54.24, 0.0),
    "asp": ((52, 47, 100, 93, 87, 31, 21, 91, 70, 67), 569, 0.0, 0.0),
    LETTER_SSP[-1]: ((26, 26, 26, 26, 26, 25, 19, 26, 26, 26), 252, 43.5, 0.0),
    "rlp": ((34, 28, 53, 51, 51, 19, 14, 54, 38, 38), 380, 8.1, 1.4),
}
WORKERS = len(STEPS)
SHOWN = 120  # seconds of the timeline that are drawn


def table1(request: Request) -> Figure:
    """Compare the iterations of each worker, idle time, and the cost of deciding."""
    data, missing = _any_data(request)
    rows: list[Row] = []
    for spec, (each, total, idle, inference) in TABLE_1.items():
        run = _trained(spec, data, request.quick)
        name = NAMES[spec]
        steps = [run.steps.get(worker, 0) for worker in range(WORKERS)]
        rows.append(rlp_row("table1", f"{name}: iterations", total, float(run.updates), "", request, run.note))
        rows.append(rlp_row("table1", f"{name}: idle time", idle, 100 * run.idle, "%", request))
        what = f"{name}: iterations of each worker"
        rows.append(rlp_row("table1", what, _listed(each), _listed(steps), "", request))
        rows.append(rlp_row("table1", f"{name}: inference time", inference, 100 * run.deciding, "%", request))
    return Figure("table1", "Iterations and idle time under each policy", tuple(rows), missing=missing)


def fig4(request: Request) -> Figure:
    """Show when each worker computes."""
    data, missing = _any_data(request)
    plots, rows = [], []
    for spec in TABLE_1:
        run = _trained(spec, data, request.quick)
        shown = [span for span in run.spans if span[1] < SHOWN]
        lines = tuple(
            PlotLine(
                f"W{worker + 1}",
                tuple(edge for who, began, ended in shown if who == worker for edge in (began, ended)),
                tuple(float(worker + 1) for who, *_ in shown if who == worker for _ in range(2)),
            )
            for worker in range(WORKERS)
        )
        plots.append(Plot(f"{NAMES[spec]}: when each worker computes", "time", "worker", lines, "spans"))
        rows.append(rlp_row("fig4", f"{NAMES[spec]}: time to {run.goal}", None, run.seconds, "", request, run.note))
    return Figure("fig4", "The execution of each policy", tuple(rows), tuple(plots), missing)


class _WatchedTraining(Observer):
    """Records when the workers of one training compute."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, float, float]] = []  # worker, begin and end of an iteration
        self.steps: dict[int, int] = {}  # iterations by worker
        self.updates, self.seconds, self.deciding = 0, 0.0, 0.0
        self.note = self.goal = ""
        self._since: dict[int, float] = {}

    def pulled(self, time: float, worker: int, version: int) -> None:
        self._since[worker] = time

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        self.spans.append((worker, self._since.pop(worker), time))
        self.steps[worker] = self.steps.get(worker, 0) + 1
        self.updates, self.seconds = self.updates + 1, time

    @property
    def idle(self) -> float:
        """The share of the workers' time in which they did not compute. Unfinished iterations count as computing."""
        busy = sum(ended - began for _, began, ended in self.spans)
        busy += sum(self.seconds - began for began in self._since.values())
        return 1 - busy / (WORKERS * self.seconds)


def _time_decisions(policy: Policy) -> list[float]:
    """Make the policy measure its decisions. Return the list to which it appends their seconds."""
    spent: list[float] = []
    decide = policy.arrived

    def arrived(update: Update, now: float) -> Decisions:
        began = time.perf_counter()
        decisions = decide(update, now)
        spent.append(time.perf_counter() - began)
        return decisions

    policy.arrived = arrived  # type: ignore[method-assign]
    return spent


@cache
def _trained(spec: str, data: Data, quick: bool) -> _WatchedTraining:
    """Train on table 1's workers until the target accuracy."""
    _, sleeps = severe("table 1")
    instance = Instance(1, tuple(0.75 * step for step in STEPS), tuple((p, 5 * mu, 5 * d) for p, mu, d in sleeps), 1)
    watch, policy = _WatchedTraining(), make(spec)
    spent = _time_decisions(policy)
    goal = Goal("accuracy", 0.88, every=1)
    task = Task("dnn1", data, OptimizerSpec("SGD", ({"lr": instance.rate},)), 1)
    began = time.perf_counter()
    outcome = train(instance.cluster(), policy, task, goal, rounds=20 if quick else 150, observer=watch)
    watch.deciding = sum(spent) / (time.perf_counter() - began) if spec == "rlp" else 0.0
    watch.goal = f"accuracy {goal.value:g}"
    watch.note = f"On {data.name}."
    if not outcome.reached:
        watch.note += f" Not reached; the best accuracy was {outcome.best or 0:.2f}."
    return watch


def _any_data(request: Request) -> tuple[Data, tuple[str, ...]]:
    """Return MNIST, or the bundled digits and a sentence that says so."""
    if request.lacks("mnist"):
        return load("digits"), ("MNIST was not found. The bundled digits were used instead.",)
    return load("mnist", request.folder), ()


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{each:g}" for each in values)
