"""The model that all workers of a job agree on. The first worker or a checkpoint describes it."""

from __future__ import annotations

import logging
from typing import Any

from paceline.job import events
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.codecs import codec
from paceline.model.correction import Correction, chosen, momentum_of
from paceline.model.description import Description
from paceline.policies import Policy
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import Ranges

log = logging.getLogger(__name__)


class ModelAgreement:
    """The description of the model that the job trains, and the pieces that it is cut into."""

    def __init__(self, config: ServerConfig, policy: Policy, restored: Checkpoint | None) -> None:
        self._config, self._restored = config, restored
        self._mixes, self._streams = policy.mixes, config.streams(policy)
        self._pieces_each = config.pieces_each(policy)
        self._keep_bases = policy.mixes and policy.compares  # are models compared with what their workers pulled?
        self._described: Description | None = None
        self._first: Description | None = None  # of the first worker, whose settings all other workers must have
        self.text = b""  # the description as JSON, as it was received
        self.correct: Correction = "none"  # how staleness is corrected for; none until the model is known
        if restored:
            self._accept(restored.description, restored.description.as_json())

    @property
    def is_known(self) -> bool:
        return self._described is not None

    @property
    def momentum(self) -> float:
        """The momentum of the server's optimizer."""
        assert self._described is not None
        return momentum_of(self._described.optimizer)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a shard's Setup that depend on the model, the policy and the updates."""
        measure = self._config.max_norm is not None
        return {"correct": self.correct, "measure": measure, "keep_bases": self._keep_bases, "sparse": self.sparse}

    @property
    def sparse(self) -> bool:
        """Whether updates are differences of several local steps, and have few of their elements each."""
        assert self._described is not None
        return self._described.local_steps and self._has_few_elements

    @property
    def _has_few_elements(self) -> bool:
        name = self._config.update_codec
        return bool(name) and codec(name).is_sparse

    def agree(self, text: bytes) -> bool:
        """Check a worker's description of its model. Return True if it makes the model known.

        Raise WireError if it cannot be read, or differs from the model of the other workers.
        """
        try:
            described = Description.from_json(text)
        except ValueError as error:
            raise WireError(f"The description of the model cannot be read: {error}.") from None
        if self._described is None:
            try:
                described.deal(self._config.shards, 1)
            except ValueError as error:
                raise WireError(f"The model cannot be cut into shards: {error}; use fewer --servers.") from None
            try:
                self._accept(described, text)
            except ValueError as error:
                raise WireError(str(error)) from None
            self._first = described
            return True
        if self._restored:
            try:
                self._restored.check_model(described)
            except CheckpointError as error:
                raise WireError(str(error)) from None
        self._compare(self._described, described)
        return False

    def _compare(self, known: Description, described: Description) -> None:
        """Raise WireError if a worker's model differs from the known one.

        The settings of the optimizer must be those of the first worker, unless the workers make their own steps. They
        may be others than in the checkpoint that the job was restored from. The checkpoint's settings stay in use.
        """
        if self._has_few_elements and known.local_steps != described.local_steps:
            ours, its = ("with", "none") if known.local_steps else ("without", "several")
            raise WireError(
                "With --updates topk, all workers make local steps or none does: this job began "
                f"{ours} local steps, and this worker makes {its}; change local_steps, or use --updates int4."
            )
        difference = known.differs_from(described, settings=False)
        if not difference and not self._mixes:
            if self._first is None:
                self._first = described
                if ignored := known.differs_from(described):
                    log.warning("The settings of the checkpoint stay in use: %s, in the worker's script.", ignored)
            difference = self._first.differs_from(described)
        if difference:
            raise WireError(f"All workers must train the same model: {difference}.")

    def described(self) -> events.ModelDescribed:
        """Return the event that the model is known now."""
        pieces = min(map(len, self.pieces()), default=0) if self._streams else None
        assert self._described is not None
        return events.ModelDescribed(self.momentum, pieces, self._described.layout.size, str(self._described.optimizer))

    def pieces(self) -> list[Ranges]:
        """Return the pieces of the model that each shard holds: one each, or several if updates are streamed."""
        if self._described is None:
            return []
        pieces = self._config.slices if self._streams else 1
        return self._described.deal(self._config.shards, pieces, self._pieces_each)

    def _accept(self, described: Description, text: bytes) -> None:
        """Make this the job's model. Raise ValueError if its optimizer does not allow the requested --correct."""
        asked = self._config.correct
        try:
            # A policy that mixes has workers take their own steps, so there is no momentum on the server.
            self.correct = "none" if self._mixes else chosen(asked, described.optimizer)
        except ValueError as error:
            raise ValueError(f"--correct {asked} cannot be had: {error}; leave it at auto.") from None
        self._described, self.text = described, text
        if self.sparse and self.correct == "full":
            if asked == "full":
                raise ValueError(
                    "--correct full needs steps that resemble one another, and those of topk have other "
                    "elements each: leave it at auto."
                )
            self.correct = "round"  # the newest step says little about the next one
