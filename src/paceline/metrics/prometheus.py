"""The metrics of a job for Prometheus: in its text format, and served over HTTP from a thread of its own."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import math
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from paceline.metrics.errors import MetricsError
from paceline.metrics.histogram import Histogram
from paceline.metrics.job_metrics import Family, JobMetrics

if TYPE_CHECKING:
    from prometheus_client.core import CollectorRegistry, Metric

REQUEST_SECONDS = 10.0  # for a client to send its request and to take the answer
LAST_SECONDS = 1.0  # for the same, after the end of the job
MAX_CONNECTIONS = 16  # at the same time; more are closed at once
StartResponse = Callable[..., Any]
WebApp = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


class JobCollector:
    """A collector of prometheus-client: it converts the metrics whenever they are asked for."""

    def __init__(self, metrics: JobMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the job."""
        for family in self._metrics.families():
            yield _converted(family)


def registry_of(metrics: JobMetrics) -> CollectorRegistry:
    """Return a registry of prometheus-client that holds the metrics of this job, and no others."""
    from prometheus_client.core import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(JobCollector(metrics))
    return registry


def _converted(family: Family) -> Metric:
    from prometheus_client import core

    name, help, labels = family.name, family.help, family.labels
    if family.kind == "info":
        (values,) = family.values
        return core.InfoMetricFamily(name, help, value=dict(zip(labels, values, strict=True)))
    kinds: dict[str, Any] = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    metric: Any = kinds[family.kind](name, help, labels=labels)
    for each, value in family.values.items():
        if isinstance(value, Histogram):
            buckets = [
                ("+Inf" if bound == math.inf else str(float(bound)), count) for bound, count in value.cumulative()
            ]
            metric.add_metric(each, buckets, value.sum)
        else:
            metric.add_metric(each, value)
    return cast("Metric", metric)


def metrics_app(metrics: JobMetrics, token: bytes = b"") -> WebApp:
    """Return a WSGI application that answers GET /metrics, and nothing else.

    token: that a request must have as its bearer token. Without one, the name by which a request calls this machine
    must be an address or localhost, so that no web page reaches it by a name of its own.
    """
    registry = registry_of(metrics)
    from prometheus_client import make_wsgi_app

    exposition: WebApp = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        if token:
            if not hmac.compare_digest(_bearer_of(environ), token):
                return _refused(start, "401 Unauthorized", "Send the token for watching as a bearer token.")
        elif not _is_address(environ.get("HTTP_HOST", "")):
            return _refused(start, "403 Forbidden", "Ask for localhost or for an address.")
        if environ.get("PATH_INFO") != "/metrics":
            return _refused(start, "404 Not Found", "The metrics are at /metrics.")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _refused(start, "405 Method Not Allowed", "Only GET is possible.")
        return exposition(environ, start)

    return app


def _refused(start: StartResponse, status: str, text: str) -> Iterable[bytes]:
    extra = [("WWW-Authenticate", "Bearer")] if status.startswith("401") else []
    start(status, [("Content-Type", "text/plain; charset=utf-8"), *extra])
    return [f"{text}\n".encode()]


def _bearer_of(environ: dict[str, Any]) -> bytes:
    kind, _, value = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
    return value.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""


def _is_address(host: str) -> bool:
    """Return whether the Host of a request is an address, or the name that every machine gives itself."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class _MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """An HTTP server with a thread for each request, and a limit to the number and the length of requests.

    A connection is closed once its time is up, however it has been used, or at once if there are too many.
    """

    daemon_threads = True
    context: ssl.SSLContext | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._ends: dict[socket.socket, float] = {}  # open connection → when its time is up
        super().__init__(*arguments, **named)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # that of HTTPServer would ask the DNS for a name, maybe for seconds
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        request, address = super().get_request()
        if self.context:
            request = self.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._ends) < MAX_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        self._ends[request] = time.monotonic() + REQUEST_SECONDS
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if isinstance(request, ssl.SSLSocket):
            request.do_handshake()  # in the request's thread
        super().finish_request(request, client_address)

    def close_request(self, request: Any) -> None:
        try:
            super().close_request(request)
        finally:
            self._ends.pop(request, None)

    def service_actions(self) -> None:
        """Cut the connections whose time is up. The server calls this about twice a second."""
        for request, end in list(self._ends.items()):
            if time.monotonic() > end:
                self._cut(request)

    def server_close(self) -> None:
        """Stop listening. Answers that are on their way have LAST_SECONDS to arrive."""
        super().server_close()
        end = time.monotonic() + LAST_SECONDS
        while self._ends and time.monotonic() < end:
            time.sleep(0.01)
        for request in list(self._ends):
            self._cut(request)

    def _cut(self, request: socket.socket) -> None:
        """End a connection. Its thread, which may wait for it, then closes it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(request, socket.SHUT_RDWR)  # of an SSLSocket, this leaves the state of TLS alone

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that hung up or does not speak the protocol."""


class _MetricsServer6(_MetricsServer):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""


class MetricsServer:
    """Serves the metrics of a job at an address, until it is closed."""

    def __init__(
        self,
        metrics: JobMetrics,
        host: str = "127.0.0.1",
        port: int = 0,
        token: bytes = b"",
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Begin to serve. Raise MetricsError if that is not possible. token: see metrics_app. context: for TLS."""
        app = metrics_app(metrics, token)
        kind = _MetricsServer6 if ":" in host else _MetricsServer
        try:
            self._server = make_server(host, port, app, kind, _SilentHandler)
        except OSError as error:
            raise MetricsError(
                f"--metrics cannot listen on {host}:{port}: {error.strerror}; choose another port."
            ) from None
        self._server.context = context
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        try:
            self._server.shutdown()
        finally:
            self._server.server_close()
        self._thread.join()
