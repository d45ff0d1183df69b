"""An optimizer whose step pushes the gradients to the server, waits for the Grant and pulls the new weights."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline.train.backend import AssignedSamples, Backend, ComputedGradient
from paceline.train.processes import JobProcess

UNDIVIDED = (
    "The batches of this loop do not come from session.loader or session.batches, so each worker trains on all the "
    "data that its script loads. Divide the data by session.rank and session.world_size, or use session.loader."
)
CHANGED_SETTINGS = (
    "The server has the settings that the optimizer had when the worker joined. Only learning rates follow the script, "
    "so these changes have no effect: {}. Create OneCycleLR with cycle_momentum=False to avoid them."
)


class PacedOptimizer(JobProcess, torch.optim.Optimizer):
    """A torch.optim optimizer that takes part in a job. Its parameter groups and hooks are those of the wrapped one.

    Learning rates, schedulers, hooks and gradient scalers therefore work as before, whether they use this optimizer or
    the wrapped one. In a job, the methods of the wrapped optimizer are replaced by those of this one, so a loop may
    call either. The optimizer's state, such as momentum, is on the server. Without a server, `step` is that of the
    wrapped optimizer.
    """

    def __init__(self, inner: torch.optim.Optimizer, backend: Backend) -> None:
        # super().__init__() is not called: it would create parameter groups and hooks of our own.
        self.inner = inner
        #: The number of samples in each gradient, for a loop that does not take its batches from a session. With None,
        #: all gradients count the same.
        self.batch_size: int | None = None
        #: The loss of the next gradient, for a loop that cannot pass it to `step`. A step clears it.
        self.loss: torch.Tensor | float | None = None
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
        self._last_state: dict[int, Any] | None = None  # of the server's optimizer, after the last step of the job
        self._settings: list[list[tuple[str, Any]]] | None = _fixed_settings(inner)  # None: a change was reported
        self._step_alone, self._zero_grad = inner.step, inner.zero_grad
        self._own_state_dict, self._load_own_state_dict = inner.state_dict, inner.load_state_dict
        backend.describe_gradients_with(self._describe)
        if not backend.alone:
            self._patch_inner()

    def _patch_inner(self) -> None:
        """Let the script's own optimizer take part in the job too: a script may use either object."""

        def step(*arguments: Any, **options: Any) -> Any:
            return self.step(*arguments, **options)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else a scheduler would wrap it once more
        inner: Any = self.inner
        inner.step, inner.zero_grad = step, self.zero_grad
        inner.state_dict, inner.load_state_dict = self.state_dict, self.load_state_dict
        inner.add_param_group = self.add_param_group
        if self._step_supports_amp_scaling:
            inner._step_supports_amp_scaling = True

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, for example while the object is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def granted_batch(self) -> int | None:
        """The number of samples that the policy wants in the next gradient; None: as many as the script likes.

        Batches of a session follow it. Another loop reads it after each step, and sets `batch_size` to the number of
        samples that it took. A policy with `tune_batches=true` gives faster workers larger batches in this way.
        """
        return self._backend.granted_batch

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
        """Return the state as torch does. In a job, the state is pulled from the server.

        After the job, the main worker has the state of the last step.
        """
        packed = self._own_state_dict()
        if self._steps_on_server:
            has_left = self.finished or self.closed
            state = self._last_state if has_left else self._backend.optimizer_state()
            if state is None:
                reason = "this worker has left the job" if has_left else "only rank 0 of a worker can get it"
                warnings.warn(
                    f"The optimizer's state, such as momentum, is on the server, and {reason}: state_dict() has only "
                    "the parameter groups. Save it in the main process (session.is_main).",
                    stacklevel=2,
                )
            packed["state"] = state or {}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does. In a job, the main worker sends it to the server before the next step."""
        self._load_own_state_dict(state_dict)
        if self._steps_on_server and state_dict["state"]:
            self._backend.load_optimizer_state()

    @property
    def _steps_on_server(self) -> bool:
        """Whether the server makes the steps, and has the optimizer's state."""
        return not self._backend.steps_here

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
        self._zero_grad(set_to_none)
        self._gradients_before = self._gradient_versions()

    def trains_on(self, samples: AssignedSamples) -> None:
        """Count these samples as part of the next gradient."""
        if self._backend.alone:
            self.samples_taken += samples.size
            return
        if self._samples and self._samples[-1].joins < samples.joins:
            # The worker was given up in between. Other workers now train on the samples of the gradient so far.
            self._samples, self._dropped = [], []
            self._zero_grad()
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
            return self._step_alone() if closure is None else self._step_alone(closure)
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
        loss, self.loss = self.loss if loss is None else loss, None
        # A GradScaler sets these on the object that it was given, this one or the wrapped one.
        scaled: dict[str, Any] = {**self.inner.__dict__, **self.__dict__}
        scale, overflowed = scaled.get("grad_scale"), scaled.get("found_inf")
        computed = replace(
            self._describe(batch_size),
            loss=float(loss.detach()) if isinstance(loss, torch.Tensor) else loss,
            scale=1.0 if scale is None else float(scale),
            overflowed=overflowed is not None and bool(overflowed),
        )
        self._check_loop(batch_size)
        self._last_batch_size = computed.batch_size
        self._samples, self._dropped = [], []
        if self._backend.mixes:
            self._step_alone()
        if not self._backend.exchange(computed):
            self._dropped = list(computed.taken)
        return result

    def _check_loop(self, batch_size: int | None) -> None:
        """Warn of two likely mistakes, each once: data that nobody divides, and settings that change in vain."""
        backend = self._backend
        if not (self._samples or batch_size or self.batch_size or backend.knows_its_part):
            backend.knows_its_part = True
            if backend.workers * backend.ranks > 1 and backend.worker == backend.rank == 0:
                warnings.warn(UNDIVIDED, stacklevel=_level_of_script())
        if (
            self._settings is not None
            and self._steps_on_server
            and (settings := _fixed_settings(self)) != self._settings
        ):
            pairs = (zip(ours, theirs, strict=True) for ours, theirs in zip(settings, self._settings, strict=True))
            changed = sorted({now[0] for pair in pairs for now, before in pair if now != before})
            self._settings = None
            warnings.warn(CHANGED_SETTINGS.format(", ".join(changed)), stacklevel=_level_of_script())

    def _describe(self, batch_size: int | None = None) -> ComputedGradient:
        """Return what is known of a gradient before it is complete: all but its loss and whether it overflowed."""
        if batch_size is None:
            counted = sum(samples.size for samples in self._samples)
            batch_size = counted if self._samples else self.batch_size or self._last_batch_size
        return ComputedGradient(
            batch_size=batch_size,
            rates=[float(group["lr"]) for group in self.param_groups],
            taken=[n for n in (*self._dropped, *(samples.number for samples in self._samples)) if n],
        )

    def finish(self) -> None:
        """End training: wait until the other workers are done too, and pull the final model."""
        if not self.finished and not self.closed:
            self.finished = True
            self._backend.finish()
            if self._steps_on_server and self._backend.worker == self._backend.rank == 0:
                with contextlib.suppress(ConnectionError):  # the server may be gone, and the model is what matters
                    self._last_state = self._backend.optimizer_state()

    def close(self) -> None:
        """Leave the job. A script that ends leaves it automatically."""
        if not self.closed:
            self.closed = True
            self._backend.close()

    def _gradient_versions(self) -> list[tuple[int, int]]:
        """Return the identity and the version of every gradient. The result changes with each backward()."""
        found = (parameter.grad for group in self.param_groups for parameter in group["params"])
        return [(id(gradient), gradient._version) for gradient in found if gradient is not None]


def _level_of_script() -> int:
    """Return the `stacklevel` with which a warning of the calling function names the script's own line.

    A step may come through the session, a scaler or a library, so the number of frames in between is not known.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("paceline", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _fixed_settings(optimizer: torch.optim.Optimizer) -> list[list[tuple[str, Any]]]:
    """Return the settings of each parameter group, without the learning rate and what schedulers add."""
    kept = [name for name in optimizer.defaults if name != "lr"]
    return [[(name, group.get(name)) for name in kept] for group in optimizer.param_groups]
