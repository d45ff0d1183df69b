"""Push gradients while the backward pass computes them, from the model's last parameter to its first.

A hook at each parameter copies its gradient as soon as it is computed, and a thread pushes the pieces that are
complete. The script therefore cannot change a gradient between `backward` and `step`: no clipping, scaling or
accumulating.
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
from paceline.train.loading import Loading

#: Both ends of an error about a loop that overlap=True does not allow.
BECAUSE = "With overlap=True a gradient is pushed while backward() computes it, so "
REMEDY = "; otherwise join with overlap=False."


class Abandoned(RuntimeError):
    """The backward pass will not be completed."""


class BackwardPass:
    """One backward pass, for the thread that pushes its gradient.

    It implements `paceline.serve.worker.gradient.Backward`.
    """

    def __init__(self, flat: FlatModel, announced: ComputedGradient, pulled_at: float) -> None:
        self.announced = announced
        self._flat, self._pulled_at = flat, pulled_at
        self._state = threading.Condition()
        self._versions: dict[int, int] = {}  # torch's version of each computed gradient, to detect later changes
        self._lowest = len(flat.parameters)  # the gradients of this parameter and all after it are computed
        self._outcome: tuple[float, float | None] | None = None
        self._abandoned = False
        flat.gather_statistics()

    def gradient_computed(self, index: int) -> None:
        """Note that the gradient of this parameter is computed."""
        if index in self._versions:
            raise ValueError(f"{BECAUSE}there must be one backward() for each step(){REMEDY}")
        self._flat.gather_one(index)
        gradient = self._flat.parameters[index].grad
        assert gradient is not None
        with self._state:
            self._versions[index] = gradient._version
            while self._lowest and self._lowest - 1 in self._versions:
                self._lowest -= 1
            self._state.notify_all()

    def complete(self, computed: ComputedGradient) -> None:
        """Note that step() was called: parameters that have no gradient by now count as zero."""
        if (computed.batch_size, computed.taken) != (self.announced.batch_size, self.announced.taken):
            raise ValueError(
                f"{BECAUSE}its batch size must be known before: use session.batches or session.loader, or set "
                f"optimizer.batch_size; it was {self.announced.batch_size}, and step() got {computed.batch_size}."
            )
        for index, version in self._versions.items():
            gradient = self._flat.parameters[index].grad
            if gradient is None or gradient._version != version:
                raise ValueError(f"{BECAUSE}it must not be clipped, scaled or cleared before step(){REMEDY}")
        for index in range(len(self._flat.parameters)):
            if index not in self._versions:
                self._flat.gather_one(index)
        with self._state:
            self._lowest = 0
            self._outcome = time.perf_counter() - self._pulled_at, computed.loss
            self._state.notify_all()

    def abandon(self) -> None:
        """Wake the pushing thread with an error: no step() will follow."""
        with self._state:
            self._abandoned = True
            self._state.notify_all()

    def wait(self, start: int) -> None:
        """Wait until all gradients from this element of the flat model on are computed and copied."""
        self._wait_until(lambda: self._flat.layout.offsets[self._lowest] <= start)
        self._flat.wait_for_copies()

    def outcome(self) -> tuple[float, float | None]:
        """Wait for step(), and return the seconds spent computing and the loss."""
        self._wait_until(lambda: self._outcome is not None)
        assert self._outcome is not None
        return self._outcome

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._state:
            self._state.wait_for(lambda: self._abandoned or condition())
            if self._abandoned:
                raise Abandoned("The session was closed before step() followed this backward().")


class OverlappedBackend(JobBackend):
    """A worker of one process that pushes each gradient while the backward pass computes it."""

    def __init__(self, client: Client, flat: FlatModel, loading: Loading) -> None:
        super().__init__(client, flat, loading)
        self._pass: BackwardPass | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._describe: Callable[[], ComputedGradient] | None = None
        self._is_withheld = False  # is this gradient pushed in `step`, because other weights were loaded before it?
        self._starting = threading.Lock()  # autograd runs one thread per device, and each may be the first
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_computed, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(flat.parameters)
        ]

    def describe_gradients_with(self, describe: Callable[[], ComputedGradient]) -> None:
        self._describe = describe

    @property
    def is_pushing(self) -> bool:
        return self._pass is not None

    def exchange(self, computed: ComputedGradient) -> bool:
        if self._pass is None:  # it is withheld, or the script set the gradients itself, without a backward pass
            self._is_withheld = False
            return super().exchange(computed)
        assert self._thread is not None
        self._pass.complete(computed)
        self._thread.join()
        self._pass = self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._use_pulled_weights()
        return True

    def finish(self) -> None:
        if self._pass:
            raise ValueError(f"{BECAUSE}each backward() must be followed by a step(){REMEDY}")
        self._remove_hooks()
        super().finish()

    def close(self) -> None:
        self._remove_hooks()
        if self._pass:
            self._pass.abandon()
        super().close()
        if self._thread:
            self._thread.join()

    def _remove_hooks(self) -> None:
        """Remove the hooks: no more steps follow, and the script may use the model for something else."""
        for hook in self._hooks:
            hook.remove()

    def _gradient_computed(self, index: int, _: torch.Tensor) -> None:
        with self._starting:
            if self._pass is None and self._describe and not self._is_withheld:
                self._is_withheld = self._loading.found_early()
                if not self._is_withheld:
                    self._start_pushing(self._describe())
        if self._pass:
            self._pass.gradient_computed(index)

    def _start_pushing(self, computed: ComputedGradient) -> None:
        backward = self._pass = BackwardPass(self._flat, computed, self._pulled_at)

        def push() -> None:
            try:
                self._exchange(computed, backward)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=push, daemon=True, name="paceline push")
        self._thread.start()
