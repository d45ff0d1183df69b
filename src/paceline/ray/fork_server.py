"""Starts the processes of Ray actors by a fork, from one process of the node that has imported torch, Ray and paceline.

Ray runs this file in place of Python (the `py_executable` of a runtime environment):

    python fork_server.py default_worker.py --object-store-name=… …

It passes its arguments, environment and standard files to the fork server of the node, which it starts if there is
none. The server forks, and the new process runs default_worker.py as Python would. If the server does not answer, this
process runs default_worker.py itself. The server ends when it has no processes for a while, or with the node.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import socket
import struct
import subprocess
import sys
import time
from typing import Any

ATTEMPTS = 3
ANSWER_SECONDS = 45.0  # that the server has to import torch and to fork
IDLE_SECONDS = 20.0  # after which a server without processes ends
LOOK_SECONDS = 1.0
STORE = "--object-store-name="  # names a socket of the node: no other node of this machine has it
DONE = b"forked"


def launcher() -> str:
    """Return the command that Ray runs in place of Python. All nodes need Python and paceline at these paths."""
    return shlex.join([sys.executable, "-I", "-S", os.path.abspath(__file__)])


def main(arguments: list[str]) -> None:
    """Let the node's fork server run a Python file with these arguments, or run it here."""
    try:
        path = next(each.removeprefix(STORE) for each in arguments if each.startswith(STORE)) + ".fork"
        ask(path, {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()})
    except (OSError, StopIteration):
        os.execv(sys.executable, [sys.executable, *arguments])


def ask(path: str, task: dict[str, Any]) -> None:
    """Let the fork server at this path run a task. Start the server if there is none. Raise OSError if it fails."""
    for _ in range(ATTEMPTS):
        with connect(path) as connection:
            connection.settimeout(ANSWER_SECONDS)
            check_peer(connection)
            data = json.dumps(task).encode()
            try:
                socket.send_fds(connection, [struct.pack("<Q", len(data))], [0, 1, 2])
                connection.sendall(data)
                if connection.recv(len(DONE)) == DONE:
                    return
            except (BrokenPipeError, ConnectionResetError):
                pass  # the server was about to end
    raise ConnectionError(f"The fork server at {path} does not run.")


def connect(path: str) -> socket.socket:
    """Return a connection to the fork server at this path. Start the server if there is none."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            start(path)
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
        return connection


def start(path: str) -> None:
    """Start a fork server that serves this path. It accepts connections from now on."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.umask(0o177)  # for this user alone
        listener.bind(path)
        os.umask(before)
        listener.listen(1024)
        subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", f"{listener.fileno()}", path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


def check_peer(connection: socket.socket) -> None:
    """Raise PermissionError if another user is at the other end: a task holds the secrets of a job."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise PermissionError(f"the fork server belongs to user {user}")


def serve(listener: socket.socket, path: str) -> dict[str, Any] | None:
    """Fork processes until there is nothing to do. Return the task in each forked process, and None in this one."""
    raylet = int(os.environ.get("RAY_RAYLET_PID", "0"))
    children: set[int] = set()
    used = time.monotonic()
    listener.settimeout(LOOK_SECONDS)
    while True:
        children = {child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)}
        now = time.monotonic()
        used = now if children else used
        if now - used > IDLE_SECONDS or (raylet and not os.path.exists(f"/proc/{raylet}")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return None
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection, contextlib.suppress(OSError, EOFError):
            connection.settimeout(LOOK_SECONDS)
            check_peer(connection)
            task, files = receive(connection)
            child = os.fork()
            if not child:
                os.setpgrp()  # Ray ends the process group of a worker that it has lost
                listener.close()
                for number, file in enumerate(files):
                    os.dup2(file, number)
            for file in files:
                os.close(file)
            if not child:
                return task
            children.add(child)
            connection.sendall(DONE)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a task and the three standard files of its process."""
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    (size,) = struct.unpack("<Q", head)
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError
        data += more
    return json.loads(data), files


def run(task: dict[str, Any]) -> None:
    """Run the Python file of a task, as Python would in a new process."""
    import atexit
    import random
    import runpy

    import numpy

    code = 0

    def end() -> None:
        """End without freeing each object, which would copy the memory that processes share: a second of CPU."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(end)  # before all others, so that it is called last
    environment, arguments = task["environment"], task["arguments"]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(task["folder"])
    known = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [os.path.dirname(arguments[0]), *known, *(each for each in sys.path if each not in known)]
    sys.argv = arguments
    random.seed()
    numpy.random.seed()
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except BaseException:
        code = 1
        raise


def preload() -> None:
    """Import what the actors of a job need, and leave no threads behind but those that survive a fork.

    Ray imports some modules only when it starts an actor: those of `pyarrow` and `pydantic` took 0.2 s of each actor.
    """
    import gc

    import ray._common.pydantic_compat
    import ray._common.usage.usage_lib
    import ray._private.arrow_serialization
    import ray._private.workers.default_worker  # noqa: F401
    import torch

    import paceline.ray.coordinator_actor
    import paceline.ray.shard_actor
    import paceline.ray.worker_actor
    import paceline.serve.shard.shard
    import paceline.train.session  # noqa: F401

    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()  # the first step loads much more than the import does
    gc.collect()
    gc.freeze()  # these objects stay alive; collecting them would copy their memory in each process


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        preload()
        with socket.socket(fileno=int(sys.argv[2])) as served:
            given = serve(served, sys.argv[3])
        if given:
            run(given)
    else:
        main(sys.argv[1:])
