"""The supernodes of the benchmark flower_lab.py: one process that has imported Flower, and its forks.

    .venv-flower/bin/python benchmarks/flower_nodes.py SUPERLINK FOLDER NAMESPACE...

Each namespace gets the processes of a Flower node: a supernode, a SuperExec, and a process for each message that the
ClientApp handles. They run Flower's own code. Two things differ from the commands `flower-supernode` and
`flower-superexec`. The processes are forked, because 16 nodes that import Flower for each message would keep two cores
busy for half a minute. And a node writes down when it pulled a model: FOLDER/pulls-N has a line of JSON for each pull.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.supercore.cli import flower_superexec
from flwr.supercore.exit import exit_handler
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supernode import start_client_internal as node_loop
from flwr.supernode.cli import flower_supernode, flwr_clientapp

RUNTIME = "127.0.0.1:9094"  # where a supernode serves its SuperExec and its ClientApps
PR_SET_PDEATHSIG = 1


def supernode(number: int, nodes: int, superlink: str, folder: Path) -> None:
    """Run a supernode. It writes down the times of its pulls."""
    pull_objects, pull_and_store = node_loop.pull_objects, node_loop._pull_and_store_message
    sent = 0.0  # when the server sent the message

    def timed(*given: Any, **options: Any) -> dict[str, bytes]:
        began, clock = time.monotonic(), time.time()
        found: dict[str, bytes] = pull_objects(*given, **options)
        ended = time.monotonic()
        line = {"begin": began, "end": ended, "wait": clock - sent, "bytes": sum(map(len, found.values()))}
        with (folder / f"pulls-{number}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return found

    def noting(*, receive: Callable[[], Any], **options: Any) -> int | None:
        def received() -> Any:
            nonlocal sent
            message = receive()
            sent = message[0].metadata.created_at if message else 0.0
            return message

        stored: int | None = pull_and_store(receive=received, **options)
        return stored

    node_loop.pull_objects, node_loop._pull_and_store_message = timed, noting
    config = f"partition-id={number} num-partitions={nodes}"
    sys.argv = ["flower-supernode", "--insecure", "--superlink", superlink, "--isolation", "process"]
    sys.argv += ["--node-config", config]
    flower_supernode()


def superexec() -> None:
    """Run a SuperExec. It forks the process of a ClientApp instead of starting it as a command."""

    def launch(self: SubprocessExecutor, spec: ExecutionSpec) -> LaunchResult:
        def clientapp() -> None:
            exit_handler.registered_exit_handlers.clear()  # they are the parent's
            sys.argv = ["flwr-clientapp", "--insecure", "--runtime-api-address", RUNTIME, "--token", spec.token]
            flwr_clientapp()

        fork(clientapp)
        return LaunchResult.accepted()

    SubprocessExecutor.launch = launch
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ClientApps
    sys.argv = ["flower-superexec", "--insecure", "--runtime-api-address", RUNTIME]
    flower_superexec()


def fork(function: Callable[[], None], namespace: str = "") -> None:
    """Call a function in a new process, which ends with its parent. namespace: the one to enter, if any."""
    if os.fork():
        return
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if namespace:
            with open(f"/run/netns/{namespace}") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
            os.environ["FLWR_HOME"] = str(Path(os.environ["FLWR_HOME"]) / namespace)  # each host has its own files
        function()
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    finally:
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    superlink, folder, *namespaces = sys.argv[1:]
    for number, namespace in enumerate(namespaces):
        fork(lambda number=number: supernode(number, len(namespaces), superlink, Path(folder)), namespace)  # type: ignore[misc]
        fork(superexec, namespace)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
