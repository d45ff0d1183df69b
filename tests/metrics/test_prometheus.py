"""The endpoint for Prometheus: its text, and the requests that it refuses."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import parser

from metrics.test_job_metrics import EVENTS, values
from paceline.metrics import prometheus
from paceline.metrics.errors import MetricsError
from paceline.metrics.job_metrics import JobMetrics
from paceline.metrics.prometheus import MetricsServer
from paceline.observe.observer import replay
from paceline.serve.wire import certificates
from paceline.serve.wire.tls import Tls

parse_text: Any = parser.text_string_to_metric_families


@pytest.fixture
def metrics() -> JobMetrics:
    made = JobMetrics()
    replay(EVENTS, made)
    return made


@pytest.fixture
def server(metrics: JobMetrics) -> Iterator[MetricsServer]:
    served = MetricsServer(metrics)
    yield served
    served.close()


def get(port: int, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.core
def test_the_text_is_read_by_prometheus_own_parser_with_the_same_values(
    server: MetricsServer, metrics: JobMetrics
) -> None:
    status, text = get(server.port)
    assert status == 200
    families = {family.name: family for family in parse_text(text)}
    expected = {family.name.removesuffix("_total") for family in metrics.families()}
    assert set(families) == {name if name != "paceline_job" else "paceline_job_info" for name in expected}
    assert all(family.documentation for family in families.values())
    samples = {
        (each.name, *sorted(each.labels.items())): each.value for family in families.values() for each in family.samples
    }
    assert samples["paceline_job_info", ("apply", "whole"), ("policy", "r2sp")] == 1
    assert samples["paceline_updates_total", ("outcome", "discarded")] == 1
    assert samples["paceline_iteration_seconds_sum",] == values(metrics)["paceline_iteration_seconds sum"] == 16
    assert samples["paceline_iteration_seconds_bucket", ("le", "+Inf")] == 2
    assert samples["paceline_iteration_seconds_bucket", ("le", "5.0")] == 0
    assert samples["paceline_reported", ("metric", "accuracy")] == 0.75


def test_the_open_metrics_format_is_read_by_its_parser(server: MetricsServer) -> None:
    parse: Any = pytest.importorskip("prometheus_client.openmetrics.parser").text_string_to_metric_families

    status, text = get(server.port, Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert text.endswith("# EOF\n")
    assert len(list(parse(text))) > 20


def test_a_name_that_a_worker_sends_is_escaped(metrics: JobMetrics) -> None:
    name = 'a"b\\c\nd{x="1"} 5'
    metrics.measured(0.0, 0, name, 1.0)
    server = MetricsServer(metrics)
    try:
        _, text = get(server.port)
    finally:
        server.close()
    found = [each.labels for family in parse_text(text) for each in family.samples]
    assert {"metric": name} in found


@pytest.mark.parametrize(
    ("path", "method", "host", "status"),
    [
        ("/", "GET", "localhost", 404),
        ("/metrics", "POST", "localhost", 405),
        ("/metrics", "GET", "attacker.example", 403),
        ("/metrics", "GET", "attacker.example:9464", 403),
        ("/metrics", "GET", "localhost:9464", 200),
        ("/metrics", "GET", "[::1]:9464", 200),
    ],
)
def test_other_requests_are_refused(server: MetricsServer, path: str, method: str, host: str, status: int) -> None:
    assert get(server.port, path, method, Host=host)[0] == status


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer wrong", "Basic watch:1234", "bearer watch:12345"])
def test_without_the_token_for_watching_a_request_is_refused(metrics: JobMetrics, authorization: str) -> None:
    server = MetricsServer(metrics, token=b"watch:1234")
    try:
        refused = get(server.port, **({"Authorization": authorization} if authorization else {}))
        allowed = get(server.port, Authorization="Bearer watch:1234")
    finally:
        server.close()
    assert (refused[0], allowed[0]) == (401, 200)
    assert "paceline" not in refused[1]


def test_over_tls_the_job_shows_its_certificate(metrics: JobMetrics, tmp_path: Path) -> None:
    file = tmp_path / "certificate.pem"
    certificates.make(file)
    server = MetricsServer(metrics, token=b"watch:1", context=Tls(str(file), str(file)).listening())
    try:
        context = ssl.create_default_context(cafile=str(file))
        context.check_hostname = False
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20, context=context)
        connection.request("GET", "/metrics", headers={"Authorization": "Bearer watch:1"})
        assert connection.getresponse().read().startswith(b"# HELP")
        connection.close()
    finally:
        server.close()


def test_a_port_that_is_taken_is_one_sentence(server: MetricsServer, metrics: JobMetrics) -> None:
    with pytest.raises(MetricsError, match=r"--metrics cannot listen on 127\.0\.0\.1:\d+: .*; choose another port\.$"):
        MetricsServer(metrics, port=server.port)


@pytest.mark.core
@pytest.mark.parametrize("is_tls", [False, True])
def test_a_client_that_sends_slowly_is_cut_and_keeps_nobody_out_for_longer(
    metrics: JobMetrics, monkeypatch: pytest.MonkeyPatch, is_tls: bool, tmp_path: Path
) -> None:
    """It sends a byte now and then, so that no single wait is long."""
    monkeypatch.setattr(prometheus, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(prometheus, "MAX_CONNECTIONS", 2)
    file = tmp_path / "certificate.pem"
    certificates.make(file)
    server = MetricsServer(metrics, context=Tls(str(file), str(file)).listening() if is_tls else None)
    try:
        slow = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(2)]
        wait_until(lambda: len(server._server._ends) == 2)
        with socket.create_connection(("127.0.0.1", server.port), 20) as third:
            assert ended(third), "there is no place for a third one"
        end = time.monotonic() + 60
        while server._server._ends:  # the server cuts both
            assert time.monotonic() < end
            for each in slow:
                with contextlib.suppress(OSError):
                    each.send(b"\x16" if is_tls else b"G")
            time.sleep(0.05)
        for each in slow:
            assert ended(each)
            each.close()
        if not is_tls:
            assert get(server.port)[0] == 200
    finally:
        server.close()


@pytest.mark.core
def test_an_answer_that_is_on_its_way_arrives_although_the_job_ends(
    metrics: JobMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "LAST_SECONDS", 60.0)
    computing, closing = threading.Event(), threading.Event()
    families = metrics.families

    def slow() -> Iterator[Any]:
        computing.set()
        assert closing.wait(60)
        yield from families()

    server = MetricsServer(metrics)
    monkeypatch.setattr(metrics, "families", slow)
    answers = list[tuple[int, str]]()
    asking = threading.Thread(target=lambda: answers.append(get(server.port)))
    asking.start()
    assert computing.wait(60)
    ending = threading.Thread(target=server.close)
    ending.start()
    wait_until(lambda: server._server.socket.fileno() < 0)
    closing.set()
    asking.join()
    ending.join()
    assert answers[0][0] == 200
    assert "paceline_samples_total" in answers[0][1]


def ended(connection: socket.socket) -> bool:
    """Wait for the end of a connection. Return whether nothing but an alert came before it."""
    with contextlib.suppress(ConnectionError):
        return not connection.recv(100) or not connection.recv(100)
    return True


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
