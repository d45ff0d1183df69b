"""A worker that makes several steps of its own between two exchanges (local SGD, DiLoCo).

After every `local_steps` steps it pushes how far they have moved the model. The server averages these differences, or
steps an outer optimizer by them. Under BSP this is local SGD. Under R²SP the workers exchange in turns, so a thin link
carries one model at a time. A worker that is lost loses its steps since its last exchange, and the job hands out their
samples again. It also loses what it has not sent yet, if updates have one part of the model at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.model.optimizer_spec import SUMS, OptimizerSpec
from paceline.model.optimizer_text import parse
from paceline.serve.worker.client import Client
from paceline.train.backend import AssignedSamples, ComputedGradient, JobBackend, SampleSource, exchange
from paceline.train.flat_model import FlatModel
from paceline.train.loading import Loading
from paceline.train.start_ahead import StartAhead
from paceline.train.start_unsent import StartWithUnsent


@dataclass(frozen=True)
class LocalRounds:
    """How often a worker exchanges, and the server's optimizer."""

    steps: int  # H: of the worker's own optimizer, between two exchanges
    outer: OptimizerSpec
    ahead: bool = False  # whether a round begins ahead of the pulled model (`start_ahead`)

    def optimizer_on_server(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer with the server's settings, for the parameters of the worker's own. It is never stepped.

        It has one group of parameters, however many the worker's own has: their settings are the worker's business.
        """
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        (settings,) = self.outer.settings_of_groups
        made: torch.optim.Optimizer = getattr(torch.optim, self.outer.name)(parameters, **settings)
        return made


def local_rounds(local_steps: int | None, outer: str | None, ahead: bool = False) -> LocalRounds | None:
    """Return what these arguments of `join` ask for, or None without local steps.

    Raise ValueError with one sentence if they do not fit together.
    """
    if local_steps is None:
        if outer is not None:
            raise ValueError("outer= is the server's optimizer for local steps; pass local_steps= with it.")
        if ahead:
            raise ValueError("ahead=True is about rounds of local steps; pass local_steps= with it.")
        return None
    if isinstance(local_steps, bool) or not isinstance(local_steps, int) or local_steps < 1:
        raise ValueError(f"local_steps must be a whole number of at least 1; got {local_steps!r:.80}.")
    return LocalRounds(local_steps, SUMS if outer is None else parse(outer), ahead)


class LocalStepsBackend(JobBackend):
    """A worker of a job that steps its own optimizer, and exchanges once a round of local steps."""

    def __init__(
        self, client: Client, flat: FlatModel, loading: Loading, local: LocalRounds, step: Callable[[], Any]
    ) -> None:
        """flat: a model whose parameters are apart from the pulled weights. step: that of the worker's optimizer."""
        self._local, self._step = local, step
        self._made: list[ComputedGradient] = []  # steps since the last pull
        self._last: ComputedGradient | None = None  # the last round
        self._start: StartAhead | StartWithUnsent | None = None
        if client.sends_parts:
            try:
                _check_parts(local)
            except ValueError:
                client.close()
                raise
        client.keeps_unsent = True
        super().__init__(client, flat, loading)
        if client.sends_parts:
            self._start = StartWithUnsent(flat, lambda: client.unsent)
        elif local.ahead and not client.mixes:
            self._start = StartAhead(flat)

    @property
    def mixes(self) -> bool:
        return False  # whether the server mixes models or adds differences, `exchange` makes the steps

    @property
    def steps_here(self) -> bool:
        return True

    @property
    def granted_batch(self) -> int | None:
        """The number of samples that the policy wants in the next step: a part of those in the next exchange.

        The first steps of a round have one more if that is needed for the exact sum.
        """
        granted = self._granted_round()
        if granted is None:
            return None
        each, more = divmod(granted, self._local.steps)
        return max(1, each + (len(self._made) < more))

    def _granted_round(self) -> int | None:
        """Return the number of samples that the policy wants in this round."""
        return self._client.granted.batch_size

    def _may_have_loaded(self) -> bool:
        return not self._made and super()._may_have_loaded()

    def sample_source(self) -> SampleSource:
        """Return a function that assigns samples. When they run out, the steps so far are pushed: a shorter round.

        So an update that is discarded is noticed while the training loop can still repeat its samples.
        """
        assign = super().sample_source()

        def take(batch_size: int, size: int, epochs: int, planned: int | None) -> AssignedSamples | None:
            samples = assign(batch_size, size, epochs, planned)
            if samples is None and self._made:
                self._push()
                samples = assign(batch_size, size, epochs, planned)
            return samples

        return take

    def exchange(self, computed: ComputedGradient) -> bool:
        """Make a step, and exchange if it is the last one of its round. Return False if the gradient is not used."""
        if computed.overflowed:
            return False
        if self._may_have_loaded() and self._loading.found() and (not self._offer_weights() or computed.taken):
            return False  # the gradient is of other weights
        self._step()
        self._made.append(computed)
        if len(self._made) == self._local.steps:
            self._end_round()
        else:
            self._after_step()
        return True

    def _end_round(self) -> None:
        """Exchange, because all steps of a round are made."""
        self._push()

    def _after_step(self) -> None:
        """Do what is due after a step that does not end a round."""

    def _push(self) -> None:
        """Push how far the steps of this round have moved the model, and pull."""
        self._exchange(self._gather_round())
        self._use_pulled_weights()

    def _gather_round(self) -> ComputedGradient:
        """Copy how far the steps of this round have moved the model to the buffer that is pushed, and describe it."""
        if self._client.mixes:
            self._flat.gather_weights()
        else:
            self._flat.gather_difference()
        if self._start:
            self._start.restore()
        rates = [float(group["lr"]) for group in self._local.outer.settings_of_groups]  # type: ignore[arg-type]
        self._last = replace(_together(self._made), rates=rates)
        return self._last

    def _use_pulled_weights(self, after_step: bool = True) -> None:
        self._made = []  # they were pushed, or they are lost
        if self._start and after_step and self.joins == self._client.joins:
            self._start.begin()
        elif self._start:
            self._start.begin_at_pulled()
        super()._use_pulled_weights(after_step)

    def finish(self) -> None:
        if self._made:
            self._push()
        if self._last and self._client.sends_parts:
            self._push_rest(self._last)
        elif self._start:
            self._start.restore()
        super().finish()

    def _push_rest(self, last: ComputedGradient) -> None:
        """Push what is not sent yet, all parts at once, as an update with the weight of the last one.

        It has no samples: the server has counted them with earlier updates.
        """
        self._flat.gather_difference()  # zero: the codec adds what is not sent
        if self._start:
            self._start.restore()
        rest = replace(last, loss=None, taken=())
        exchange(self._client, self._flat, rest, time.perf_counter(), whole=True)


def _check_parts(local: LocalRounds) -> None:
    """Raise ValueError with one sentence if these rounds need whole models."""
    ours = "--updates sends one part of the model at a time in this job"
    if local.ahead:
        raise ValueError(f"ahead=True needs whole models, and {ours}: leave one of them out.")
    (settings,) = local.outer.settings_of_groups
    if local.outer.name != "SGD" or settings.get("momentum") or settings.get("weight_decay"):
        raise ValueError(f"outer= must be SGD without momentum and weight decay, because {ours}; use outer='sgd:lr=1'.")


def _together(steps: Sequence[ComputedGradient]) -> ComputedGradient:
    """Return one description of several steps: all their samples, and the mean of their losses."""
    known = [(step.loss, step.batch_size) for step in steps if step.loss is not None]
    return ComputedGradient(
        batch_size=sum(step.batch_size for step in steps),
        rates=steps[-1].rates,
        loss=sum(loss * size for loss, size in known) / sum(size for _, size in known) if known else None,
        taken=[number for step in steps for number in step.taken],
    )
