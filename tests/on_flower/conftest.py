"""Give this process the identity that Flower gives to the process of a ServerApp."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # without Flower, each module of tests says that it is skipped
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
