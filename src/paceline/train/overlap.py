"""Gradients that are pushed while the backward pass makes them, from the model's end to its beginning.

A hook at each parameter copies its gradient as soon as it is there, and a thread pushes what is complete. So there is
nothing left to be done to a gradient between `backward` and `step`: no clipping, no scaling, no adding up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from paceline.serve.worker.client import Client
from paceline.train.backend import ComputedGradient, JobBackend
from paceline.train.flat_model import FlatModel

ONCE = "With overlap=True a gradient is pushed while backward() makes it, so "
REMEDY = "; join with overlap=False if that cannot be."


class Abandoned(RuntimeError):
    """The gradient will never be whole."""


class BackwardPass:
    """One backward pass, as the thread sees it that pushes its gradient (`serve.exchange.Backward`)."""

    def __init__(self, flat: FlatModel, announced: ComputedGradient, since: float) -> None:
        self.announced = announced
        self._flat, self._since = flat, since
        self._state = threading.Condition()
        self._versions: dict[int, int] = {}  # of each gradient that is there: it changes whenever that is changed
        self._lowest = len(flat.parameters)  # from this parameter on, all are there
        self._outcome: tuple[float, float | None] | None = None
        self._abandoned = False
        flat.gather_statistics()

    def made(self, index: int) -> None:
        """A parameter's gradient is there."""
        if index in self._versions:
            raise ValueError(f"{ONCE}there is one backward() for each step(){REMEDY}")
        self._flat.gather_one(index)
        gradient = self._flat.parameters[index].grad
        assert gradient is not None
        with self._state:
            self._versions[index] = gradient._version
            while self._lowest and self._lowest - 1 in self._versions:
                self._lowest -= 1
            self._state.notify_all()

    def complete(self, computed: ComputedGradient) -> None:
        """The step is there: parameters that got no gradient get none any more."""
        if (computed.batch_size, computed.taken) != (self.announced.batch_size, self.announced.taken):
            raise ValueError(
                f"{ONCE}its batch size must be known by then: use session.batches or session.loader, or set "
                f"optimizer.batch_size; it was {self.announced.batch_size}, and step() says {computed.batch_size}."
            )
        for index, version in self._versions.items():
            gradient = self._flat.parameters[index].grad
            if gradient is None or gradient._version != version:
                raise ValueError(f"{ONCE}it cannot be clipped, scaled or cleared before step(){REMEDY}")
        for index in range(len(self._flat.parameters)):
            if index not in self._versions:
                self._flat.gather_one(index)
        with self._state:
            self._lowest = 0
            self._outcome = time.perf_counter() - self._since, computed.loss
            self._state.notify_all()

    def abandon(self) -> None:
        """No step will come."""
        with self._state:
            self._abandoned = True
            self._state.notify_all()

    def wait(self, start: int) -> None:
        self._wait_until(lambda: self._flat.layout.offsets[self._lowest] <= start)
        self._flat.wait_for_copies()

    def outcome(self) -> tuple[float, float | None]:
        self._wait_until(lambda: self._outcome is not None)
        assert self._outcome is not None
        return self._outcome

    def _wait_until(self, true: Callable[[], bool]) -> None:
        with self._state:
            self._state.wait_for(lambda: self._abandoned or true())
            if self._abandoned:
                raise Abandoned("This backward pass came to no end.")


class OverlappedBackend(JobBackend):
    """One worker of a job, of one process, whose gradients are pushed as they come."""

    def __init__(self, client: Client, flat: FlatModel) -> None:
        super().__init__(client, flat)
        self._pass: BackwardPass | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._computing: Callable[[], ComputedGradient] | None = None
        self._first = threading.Lock()  # gradients may come from a thread for each device
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._made, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(flat.parameters)
        ]

    def watch(self, computing: Callable[[], ComputedGradient]) -> None:
        self._computing = computing

    @property
    def pushing(self) -> bool:
        return self._pass is not None

    def exchange(self, computed: ComputedGradient) -> bool:
        if self._pass is None:  # gradients that no backward pass has made
            return super().exchange(computed)
        assert self._thread is not None
        self._pass.complete(computed)
        self._thread.join()
        self._pass = self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._take_over()
        return True

    def finish(self) -> None:
        if self._pass:
            raise ValueError(f"{ONCE}each backward() must be followed by a step(){REMEDY}")
        self._unhook()
        super().finish()

    def close(self) -> None:
        self._unhook()
        if self._pass:
            self._pass.abandon()
        super().close()
        if self._thread:
            self._thread.join()

    def _unhook(self) -> None:
        """No more steps will come, and the script may go on with the model by itself."""
        for hook in self._hooks:
            hook.remove()

    def _made(self, index: int, _: torch.Tensor) -> None:
        with self._first:
            if self._pass is None and self._computing:
                self._begin(self._computing())
        if self._pass:
            self._pass.made(index)

    def _begin(self, computed: ComputedGradient) -> None:
        backward = self._pass = BackwardPass(self._flat, computed, self._since)

        def push() -> None:
            try:
                self._exchange(computed, backward)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=push, daemon=True, name="paceline push")
        self._thread.start()
