"""A shard of the model as a Ray actor."""

from __future__ import annotations

import os
import time
from pathlib import Path

import ray

from paceline.ray.coordinator_actor import PROBE, CoordinatorAddress
from paceline.serve.server import ServerError
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.tls import Tls

PAUSE = 0.3  # seconds before a shard calls its coordinator again
MAX_FAILURES = 3  # consecutive errors that end the job


class ShardActor:
    """Holds one slice of the model. It begins again with each generation of the server, until it is killed."""

    def serve(self, number: int, coordinator: CoordinatorAddress, token: bytes, folder: str) -> None:
        """Serve this shard. Return only by an error that a new attempt would meet again.

        token: for the role of a shard. folder: of the job's checkpoints.
        """
        from paceline.model.optimizer import without_compiler
        from paceline.serve.shard.shard import Shard

        if not (Path(folder) / PROBE).exists():
            raise ServerError(
                f"Node {ray.util.get_node_ip_address()} does not see the coordinator's files in {folder!r}: "
                "give RunConfig a storage_path that all nodes share."
            )
        os.environ.update(coordinator.tls)
        without_compiler()
        tls = Tls.from_environment(coordinator.tls) if coordinator.tls else None
        endpoint = Endpoint(coordinator.host, coordinator.port, token, tls)
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        failures = 0
        while True:
            try:
                Shard(number, endpoint, ray.util.get_node_ip_address(), token, threads).run()
                failures = 0
            except OSError as error:
                is_gone = isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, WireError)
                failures = 0 if is_gone else failures + 1
                if failures == MAX_FAILURES:
                    raise ServerError(f"Shard {number}: {error}") from None
            time.sleep(PAUSE)
