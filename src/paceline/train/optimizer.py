"""An optimizer whose step pushes the gradients to the server, waits for the Grant and pulls the new weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline.train.backend import AssignedSamples, Backend, ComputedGradient


class PacedOptimizer(torch.optim.Optimizer):
    """A torch.optim optimizer that takes part in a job. Its parameter groups and hooks are those of the wrapped one.

    Learning rates, schedulers, hooks and gradient scalers therefore work as before, whether they use this optimizer or
    the wrapped one. The optimizer's state, such as momentum, is on the server. Without a server, `step` is that of the
    wrapped optimizer.
    """

    def __init__(self, inner: torch.optim.Optimizer, backend: Backend) -> None:
        # super().__init__() is not called: it would create parameter groups and hooks of our own.
        self.inner = inner
        #: The number of samples in each gradient, for a loop that does not take its batches from a session. With None,
        #: all gradients count the same.
        self.batch_size: int | None = None
        #: Whether the worker has left the job.
        self.closed = False
        #: Whether `finish` was called, after which no step can follow.
        self.finished = False
        #: The number of samples that a session has handed to the training loop, if it trains alone.
        self.samples_taken = 0
        self._backend = backend
        self._samples: list[AssignedSamples] = []  # trained on since the last step
        self._dropped: list[int] = []  # numbers of assignments whose gradient was thrown away
        self._last_batch_size = 1
        self._gradients_before: list[tuple[int, int]] = []  # state of the gradients when the last batch was fetched
        backend.describe_gradients_with(self._describe)
        if not backend.alone and inner.state:
            self._warn_of_lost_state()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, for example while the object is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def worker(self) -> int:
        """The number of this worker; 0 when it trains alone."""
        return self._backend.worker

    @property
    def pending(self) -> bool:
        """Whether there are batches whose gradients no step has pushed yet."""
        return bool(self._samples)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves the handling of overflows to `step`.

        With several ranks, GradScaler must not skip a step in one rank alone: all ranks skip it, or none.
        """
        return self._backend.ranks > 1

    def __repr__(self) -> str:
        return f"PacedOptimizer({self.inner!r})"

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        if not self._backend.alone and state_dict["state"]:
            self._warn_of_lost_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self._backend.alone:
            raise ValueError(
                "The server already has the parameter groups; add parameter groups before you call paceline.join."
            )
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. A gradient that no step has pushed (it overflowed, say) does not count in the next."""
        if self._backend.is_pushing:
            raise ValueError(
                "With overlap=True a gradient is pushed while backward() computes it, so it cannot be discarded: "
                "call step() first, or join with overlap=False."
            )
        if self._samples:
            # A loop may fetch its batch before or after this call, but always before its own backward(). If no gradient
            # has changed since the last batch was fetched, that batch is still to be used.
            unused = self._samples[-1:] if self._gradient_versions() == self._gradients_before else []
            self._dropped += [samples.number for samples in self._samples[: len(self._samples) - len(unused)]]
            self._samples = unused
        self.inner.zero_grad(set_to_none)
        self._gradients_before = self._gradient_versions()

    def trains_on(self, samples: AssignedSamples) -> None:
        """Count these samples as part of the next gradient."""
        if self._backend.alone:
            self.samples_taken += samples.size
            return
        if self._samples and self._samples[-1].joins < samples.joins:
            # The worker was given up in between. Other workers now train on the samples of the gradient so far.
            self._samples, self._dropped = [], []
            self.inner.zero_grad()
        self._samples.append(samples)
        self._gradients_before = self._gradient_versions()

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: torch.Tensor | float | None = None,
        batch_size: int | None = None,
    ) -> Any:
        """Push the model's gradients and pull the newest weights into the model. The gradients are not cleared.

        loss: recorded, and sent to policies that use it.
        batch_size: the number of samples in the gradient. It is needed if the batches do not come from a session and
            the attribute `batch_size` is not set.
        """
        if self._backend.alone:
            return self.inner.step() if closure is None else self.inner.step(closure)
        if self.closed or self.finished:
            raise ValueError("The session is over; call step() before session.finish() and session.close().")
        # A scheduler that was created from the wrapped optimizer checks this attribute.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        return self._push(closure, loss, batch_size)

    @torch.optim.Optimizer.profile_hook_step
    def _push(
        self, closure: Callable[[], Any] | None, loss: torch.Tensor | float | None, batch_size: int | None
    ) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            loss = result if loss is None else loss
        scale, overflowed = self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")
        computed = replace(
            self._describe(batch_size),
            loss=float(loss.detach()) if isinstance(loss, torch.Tensor) else loss,
            scale=1.0 if scale is None else float(scale),
            overflowed=overflowed is not None and bool(overflowed),
        )
        self._last_batch_size = computed.batch_size
        self._samples, self._dropped = [], []
        if self._backend.mixes:
            self.inner.step()
        if not self._backend.exchange(computed):
            self._dropped = list(computed.taken)
        return result

    def _describe(self, batch_size: int | None = None) -> ComputedGradient:
        """Return what is known of a gradient before it is complete: all but its loss and whether it overflowed."""
        if batch_size is None:
            counted = sum(samples.size for samples in self._samples)
            batch_size = counted if self._samples else self.batch_size or self._last_batch_size
        return ComputedGradient(
            batch_size=batch_size,
            rates=[float(group["lr"]) for group in self.param_groups],
            taken=[*self._dropped, *(samples.number for samples in self._samples)],
        )

    def finish(self) -> None:
        """End training: wait until the other workers are done too, and pull the final model."""
        if not self.finished and not self.closed:
            self.finished = True
            self._backend.finish()

    def close(self) -> None:
        """Leave the job. A script that ends leaves it automatically."""
        if not self.closed:
            self.closed = True
            self._backend.close()

    def _gradient_versions(self) -> list[tuple[int, int]]:
        """Return the identity and the version of every gradient. The result changes with each backward()."""
        found = (parameter.grad for group in self.param_groups for parameter in group["params"])
        return [(id(gradient), gradient._version) for gradient in found if gradient is not None]

    @staticmethod
    def _warn_of_lost_state() -> None:
        warnings.warn(
            "The optimizer's state, such as momentum, is not sent: the server starts without state, or with that of "
            "its own checkpoint.",
            stacklevel=4,
        )
