"""Weights and optimizer state that a script loads into a worker after the worker has joined.

The next pull would overwrite them without a word. So a worker notices that its model is not the one that it pulled. On
its first step it offers the weights to the job: the main worker's count, if it has not trained yet. Later, only an
explicit load (`session.load`, `optimizer.load_state_dict`) changes the job.
"""

from __future__ import annotations

import warnings

import torch

from paceline.model.optimizer import spec_of
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.optimizer_state import State, part_of_shard, states_of_tensors
from paceline.serve.wire.messages import Ranges
from paceline.serve.worker.client import Client
from paceline.serve.worker.transfers import PartOf
from paceline.train.flat_model import FlatModel

SAMPLE = 1024  # weights that are compared with those of the last pull

CHANGED = (
    "The weights of the model were changed after the last step, and the next pull would overwrite the change. "
    "Give the job other weights with session.load(state_dict), or change them before paceline.join."
)
NOT_USED = (
    "The weights that were loaded into this worker are not used: the job continues with its own. The weights of the "
    "main worker count, until it has made its first step; call session.load(state_dict) to replace them later."
)


class ChangeDetector:
    """Notices weights that were changed in the model after they had been pulled.

    It compares a sample of the weights and, for parameters with memory of their own, torch's counts of changes.
    """

    def __init__(self, flat: FlatModel) -> None:
        self._flat = flat
        count = flat.parameter_elements
        self._sampled = torch.linspace(0, count - 1, min(SAMPLE, count), dtype=torch.float64).long()
        self._values = torch.empty(0)
        self._counts: list[int] = []
        self.remember()

    def remember(self) -> None:
        """Take note of the model as it is now."""
        self._values = self._flat.weights[self._sampled]
        self._counts = self._flat.change_counts()

    def found(self, thoroughly: bool = False) -> bool:
        """Return whether the model was changed since `remember`.

        thoroughly: compare all weights of parameters with memory of their own, which copies them from a GPU.
        """
        if not torch.equal(self._values, self._flat.weights[self._sampled]):
            return True
        counts = self._flat.change_counts()
        if counts == self._counts and not thoroughly:
            return False
        return any(
            (thoroughly or now != before) and self._flat.differs_from_weights(index)
            for index, (now, before) in enumerate(zip(counts, self._counts, strict=True))
        )


class Loading:
    """Agrees with the job on weights and optimizer state that were loaded into this worker."""

    def __init__(self, flat: FlatModel, optimizer: torch.optim.Optimizer) -> None:
        self._flat, self._optimizer = flat, optimizer
        self._spec: OptimizerSpec = spec_of(optimizer)
        self._detector = ChangeDetector(flat)
        self._states: list[State] | None = self._loaded_states()  # of each tensor, if they were loaded
        self._replaces = False  # must the job take the weights, even if it has trained?
        self.has_stepped = False

    def pulled(self) -> None:
        """Take note that the model holds pulled weights now."""
        self._detector.remember()

    def begin(self, client: Client) -> None:
        """Wait for the first Grant and pull. If the job is new, it may take this worker's weights and state."""
        client.part_of = self._part_of()
        client.begin(self._flat.weights_bytes())
        self._end(client)

    def load_weights(self, client: Client) -> None:
        """Give the job the weights that the model holds now, even if it has trained. The optimizer keeps its state."""
        if self._states is None and (self.has_stepped or client.version > 0):
            self._states = self.pull_states(client)
        self._replaces = True
        self.offer(client)

    def load_state(self, is_main: bool) -> None:
        """Take note that the script has loaded the optimizer's state. Only the main worker may replace it later."""
        settings = [{**group, "lr": None} for group in spec_of(self._optimizer).settings_of_groups]
        ours = [{**group, "lr": None} for group in self._spec.settings_of_groups]
        for mine, loaded in zip(ours, settings, strict=True):
            for name, value in loaded.items():
                if mine.get(name) != value:
                    raise ValueError(
                        f"The loaded state is of {self._spec.name} with {name}={value}, and the job was joined with "
                        f"{name}={mine.get(name)}; create the optimizer with {name}={value}."
                    )
        if is_main or not self.has_stepped:
            self._states, self._replaces = self._loaded_states(), self.has_stepped

    def found(self) -> bool:
        """Return whether the script has loaded weights or optimizer state since the last pull.

        Raise ValueError if the weights were changed after the first step, without `load_weights`.
        """
        if self._states is not None:
            return True
        if not self._detector.found(thoroughly=not self.has_stepped):
            return False
        if self.has_stepped:
            raise ValueError(CHANGED)
        return True

    def found_early(self) -> bool:
        """Return `found` if that may lead to an offer. A change after the first step is left to `found`."""
        return self._states is not None or (not self.has_stepped and self._detector.found(thoroughly=True))

    def offer(self, client: Client) -> None:
        """Offer the loaded weights and state to the job, and pull the model that the job continues with."""
        self._flat.store()
        client.part_of = self._part_of()
        client.offer(self._flat.weights_bytes(), self._replaces)
        self._end(client)

    def parameters_now(self) -> torch.Tensor:
        """Return a copy of the parameters that the model holds now."""
        self._flat.store()
        return self._flat.split(self._flat.weights)[0].clone()

    def is_followed(self, before: torch.Tensor) -> bool:
        """Return whether the job has the same parameters as this worker had before. Warn if it does not."""
        followed = torch.equal(before, self._flat.split(self._flat.weights)[0])
        if not followed:
            warnings.warn(NOT_USED, stacklevel=2)
        return followed

    def pull_states(self, client: Client) -> list[State] | None:
        """Return the state of each tensor from the server, or None if the optimizer has none yet."""
        states = states_of_tensors(self._flat.layout, self._spec, client.pull_state())
        return states if any(states) else None

    def packed(self, states: list[State] | None) -> dict[int, State]:
        """Return states of tensors in the form of `torch.optim.Optimizer.state_dict()["state"]`."""
        if states is None:
            return {}
        every = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        number = {id(parameter): index for index, parameter in enumerate(every)}
        return {
            number[id(parameter)]: {key: _to_device(value, parameter) for key, value in state.items()}
            for parameter, state in zip(self._flat.parameters, states, strict=False)
            if state
        }

    def _end(self, client: Client) -> None:
        client.part_of = None
        self._states, self._replaces = None, False

    def _loaded_states(self) -> list[State] | None:
        """Return the state that the script's own optimizer holds for each tensor of the model, or None without any."""
        known = self._optimizer.state
        if not known:
            return None
        states = [dict(known.get(parameter, {})) for parameter in self._flat.parameters]
        return states + [{} for _ in self._flat.layout.tensors[len(states) :]]

    def _part_of(self) -> PartOf | None:
        states = self._states
        if states is None:
            return None

        def part_of(pieces: Ranges) -> bytes:
            return part_of_shard(self._flat.layout, self._spec, pieces, self._flat.weights, states)

        return part_of


def _to_device(value: object, parameter: torch.Tensor) -> object:
    """Return a state tensor on the parameter's device. A count of steps stays on the CPU, as in torch."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
