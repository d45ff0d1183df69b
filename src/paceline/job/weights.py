"""The fifth layer of a JobState: which worker provides the weights of the model.

A new job asks one worker for its weights. Weights that a script loads later are offered by the workers: the main worker
counts, which is worker 0 or, without a worker 0, the one with the lowest number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.job import events, instructions
from paceline.job.accounting import Watcher
from paceline.job.config import JobConfig
from paceline.job.iterations import IterationLayer
from paceline.job.membership import Member, Stage
from paceline.policies import Policy


class WeightsLayer(IterationLayer):
    """Asks a worker for the initial weights, and decides on weights that workers have loaded."""

    def __init__(
        self,
        policy: Policy,
        config: JobConfig,
        watcher: Watcher,
        restored: Mapping[str, Any] | None,
        now: float,
        sees_pulls: bool,
    ) -> None:
        super().__init__(policy, config, watcher, restored, now, sees_pulls)
        #: True while a job that begins again before its first update waits for all its workers, as it did at first.
        self._awaits_all = restored is not None and config.provider is not None and not restored["applied"]
        self._offers: dict[int, tuple[float, bool]] = {}  # worker → when it offered its weights; whether they replace
        self._initializer: Member | None = None  # the member that sends the initial weights to the shards

    def _request_weights(self) -> None:
        """Ask one member for the initial weights of the model. If that member leaves before, ask another one."""
        training, provider = self.roster.training, self.config.provider
        if (self._restored and provider is None) or self.has_begun or not training:
            return
        if provider is not None and provider not in training:
            if provider in self.roster.awaited:
                return
            if self.version > 0:
                reason = f"Worker {provider} left before it had provided the weights that it loaded."
                self._out.append(instructions.FailGeneration(reason))
                return
        if self._initializer is None or training.get(self._initializer.worker) is not self._initializer:
            self._shards_with_weights.clear()
            first = next(iter(training.values()))
            initializer = self._initializer = first if provider is None else training.get(provider, first)
            self._out.append(instructions.OrderInitialWeights(initializer.worker, initializer.incarnation))
            self._send(initializer.connection, instructions.SendWeightsRequest)

    def _weights_offered(self, offered: events.WeightsOffered) -> None:
        member = self._renew_lease(offered.connection)
        if member and member.worker in self.roster.training:
            self._offers[member.worker] = self._now, offered.replace

    def _settle_offers(self) -> None:
        """Decide on workers whose models were changed after they had pulled. Only the main worker's weights count.

        If the main worker offers its weights before it trains, or asks to replace the model, the job begins again with
        them. If it trains instead, the others pull the job's weights. Until then they wait.
        """
        training = self.roster.training
        self._offers = {worker: offer for worker, offer in self._offers.items() if worker in training}
        if not self._offers:
            return
        main = training[0 if 0 in training else min(training)]
        # New means: here from the beginning, and without a gradient yet. A worker 0 that comes later must not overwrite
        # what the others have trained.
        is_new = main.granted_version == 0 and main.iteration <= (main.stage is Stage.COMPUTING)
        is_new = is_new and not any(worker == main.worker for worker, _ in self._newest_applied())
        since, replaces = self._offers.get(main.worker, (0.0, False))
        if main.worker in self._offers and (is_new or replaces):
            # Updates of other workers before the first load are of other weights, so their samples are not done.
            undone: dict[str, Any] = {"samples": None, "applied": []} if is_new else {}
            self._out.append(instructions.BeginAgain(main.worker, self.snapshot() | undone))
            self._offers = {}
            return
        for worker, (since, _) in list(self._offers.items()):
            if not is_new or self._now - since > self.config.lease:
                self._send(training[worker].connection, instructions.SendWeightsKept, self.version)
                del self._offers[worker]
