"""A range of the model on a shard: a flat buffer of weights, and the optimizer that changes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.model.combination import Combiner, RunningSum, Term
from paceline.model.correction import Correction, drift, slowed
from paceline.model.layout import STATISTICS, Layout
from paceline.model.optimizer import bare_step, make, trial
from paceline.model.optimizer_spec import OptimizerSpec, is_elementwise
from paceline.model.parts import SlicePart, check_origin, slice_parts
from paceline.model.similarity import Products, products
from paceline.model.sparse_mean import STATE, SparseMean

NEWEST = "newest"  # the name of the newest gradient in a checkpoint
NOT_OF_OPTIMIZER = (NEWEST, *STATE)  # tensors of a checkpoint that are neither the weights nor the optimizer's state
#: Of a gradient, positive or negative. Its square, which many optimizers sum up, stays far below float32's 3.4e38.
MAX_ELEMENT = 1e18
MAX_RATE = 1e6  # a larger learning rate is a mistake, and torch cannot compute with the largest numbers


class Slice:
    """The elements [start, stop) of the model's buffer, with their optimizer.

    A method that raises ValueError leaves the slice unchanged. A slice has no lock: use it from one thread at a time.
    """

    def __init__(
        self,
        layout: Layout,
        start: int,
        stop: int,
        spec: OptimizerSpec,
        device: str | torch.device = "cpu",
        sparse: bool = False,
    ) -> None:
        """sparse: updates have few elements each, and a step has the mean of those that have an element."""
        if not 0 <= start < stop <= layout.size:
            raise ValueError(f"a slice from {start} to {stop} is not part of a model of {layout.size} elements")
        if layout.groups > (groups := len(spec.settings_of_groups)):
            raise ValueError(f"the layout has {layout.groups} parameter groups; {spec.name} has settings for {groups}")
        if not is_elementwise(spec.name) and not {start, stop} <= set(layout.offsets):
            raise ValueError(f"{spec.name} needs whole tensors: its slices must begin and end where tensors do")
        self.layout, self.start, self.stop, self.spec = layout, start, stop, spec
        #: One contiguous float32 tensor, zeros at first. It is never reallocated, so views of it stay valid.
        self.weights = torch.zeros(stop - start, dtype=torch.float32, device=device)
        parts = slice_parts(layout, start, stop, whole=not is_elementwise(spec.name))
        self._parts = [part for part in parts if part.group != STATISTICS]
        self._statistics = [self._part(self.weights, part) for part in parts if part.group == STATISTICS]
        self._statistics_parts = [part for part in parts if part.group == STATISTICS]
        self._parameters = [self._part(self.weights, part) for part in self._parts]
        of_groups: list[list[torch.Tensor]] = [[] for _ in spec.settings_of_groups]
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            of_groups[part.group].append(parameter)
        self._optimizer = make(spec, of_groups)
        self._make_step = bare_step(type(self._optimizer))
        #: The settings of each group without any correction. torch's defaults fill what the specification leaves out.
        self._settings = [{**group, "params": ()} for group in self._optimizer.param_groups]
        self._sum: torch.Tensor | None = None
        self._newest: torch.Tensor | None = None  # the gradient of the last step, if predictions need it
        self._last: tuple[tuple[float, ...], int, float] | None = None  # the last arguments of `_pace`
        self._combiner = Combiner(spec.name)
        self._sparse_mean = SparseMean(self.weights) if sparse else None

    @property
    def trained_elements(self) -> int:
        """The number of elements before the running statistics, which lie at the end."""
        return min(self.stop, max(self.start, self.layout.trained_elements)) - self.start

    @property
    def buffer(self) -> memoryview:
        """The bytes of the weights, to send from and to receive into."""
        return self.weights.numpy().data.cast("B")

    def step(
        self,
        gradients: Sequence[torch.Tensor],
        weights: Sequence[float],
        rates: Sequence[float],
        correct: Correction = "none",
        turns: int = 1,
    ) -> None:
        """Make one optimizer step with gradients that have the same learning rates. `step_by` explains the rest."""
        self._must_fit(gradients, weights)
        terms = [Term.of(gradient, weight, rates) for gradient, weight in zip(gradients, weights, strict=True)]
        self.step_by(terms, correct, turns)

    def step_by(self, terms: Sequence[Term], correct: Correction = "none", turns: int = 1) -> None:
        """Make one optimizer step with these updates, each with its weight and its learning rate (`combination.py`).

        terms: their gradients are not changed, and not used after the step.
        correct: how staleness is corrected (`correction.py`).
        turns: the number of steps in a round.

        For running statistics, "gradients" hold the workers' own values, and the optimizer is not used. With
        W = Σ weight and c = min(1, W), a statistic becomes (1−c)·old + c·Σ (weight/W)·value. So a barrier gives the
        mean over its workers, however its weights are scaled, and an update that is applied alone counts with its own
        weight. Workers send values and not differences, because a mean of values lies within the values, however stale
        they are. Differences that are 16 versions stale make batch norm's statistics diverge.
        """
        self._must_fit([term.gradient for term in terms], [term.scale for term in terms])
        for term in terms:
            self._must_be_rates(term.rates)
        combined = self._combiner.of(terms)
        total = self._combined(terms, combined.scales)
        if self._sparse_mean:
            total = self._sparse_mean.of(total, terms)
        if correct != "full":
            self._newest = None  # an earlier gradient is no longer the newest
        elif total is self._sum:  # kept without a copy: the next sum gets the other buffer
            self._sum, self._newest = self._newest, total
        elif self._newest is None:
            self._newest = total.clone()
        else:
            self._newest.copy_(total)
        self._pace(combined.rates, turns if correct in ("round", "full") else 1, combined.decay)
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            parameter.grad = self._part(total, part)
        try:
            if self._parameters:
                with torch.no_grad():
                    self._make_step(self._optimizer)
        finally:
            for parameter in self._parameters:
                parameter.grad = None  # release the caller's buffer
        self._mix_statistics(terms)

    def _mix_statistics(self, terms: Sequence[Term]) -> None:
        weight = sum(term.share for term in terms) if self._statistics else 0.0
        if weight > 0:
            share = min(1.0, weight)
            for statistic, part in zip(self._statistics, self._statistics_parts, strict=True):
                statistic.mul_(1 - share)
                for term in terms:
                    statistic.add_(self._part(term.gradient, part), alpha=share * term.scale / weight)

    def add(self, term: Term, known: RunningSum | None) -> RunningSum:
        """Return the running sum with one more term; None begins a sum, which uses the term's buffer."""
        if known is None:
            return RunningSum.of(term, self._sparse_mean is not None)
        parts = (*self._parts, *self._statistics_parts)
        known.add(term, [(part.group, slice(part.start - self.start, part.stop - self.start)) for part in parts])
        return known

    def ahead(self, steps: int, correct: Correction, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a prediction of the weights after `steps` more steps. It is written to `out`, if given.

        The slice is not changed. So several threads may call this at the same time, but not during a step.
        """
        ahead = torch.empty_like(self.weights) if out is None else out
        if correct == "none" or steps <= 0:
            return ahead.copy_(self.weights)
        newest = self._newest if correct == "full" else None
        for statistic, part in zip(self._statistics, self._statistics_parts, strict=True):
            self._part(ahead, part).copy_(statistic)
        groups = self._optimizer.param_groups
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            gradient = None if newest is None else self._part(newest, part)
            state, place = self._optimizer.state.get(parameter, {}), self._part(ahead, part)
            if drift(self.spec.name, groups[part.group], state, parameter, gradient, steps, place):
                place.add_(parameter)
            else:
                place.copy_(parameter)
        return ahead

    def mix(self, models: Sequence[torch.Tensor], weights: Sequence[float], mix: float) -> None:
        """Set weights ← (1−mix)·weights + mix·Σ weight·model, also for statistics. The optimizer is not used."""
        self._must_fit(models, weights)
        if not math.isfinite(mix):
            raise ValueError(f"the share of the new models must be a finite number; got {mix}")
        self.weights.mul_(1 - mix)
        for model, weight in zip(models, weights, strict=True):
            self.weights.add_(model, alpha=mix * weight)

    def products(
        self, updates: Sequence[torch.Tensor], weights: Sequence[float], bases: Sequence[torch.Tensor] | None = None
    ) -> Products:
        """Return the dot products of updates, or of their differences to `bases`, over the parameters alone.

        Statistics are pushed as values, and would hide the rest: batch norm counts its batches in them.
        """
        total = Products.none(len(updates))
        for part in self._parts:
            theirs = [self._part(each, part).flatten() for each in updates]
            begun = None if bases is None else [self._part(each, part).flatten() for each in bases]
            total += products(theirs, weights, begun)
        return total

    def check(self, gradient: torch.Tensor) -> str | None:
        """Return one sentence if the gradient contains NaN, infinity or huge numbers, otherwise None."""
        # If the sum of the squares is small enough, so is each element. If it is not, check each of them. The sum comes
        # first because it is fast: for 25M elements on one thread it takes 5 ms, and isfinite takes 85.
        if is_bounded(torch.dot(gradient, gradient).item()):
            return None
        good = gradient.abs() <= MAX_ELEMENT
        if good.all():
            return None
        at = int(good.logical_not().to(torch.uint8).argmax())
        tensor, _, _ = next(self.layout.within(self.start + at, self.start + at + 1))
        advice = "lower the learning rate, clip the gradients, or check the data"
        if gradient[at].isfinite():
            return f"there are numbers above {MAX_ELEMENT:.0e} in the values for {tensor.name!r}; {advice}"
        return f"there is NaN or infinity in the values for {tensor.name!r}; {advice}"

    def squares(self, gradient: torch.Tensor) -> tuple[float, float]:
        """Return the sum of the squares of an update's gradients, and of its statistics."""
        return self._squares(gradient, self._parts), self._squares(gradient, self._statistics_parts)

    def _squares(self, gradient: torch.Tensor, parts: Sequence[SlicePart]) -> float:
        flat = (self._part(gradient, part).flatten() for part in parts)
        return sum(torch.dot(each, each).item() for each in flat)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return the whole state: tensors for safetensors, and the other values as JSON values.

        The tensors are not copies: write or copy them before the next step.
        """
        tensors, others = {"weights": self.weights}, dict[str, object]()
        if self._newest is not None:
            tensors[NEWEST] = self._newest
        if self._sparse_mean:
            tensors |= self._sparse_mean.state()
        for index, parameter in enumerate(self._parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{index}.{key}"] = value
                else:
                    others[f"{index}.{key}"] = value
        meta = {
            "layout": self.layout.digest(),
            "start": self.start,
            "stop": self.stop,
            "optimizer": self.spec.name,
            "others": others,
        }
        if self._last is not None:
            rates, turns, decay = self._last
            meta["last"] = {"rates": list(rates), "turns": turns, "decay": decay}
        if self._sparse_mean:
            meta["round_weight"] = self._sparse_mean.weight
        return tensors, meta

    def load(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned. Later steps and predictions are then the same, bit for bit.

        A checkpoint that is older than the correction of staleness has no newest gradient. Then predictions do without
        it until the next step.

        The settings may differ (a resumed run may lower its weight decay). The layout, the range and the optimizer must
        be the same.
        """
        check_origin(meta, self.layout.digest(), self.spec)
        if (meta.get("start"), meta.get("stop")) != (self.start, self.stop):
            raise ValueError(
                f"the state is of elements {meta.get('start')} to {meta.get('stop')} of the model, and this slice has "
                f"{self.start} to {self.stop}: cut it again first"
            )
        others = meta.get("others")
        weights = tensors.get("weights")
        if not isinstance(others, Mapping) or weights is None or not self._fits(weights):
            raise ValueError("the checkpoint is damaged: it does not hold this shard's weights as float32")
        newest, last = tensors.get(NEWEST), self._last_of(meta)
        if newest is not None and not self._fits(newest):
            raise ValueError("the checkpoint is damaged: it does not hold this shard's newest gradient as float32")
        found: list[dict[str, Any]] = [{} for _ in self._parameters]
        for name, value in (*tensors.items(), *others.items()):
            if name not in ("weights", *NOT_OF_OPTIMIZER):
                index, _, key = name.partition(".")
                if not index.isdecimal() or int(index) >= len(found):
                    raise ValueError(f"the checkpoint is damaged: {name!r:.80} belongs to no parameter of this shard")
                found[int(index)][key] = value
        for part, parameter, values in zip(self._parts, self._parameters, found, strict=True):
            self._must_be_state(part, parameter, values)
        if self._sparse_mean:
            self._sparse_mean.load(tensors, meta.get("round_weight"))
        self.weights.copy_(weights)
        self._newest = None if newest is None else newest.clone()
        self._pace(*last)
        for parameter, values in zip(self._parameters, found, strict=True):
            # Without torch's load_state_dict, which casts values and numbers the parameters differently.
            self._optimizer.state[parameter] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()
            }

    def _pace(self, rates: tuple[float, ...], turns: int, decay: float) -> None:
        """Set the optimizer's settings for the next step and for predictions: one of `turns` steps in a round.

        decay: the factor of weight decay.
        """
        if self._last == (rates, turns, decay):
            return
        for group, settings, rate in zip(self._optimizer.param_groups, self._settings, rates, strict=True):
            group.update(slowed(self.spec.name, settings, rate, turns))
            if settings.get("weight_decay"):
                group["weight_decay"] = settings["weight_decay"] * decay
        self._last = (rates, turns, decay)

    def _last_of(self, meta: Mapping[str, Any]) -> tuple[tuple[float, ...], int, float]:
        """Return the arguments of `_pace` for the last step. Old checkpoints do not have them all."""
        groups = len(self.spec.settings_of_groups)
        match meta.get("last"):
            case None:
                return tuple(float(settings["lr"]) for settings in self._settings), 1, 1.0
            case {"rates": [*rates], "turns": int(turns), **rest} if len(rates) == groups and turns >= 1:
                numbers = [each for each in (*rates, rest.get("decay", 1.0)) if isinstance(each, float | int)]
                if len(numbers) > groups and all(math.isfinite(each) and each >= 0 for each in numbers):
                    return tuple(map(float, numbers[:-1])), turns, float(numbers[-1])
        raise ValueError("the checkpoint is damaged: it does not say how the last step was made")

    def _must_be_state(self, part: SlicePart, parameter: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Raise ValueError if these values are not the optimizer's state of a parameter. An empty state is valid."""
        expected = trial(self.spec, part.group, parameter.dim()) if values else {}
        name = self.spec.name
        if missing := sorted(expected.keys() - values.keys()):
            raise ValueError(f"the checkpoint's state of {name} lacks {missing[0]!r}, which these settings need")
        if extra := sorted(values.keys() - expected.keys()):
            raise ValueError(f"the checkpoint's state of {name} has {extra[0]!r}, which these settings do not use")
        for key, value in values.items():
            like = expected[key]
            if isinstance(like, torch.Tensor):
                good = isinstance(value, torch.Tensor) and value.dtype == like.dtype and value.dim() == like.dim()
                good = good and (not like.dim() or value.shape == parameter.shape or self._is_factor(value, parameter))
            else:
                good = type(value) is type(like)
            if not good:
                raise ValueError(f"the checkpoint is damaged: {key!r} of {name} has a wrong shape or type")

    def _is_factor(self, value: torch.Tensor, parameter: torch.Tensor) -> bool:
        """Return True for a row or a column of the parameter. Adafactor keeps those instead of the whole matrix."""
        sizes = zip(value.shape, parameter.shape, strict=True)
        return not is_elementwise(self.spec.name) and all(ours in (1, its) for ours, its in sizes)

    def _combined(self, terms: Sequence[Term], scales: Sequence[Sequence[float]]) -> torch.Tensor:
        """Return Σ scale·gradient, without a copy for one gradient of scale 1. scales: by parameter group."""
        first = scales[0]
        is_same = all(each == first for each in scales)
        if is_same and len(terms) == 1 and first[0] == 1:
            return terms[0].gradient
        if self._sum is None:  # kept, because allocating new pages in each step costs more than the sum
            self._sum = torch.empty_like(self.weights)
        if is_same:  # one pass over the whole buffer
            return _sum_into(self._sum, [term.gradient for term in terms], first)
        for part in self._parts:
            gradients = [self._part(term.gradient, part) for term in terms]
            _sum_into(self._part(self._sum, part), gradients, scales[part.group])
        return self._sum

    def _part(self, flat: torch.Tensor, part: SlicePart) -> torch.Tensor:
        """Return a view of one part of a tensor of the slice's size."""
        if part.shape == flat.shape:
            return flat
        return flat[part.start - self.start : part.stop - self.start].view(part.shape)

    def _fits(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.dtype is torch.float32
            and tensor.shape == self.weights.shape
            and tensor.device == self.weights.device
        )

    def _must_be_rates(self, rates: Sequence[float]) -> None:
        if len(rates) != len(self.spec.settings_of_groups):
            raise ValueError(f"there are {len(self.spec.settings_of_groups)} parameter groups and {len(rates)} rates")
        if not all(0 <= rate <= MAX_RATE for rate in rates):
            raise ValueError(f"a learning rate must be from 0 to {MAX_RATE:.0f}; got {list(rates)}")

    def _must_fit(self, tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> None:
        if not tensors or len(tensors) != len(weights):
            raise ValueError(
                f"each update needs one weight: there are {len(tensors)} updates and {len(weights)} weights"
            )
        if not all(self._fits(tensor) for tensor in tensors):
            raise ValueError(f"an update must be one flat float32 tensor of {self.stop - self.start} elements")
        if not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"the weight of an update must be a finite number; got {list(weights)}")


def _sum_into(out: torch.Tensor, gradients: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
    torch.mul(gradients[0], scales[0], out=out)
    for gradient, scale in zip(gradients[1:], scales[1:], strict=True):
        out.add_(gradient, alpha=scale)
    return out


def is_bounded(squares: float) -> bool:
    """Return whether elements with this sum of squares are all finite and small enough. False: some may not be."""
    return squares <= MAX_ELEMENT**2
