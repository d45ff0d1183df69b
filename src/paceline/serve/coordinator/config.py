"""The terms that a job is served under."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from paceline.job import JobConfig, SaveEvery
from paceline.model.correction import Asked, checked
from paceline.policies import Policy
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan


@dataclass(frozen=True)
class ServerConfig:
    """What a server is told when it starts."""

    shards: int = 1
    workers: int = 1  # the job begins when so many have come; more may come later
    token: bytes = b""
    lease: float = 30.0  # seconds of silence before a worker is given up
    saving: CheckpointPlan | None = None
    record: Path | None = None  # a folder that shards write every update to
    policy: str = ""  # its name, for the checkpoint and the trace
    streamed: bool = False  # is each piece of an update applied as it comes, where the policy allows it?
    slices: int | None = None  # pieces that the model is cut into then, at least; None: as many as its size calls for
    tls: ssl.SSLContext | None = None
    began: float | None = None  # by time.monotonic, when the job began, if it was not now
    awaited: frozenset[int] | None = None  # workers of the generation before that had not left; None: not known
    incarnations: dict[int, int] = field(default_factory=dict)  # the last of each worker, from the generation before
    shard_token: bytes = b""  # known to the server's own shards alone; empty: whoever knows the job's may be one
    correct: Asked = "auto"  # how staleness known in advance is taken into account; auto: as the optimizer allows

    def __post_init__(self) -> None:
        checked(self.correct)

    def streams(self, policy: Policy) -> bool:
        """Is each piece of an update applied as it comes, under this policy?"""
        return bool(self.shards) and (policy.pipelined or (self.streamed and policy.streamable))

    def job_config(self, policy: Policy, generation: str) -> JobConfig:
        """The part of them that the job itself is run under."""
        return JobConfig(
            shards=self.shards,
            workers=self.workers,
            lease=self.lease,
            save=SaveEvery(self.saving.updates, self.saving.seconds) if self.saving else None,
            policy=self.policy,
            streams=self.streams(policy),
            generation=generation,
            awaited=self.awaited,
            incarnations=self.incarnations,
        )
