"""The options of one job's server, as one value that one process can send to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from paceline.job.leases import EXPECTED_BACK
from paceline.model.correction import CorrectionOption
from paceline.policies import with_mean_weights
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.restarts import DEFAULT_RESTARTS, RestartLimit
from paceline.serve.wire.tls import Tls


class JobOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a server needs to know of its job, except for the job's token.

    `paceline run` sends these options to the server's process as JSON. No process parses a command line twice.

    A real job uses weights=mean unless its policy names other weights: `r2sp` becomes `r2sp:weights=mean` here.
    """

    policy: str  # a name with options, such as "ssp:staleness=3"
    shards: int = 1  # 0: the server only paces the workers
    workers: int = 1  # the job begins when this many workers have joined
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    streamed: bool = False  # apply each piece of an update as it arrives, if the policy allows that
    correct: CorrectionOption = "auto"  # the correction for staleness that is known in advance
    replicas: int = 0  # backups of each shard: 0 or 1
    max_norm: float | None = None  # times the usual norm, to which an update is scaled down; None: no limit
    update_codec: str = ""  # the codec in which workers push, such as int8 or int4/4; empty: none
    colocate: bool = False  # the shards are started beside the workers, not by the server
    shards_join: bool = False  # the shards are started on other machines, not by the server
    lease: float = 30.0  # seconds without a heartbeat before a worker is given up
    absence: float = EXPECTED_BACK  # seconds to wait for a worker that was lost, or whose machine was taken away
    saving: CheckpointPlan | None = None
    resume: Path | None = None  # start from the last checkpoint in this folder
    restarts: RestartLimit = DEFAULT_RESTARTS  # of lost shards
    record: Path | None = None  # record every decision and update in this folder
    tls: Tls | None = None
    insecure: bool = False  # listen on any address without TLS

    def __post_init__(self) -> None:
        if self.shards:  # without shards no update is applied, so weights have no meaning
            msgspec.structs.force_setattr(self, "policy", with_mean_weights(self.policy))

    def server_config(self, token: bytes) -> ServerConfig:
        """The configuration of a server for this job."""
        return ServerConfig(
            shards=self.shards,
            workers=self.workers,
            token=token,
            lease=self.lease,
            absence=self.absence,
            saving=self.saving,
            record=self.record,
            policy=self.policy,
            streamed=self.streamed,
            correct=self.correct,
            replicas=self.replicas,
            visits=self.colocate,
            max_norm=self.max_norm,
            update_codec=self.update_codec,
        )

    def with_policy(self, policy: str) -> JobOptions:
        """These options with another policy."""
        return msgspec.structs.replace(self, policy=policy)

    def to_json(self) -> bytes:
        """These options as JSON."""
        return msgspec.json.encode(self, enc_hook=str)  # the only type that msgspec does not know is Path

    @classmethod
    def from_json(cls, text: bytes) -> JobOptions:
        """Options that `to_json` has written. Raise ValueError if a field is missing, unknown or of another type."""

        def path(kind: type, value: Any) -> Any:
            return kind(value)

        return msgspec.json.decode(text, type=cls, dec_hook=path)
