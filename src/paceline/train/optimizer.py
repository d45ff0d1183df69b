"""An optimizer whose step is made by the server: push the gradients, wait for the Grant, pull the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline.train.backend import AssignedSamples, Backend, ComputedGradient


class PacedOptimizer(torch.optim.Optimizer):
    """A torch.optim optimizer that takes part in a job. Its groups, and all else that it has, are the wrapped one's.

    So learning rates, schedulers, hooks and gradient scalers work as before, whether they were given this one or the
    one inside. Its state (momentum and the like) is on the server. Without a server, `step` is the wrapped one's.
    """

    def __init__(self, inner: torch.optim.Optimizer, link: Backend) -> None:
        # Not torch's: that would make groups and hooks of our own.
        self.inner = inner
        #: Samples in each gradient, for a loop that does not get its batches from a session. None: all count alike.
        self.batch_size: int | None = None
        #: Has the worker left the job?
        self.over = False
        #: Has it no more steps to make?
        self.finished = False
        #: Samples that a session has given to the loop, where it trains alone.
        self.handed_out = 0
        self._link = link
        self._shares: list[AssignedSamples] = []  # trained on since the last step
        self._lost: list[int] = []  # numbers of those whose gradient was thrown away
        self._last = 1  # samples in the last gradient
        self._seen: list[tuple[int, int]] = []  # the gradients when the last share was begun with
        link.watch(self._computing)
        if not link.alone and inner.state:
            self._state_stays_behind()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is being copied, say
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def worker(self) -> int:
        """This worker's number; 0 when it trains alone."""
        return self._link.worker

    @property
    def pending(self) -> bool:
        """Are there batches that no step has been made of yet?"""
        return bool(self._shares)

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
        """Asked by GradScaler. Of several ranks it must not be one alone that skips a step: all do or none."""
        return self._link.ranks > 1

    def __repr__(self) -> str:
        return f"Paced({self.inner!r})"

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        if not self._link.alone and state_dict["state"]:
            self._state_stays_behind()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self._link.alone:
            raise ValueError(
                "The server knows the model as it was when the session began; add parameter groups before."
            )
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever. A gradient that is thrown away before a step (it overflowed, say) does not count in the next."""
        if self._link.pushing:
            raise ValueError(
                "With overlap=True a gradient is pushed while backward() makes it, so it cannot be thrown away: "
                "call step() first, or join with overlap=False."
            )
        if self._shares:
            # A batch is fetched before or after this call, but always before its own backward.
            unused = self._shares[-1:] if self._gradients() == self._seen else []
            self._lost += [share.number for share in self._shares[: len(self._shares) - len(unused)]]
            self._shares = unused
        self.inner.zero_grad(set_to_none)
        self._seen = self._gradients()

    def trains_on(self, share: AssignedSamples) -> None:
        """The next gradient is of these samples, too."""
        if self._link.alone:
            self.handed_out += share.size
            return
        if self._shares and self._shares[-1].joins < share.joins:
            # The worker was given up in between: what is in the gradient so far is of samples that others have now.
            self._shares, self._lost = [], []
            self.inner.zero_grad()
        self._shares.append(share)
        self._seen = self._gradients()

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: torch.Tensor | float | None = None,
        batch_size: int | None = None,
    ) -> Any:
        """Give the gradients that are in the model, and go on with the newest weights. Gradients stay as they are.

        loss: for the records, and for policies that look at it.
        batch_size: samples in the gradient, where neither a session's batches nor the attribute of this name say it.
        """
        if self._link.alone:
            return self.inner.step() if closure is None else self.inner.step(closure)
        if self.over or self.finished:
            raise ValueError("The session is over, so there is nobody to step with; step before it is closed.")
        self.inner._opt_called = True  # type: ignore[attr-defined]  # A scheduler of the inner one asks for it.
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
            self._computing(batch_size),
            loss=float(loss.detach()) if isinstance(loss, torch.Tensor) else loss,
            scale=1.0 if scale is None else float(scale),
            overflowed=overflowed is not None and bool(overflowed),
        )
        self._last = computed.batch_size
        self._shares, self._lost = [], []
        if self._link.mixes:
            self.inner.step()
        if not self._link.exchange(computed):
            self._lost = list(computed.taken)
        return result

    def _computing(self, batch_size: int | None = None) -> ComputedGradient:
        """What is known of a gradient while it is being computed."""
        counted = sum(share.size for share in self._shares) if self._shares else self.batch_size or self._last
        return ComputedGradient(
            batch_size=batch_size if batch_size is not None else counted,
            rates=[float(group["lr"]) for group in self.param_groups],
            taken=[*self._lost, *(share.number for share in self._shares)],
        )

    def finish(self) -> None:
        """No more steps: wait until the other workers are done too, and have the last model."""
        if not self.finished and not self.over:
            self.finished = True
            self._link.finish()

    def close(self) -> None:
        """Leave the job. It is left by itself when the script ends."""
        if not self.over:
            self.over = True
            self._link.close()

    def _gradients(self) -> list[tuple[int, int]]:
        """Which gradients there are, and how often each was changed: it is different after a backward."""
        found = (parameter.grad for group in self.param_groups for parameter in group["params"])
        return [(id(gradient), gradient._version) for gradient in found if gradient is not None]

    @staticmethod
    def _state_stays_behind() -> None:
        warnings.warn(
            "The optimizer's state (momentum and the like) is not sent: the server begins with none, or goes on from "
            "its own checkpoint.",
            stacklevel=4,
        )
