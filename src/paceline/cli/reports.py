"""`--metrics` and `--log`: the numbers of a job, where people keep them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.listening import announce, host_and_port, url_of
from paceline.cli.shared import need, refuse, sentence
from paceline.observe.observer import Observer, Tee

if TYPE_CHECKING:
    from paceline.metrics.background import BackgroundTracker
    from paceline.metrics.prometheus import MetricsServer
    from paceline.metrics.targets import LogTarget
    from paceline.serve.wire.tls import Tls

Metrics = Annotated[
    str | None, typer.Option(metavar="[HOST:]PORT", help="Serve metrics for Prometheus at /metrics on this port.")
]
Log = Annotated[
    list[str] | None,
    typer.Option(metavar="TARGET", help="Log curves: tensorboard:DIR, mlflow:URI or wandb:PROJECT; may be repeated."),
]


@dataclass(frozen=True)
class MetricsAddress:
    """The address at which metrics are served, and the token that a request must show there."""

    host: str
    port: int
    token: bytes = b""
    tls: Tls | None = None


@dataclass(frozen=True)
class Reports:
    """The reports that the options ask for."""

    address: MetricsAddress | None = None
    targets: tuple[LogTarget, ...] = ()
    parameters: dict[str, object] = field(default_factory=dict)  # of the run

    @classmethod
    def of(
        cls,
        metrics: str | None,
        log: list[str] | None,
        parameters: dict[str, object],
        *,
        token_file: Path | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> Reports:
        """Return what the options say. Refuse what cannot be had, before anything is started."""
        from paceline.metrics.errors import MetricsError
        from paceline.metrics.targets import LogTarget

        try:
            targets = tuple(LogTarget.parse(text) for text in log or ())
            if metrics is not None:
                need("prometheus_client", "--metrics", "prometheus")
            address = None if metrics is None else _address(metrics, token_file, tls, insecure)
            for target in targets:
                need(target.module, f"--log {target.kind}", target.kind)
                target.check()
        except MetricsError as error:
            refuse(str(error))
        return cls(address, targets, parameters)


class RunningReports:
    """The server of metrics and the logs of one job. Its observer must be told of every event."""

    def __init__(
        self, asked: Reports, policy: str, is_stalled: Callable[[], bool], warn: Callable[[str], None]
    ) -> None:
        self.observer = Observer()
        self._server: MetricsServer | None = None
        self._logs: list[BackgroundTracker] = []
        if asked.address:
            self._serve(asked.address, policy, is_stalled)
        if asked.targets:
            self._log(asked, policy, warn)

    def close(self, failed: bool) -> None:
        """Stop serving, and complete the logs. failed: whether the job did not come to its end."""
        for log in self._logs:
            log.close(failed)
        if self._server:
            self._server.close()
        self._logs, self._server = [], None

    def _serve(self, address: MetricsAddress, policy: str, is_stalled: Callable[[], bool]) -> None:
        from paceline.metrics.errors import MetricsError
        from paceline.metrics.job_metrics import JobMetrics
        from paceline.metrics.prometheus import MetricsServer

        metrics = JobMetrics(policy, is_stalled)
        context = address.tls.listening() if address.tls else None
        try:
            self._server = MetricsServer(metrics, address.host, address.port, address.token, context)
        except MetricsError as error:
            refuse(str(error))
        announce("Metrics", url_of(address.host, self._server.port, address.tls, "/metrics"), address.tls)
        self.observer = Tee(self.observer, metrics)

    def _log(self, asked: Reports, policy: str, warn: Callable[[str], None]) -> None:
        from paceline.metrics.background import BackgroundTracker
        from paceline.metrics.errors import MetricsError

        parameters = {**asked.parameters, "policy": policy}
        script = Path(str(parameters.get("script", "job"))).stem
        run = f"{script}-{policy.partition(':')[0]}-{time.strftime('%Y%m%d-%H%M%S')}"
        for target in asked.targets:
            log = BackgroundTracker(target.tracker(), run, parameters, warn)
            self._logs.append(log)
            self.observer = Tee(self.observer, log)
        try:
            for log in self._logs:
                log.wait_until_begun()
        except MetricsError as error:
            self.close(failed=True)
            refuse(sentence(error))


def _address(text: str, token_file: Path | None, tls: Tls | None, insecure: bool) -> MetricsAddress:
    """Return the address that --metrics names. Any address but loopback needs a token and TLS, as the job's own."""
    from paceline.cli.connection import token_of
    from paceline.metrics.errors import MetricsError
    from paceline.serve.environment import TOKEN_FILE
    from paceline.serve.wire.endpoint import is_loopback

    host, port = host_and_port(text, "--metrics", 9464)
    if is_loopback(host):
        return MetricsAddress(host, port)
    token = token_of(token_file)
    if not token:
        raise MetricsError(
            f"--metrics at {host} can be reached by others and needs a token: name the job's token file in "
            f"{TOKEN_FILE}, and give Prometheus the token that `paceline token --role watch` prints."
        )
    if not tls and not insecure:
        raise MetricsError(
            f"--metrics at {host} without TLS shows the token to the network: give --tls-cert and --tls-key with a "
            "certificate that names this host, or --insecure if nobody else can reach this network."
        )
    return MetricsAddress(host, port, token_of(token_file, "watch"), tls)
