"""The targets of --log: `tensorboard:DIR`, `mlflow:URI` and `wandb:PROJECT`."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import netrc
import os
import re
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from paceline.metrics.background import Tracker
from paceline.metrics.errors import MetricsError
from paceline.metrics.trackers import MlflowTracker, TensorBoardTracker, WandbTracker

KNOWN = "tensorboard:DIR, mlflow:URI or wandb:PROJECT"
CONNECT_SECONDS = 5.0  # for a tracking server to accept a connection
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class LogTarget:
    """A tracker that a job's curves are written to: its kind, and its folder, address or project."""

    kind: str
    place: str

    @classmethod
    def parse(cls, text: str) -> LogTarget:
        """Return the target that a text names. Raise MetricsError with the known kinds for any other text."""
        kind, _, place = text.partition(":")
        if kind not in TRACKERS:
            close = difflib.get_close_matches(kind, TRACKERS, 1)
            meant = f"; did you mean {close[0]}:{place or '…'}" if close else ""
            raise MetricsError(f"--log must be {KNOWN}, not {text!r}{meant}.")
        if not place:
            raise MetricsError(f"--log {kind} needs a {PLACES[kind]}: {KNOWN}.")
        return cls(kind, place)

    @property
    def module(self) -> str:
        """The library that writes to the target."""
        return MODULES[self.kind]

    def check(self) -> None:
        """Import the library. Raise MetricsError if the target can be seen to be out of reach."""
        importlib.import_module(self.module)  # now: while the job runs, it would take the interpreter's lock
        CHECKS[self.kind](self.place)

    def tracker(self) -> Tracker:
        """Return a new tracker for one run."""
        return TRACKERS[self.kind](self.place)


def _check_folder(place: str) -> None:
    folder = Path(place)
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        tempfile.TemporaryDirectory(prefix=".paceline-", dir=existing).cleanup()
    except OSError:
        raise MetricsError(f"--log tensorboard: the folder {place!r} cannot be written to; name another one.") from None


def _check_tracking_server(uri: str) -> None:
    """Raise MetricsError if nothing listens at the address: MLflow itself would try again for many minutes."""
    parts = urlsplit(uri)
    if parts.scheme not in PORTS:
        return
    try:
        address = (parts.hostname or "", parts.port or PORTS[parts.scheme])
        socket.create_connection(address, CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise MetricsError(
            f"--log mlflow: {uri} does not answer ({reason}); start it, or correct its address."
        ) from None


def _check_project(place: str) -> None:
    if not re.fullmatch(r"([\w.-]+/)?[^/\\#?%:]{1,128}", place):
        raise MetricsError(f"--log wandb: {place!r} must be PROJECT or ENTITY/PROJECT.")
    if os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun"):
        return
    if not _has_wandb_key():
        raise MetricsError("--log wandb needs a key: run `wandb login`, or set WANDB_MODE=offline.")


def _has_wandb_key() -> bool:
    """Return whether wandb will find a key. Without one it would ask for it at the terminal, amid the job."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for file in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if file and netrc.netrc(os.path.expanduser(file)).authenticators(host):
                return True
    return False


TRACKERS: dict[str, Callable[[str], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}
MODULES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}  # an extra has the name of its kind
PLACES = {"tensorboard": "folder", "mlflow": "tracking URI", "wandb": "project"}
CHECKS = {"tensorboard": _check_folder, "mlflow": _check_tracking_server, "wandb": _check_project}
