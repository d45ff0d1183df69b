"""The configuration of a server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from paceline.job import JobConfig, SaveEvery
from paceline.job.leases import EXPECTED_BACK
from paceline.job.visits import parts_of
from paceline.model.codecs import codec
from paceline.model.correction import CorrectionOption, checked
from paceline.policies import Policy
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan

#: The least pieces of a shard if there are several shards. All shards return their last piece at the same time, when no
#: push is on its way, so few pieces would leave the links idle for long.
LEAST_PIECES = 4
#: The same if several workers push together. A piece is returned when all of them have pushed it.
PIECES_IF_TOGETHER = 8


@dataclass(frozen=True)
class ServerConfig:
    """The options that a server is started with."""

    shards: int = 1
    workers: int = 1  # the job begins when this many have joined; more may join later
    token: bytes = b""
    lease: float = 30.0  # seconds of silence before a worker is given up
    saving: CheckpointPlan | None = None
    record: Path | None = None  # a folder to record every update and decision in
    policy: str = ""  # its specification, for the checkpoint and the trace
    streamed: bool = False  # apply each piece of an update as it arrives, if the policy allows it?
    slices: int | None = None  # the least number of pieces if updates are streamed; None: by the size
    tls: ssl.SSLContext | None = None
    began: float | None = None  # when the job began, by time.monotonic; None: now
    awaited: frozenset[int] | None = None  # workers of the previous generation that had not left; None: unknown
    incarnations: dict[int, int] = field(default_factory=dict)  # the last one of each worker in earlier generations
    provider: int | None = None  # the worker that provides the weights of a restored job; None: the checkpoint does
    shard_token: bytes = b""  # of the server's own shards; empty: shards use the job's token
    visits: bool = False  # whether a shard runs beside each worker, so that workers that take turns visit shards
    replicas: int = 0  # backups of each shard: 0 or 1
    max_norm: float | None = None  # times the usual norm, to which an update is scaled down; None: any update counts
    update_codec: str = ""  # the codec in which workers push (`model.codecs`); empty: none
    correct: CorrectionOption = "auto"  # how to correct for known staleness; auto: as the optimizer allows
    absence: float = EXPECTED_BACK  # seconds to wait for a worker that was lost, or whose machine was taken away

    def __post_init__(self) -> None:
        checked(self.correct)

    def streams(self, policy: Policy) -> bool:
        """Return whether each piece of an update is applied as it arrives under this policy."""
        return bool(self.shards) and (policy.pipelined or (self.streamed and policy.streamable))

    def has_visits(self, policy: Policy) -> bool:
        """Return whether workers push in visits under this policy (`job.visits`)."""
        in_turn = policy.takes_turns and not policy.streams_together(self.workers)
        return self.visits and self.streams(policy) and in_turn and parts_of(self.shards) > 0

    def pieces_each(self, policy: Policy) -> int:
        """Return the least pieces of a shard, if the number of pieces is not configured and updates are streamed."""
        if self.has_visits(policy):
            return parts_of(self.shards)
        if policy.streams_together(self.workers):
            return PIECES_IF_TOGETHER
        return LEAST_PIECES if self.shards > 1 else 1

    def job_config(self, policy: Policy, generation: str) -> JobConfig:
        """Return the options that concern the job's state machine."""
        return JobConfig(
            shards=self.shards,
            workers=self.workers,
            lease=self.lease,
            absence=self.absence,
            save=SaveEvery(self.saving.updates, self.saving.seconds) if self.saving else None,
            policy=self.policy,
            streams=self.streams(policy),
            generation=generation,
            awaited=self.awaited,
            incarnations=self.incarnations,
            provider=self.provider,
            visits=parts_of(self.shards) if self.has_visits(policy) else 0,
            max_norm=self.max_norm,
            sends_rest=bool(self.update_codec) and codec(self.update_codec).parts > 1,
        )
