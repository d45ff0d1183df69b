"""Promises that a policy keeps under any history, and the tasks that they watch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.policies import Decision, Stream

if TYPE_CHECKING:
    from policies.any_driver import AnyDriver


@dataclass(eq=False)
class Task:
    """One Grant, and the iteration that follows it."""

    worker: int
    incarnation: int
    iteration: int
    base_version: int
    batch_size: int
    granted_at: float
    company: set[int]  # every worker that was a member since this one's model came, or began to come, back to it
    computed_at: float | None = None  # when the worker was ready to push
    turn: bool = False  # whether the worker may push
    held: bool = False  # whether all of its update is at the servers, which wait for others
    cancelled: bool = False
    departed: bool = False  # whether its worker left after the update had arrived
    passed_over: bool = False  # whether it lost its turn; then its update must be discarded
    gone: bool = False  # whether its worker left before the update had arrived
    stream: Stream | None = None  # the Stream that names its update
    notes: dict[str, Any] = field(default_factory=dict)  # for use by promises


class Promise:
    """A promise that a policy keeps under any history. Each method checks it at one kind of moment."""

    def starts(self, driver: AnyDriver) -> None: ...
    def before(self, driver: AnyDriver) -> None: ...
    def granted(self, driver: AnyDriver, task: Task) -> None: ...
    def streamed(self, driver: AnyDriver, tasks: list[Task]) -> None: ...
    def cancelled(self, driver: AnyDriver, task: Task) -> None: ...
    def applied(self, driver: AnyDriver, tasks: list[Task]) -> None: ...
    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None: ...
