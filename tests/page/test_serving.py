"""A page at a socket: its frames, the viewers that it refuses, and slow viewers."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from paceline.page import frames, guard
from paceline.page.app import AGAIN, TOO_MANY
from paceline.page.guard import FOREIGN_HOST, FOREIGN_ORIGIN, NO_TOKEN, PageGuard, RefusedRequest
from paceline.page.state import PageState
from paceline.serve.wire import certificates
from paceline.serve.wire.tls import Tls
from paceline.serve.wire.tokens import token_for
from page.test_state import a_job, one_iteration
from page.viewing import TIMEOUT, Served, password, recorded, report_of, served, state_of

TOKEN = b"a token of a job"
WATCH = token_for("watch", TOKEN).decode()
EVERYWHERE = "0.0.0.0"


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * TIMEOUT):
            await test()

    asyncio.run(main())


@pytest.mark.core
def test_the_stream_holds_the_figures_of_the_run() -> None:
    async def test() -> None:
        async with served(state_of(recorded("r2sp"))) as page, page.stream() as frame:
            first = await frame()
            assert first and first["full"]
            assert first["figures"]["updates"] == report_of(recorded("r2sp")).updates
            page.state.tell(one_iteration(0, 99, 1e4)[0])
            second = await frame()
            assert second and "full" not in second
            page.stop.set()
            last = second
            while (following := await frame()) is not None:
                last = following
            assert last["over"]

    run(test)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    async def test() -> None:
        async with served(state_of(a_job())) as page:
            answer = await page.get("/")
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert "http" not in answer.text.replace("http-equiv", "")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"

    run(test)


@pytest.mark.parametrize("path", ["/", "/events", "/elsewhere"])
@pytest.mark.parametrize(
    ("header", "status", "reason"),
    [
        ("Host: evil.example", 421, FOREIGN_HOST),
        ("Host: evil.example:8787", 421, FOREIGN_HOST),
        ("Host: 192.0.2.1:8787", 421, FOREIGN_HOST),
        ("Host: ", 421, FOREIGN_HOST),
        ("Origin: https://evil.example", 403, FOREIGN_ORIGIN),
        ("Origin: null", 403, FOREIGN_ORIGIN),
        ("Sec-Fetch-Site: cross-site", 403, FOREIGN_ORIGIN),
    ],
)
def test_a_request_for_another_host_or_from_another_origin_is_refused(
    path: str, header: str, status: int, reason: str
) -> None:
    async def test() -> None:
        async with served(state_of(a_job())) as page:
            answer = await page.get(path, header)
        assert (answer.status, answer.text) == (status, f"{reason}\n")
        assert "access-control-allow-origin" not in answer.headers

    run(test)


@pytest.mark.parametrize("host", ["127.0.0.1:8787", "localhost:9999", "LOCALHOST", "[::1]:8787", "127.0.0.1"])
def test_its_own_names_are_answered(host: str) -> None:
    """Also through a tunnel, at another port."""
    guard = PageGuard(b"", is_loopback=True)
    guard.check({"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}, is_data=True)


def test_a_link_elsewhere_may_lead_to_the_page_but_not_to_its_data() -> None:
    guard = PageGuard(b"", is_loopback=True)
    follows = {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    guard.check(follows, is_data=False)
    with pytest.raises(RefusedRequest):
        guard.check(follows, is_data=True)


@pytest.mark.core
@pytest.mark.parametrize("path", ["/", "/events", "/elsewhere"])
@pytest.mark.parametrize(
    "header",
    [
        "Accept: */*",
        password("another token"),
        password(token_for("worker", TOKEN).decode()),
        "Authorization: Bearer another",
        "Authorization: Basic !",
        "Authorization: Basic Ümlaut",
        "Authorization: Bearer Ümlaut",
        password("Ümlaut"),
        "Authorization: Digest x",
    ],
)
def test_without_the_token_a_page_for_others_is_refused(path: str, header: str) -> None:
    async def test() -> None:
        async with served(state_of(a_job()), EVERYWHERE, TOKEN) as page:
            answer = await page.get(path, header)
        assert (answer.status, answer.text) == (401, f"{NO_TOKEN}\n")
        assert answer.headers["www-authenticate"] == 'Basic realm="paceline"'

    run(test)


@pytest.mark.parametrize(
    "header",
    [password(TOKEN.decode()), password(TOKEN.hex()), password(WATCH), f"Authorization: Bearer {WATCH}"],
)
def test_with_the_token_it_is_answered(header: str) -> None:
    async def test() -> None:
        async with served(state_of(a_job()), EVERYWHERE, TOKEN) as page, page.stream(header) as frame:
            assert await frame()

    run(test)


def test_a_page_for_others_still_refuses_foreign_names() -> None:
    async def test() -> None:
        async with served(state_of(a_job()), EVERYWHERE, TOKEN) as page:
            assert (await page.get("/", "Host: evil.example", password(WATCH))).status == 421
            assert (await page.get("/", f"Host: {socket.gethostname()}:1", password(WATCH))).status == 200
            assert (await page.get("/", "Host: 192.0.2.1", password(WATCH))).status == 200

    run(test)


@pytest.mark.core
@pytest.mark.parametrize("host", ["127.0.0.1", EVERYWHERE])
def test_the_host_that_the_user_has_named_is_answered(host: str) -> None:
    async def test() -> None:
        async with served(state_of(a_job()), host, TOKEN, name="Trainer.example.org") as page:
            for name in ("trainer.example.org:8787", "TRAINER.example.org."):
                assert (await page.get("/", f"Host: {name}", password(WATCH))).status == 200
            assert (await page.get("/", "Host: example.org", password(WATCH))).status == 421

    run(test)


def test_the_names_of_the_machine_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = PageGuard(b"", is_loopback=False)
    monkeypatch.setattr(guard.socket, "getfqdn", lambda: pytest.fail("the DNS was asked for each request"))  # type: ignore[attr-defined]
    own.check({"host": socket.gethostname()}, is_data=True)
    PageGuard(b"", is_loopback=True)


def test_over_tls(tmp_path: Path) -> None:
    file = tmp_path / "page.pem"
    certificates.make(file)

    async def test() -> None:
        async with served(state_of(a_job()), EVERYWHERE, TOKEN, Tls(str(file), str(file))) as page:
            context = ssl.create_default_context(cafile=str(file))
            context.check_hostname = False
            reader, writer = await asyncio.open_connection("127.0.0.1", page.port, ssl=context)
            writer.write(f"GET / HTTP/1.1\r\nHost: localhost\r\n{password(WATCH)}\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    run(test)


@pytest.mark.core
def test_a_viewer_that_never_reads_delays_nobody() -> None:
    """Twenty viewers, one of which reads nothing: the others go on getting frames."""

    async def never_reads(page: Served) -> asyncio.StreamWriter:
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        held.setblocking(False)
        await asyncio.get_running_loop().sock_connect(held, (page.host, page.port))
        _, writer = await asyncio.open_connection(sock=held, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(f"GET /events HTTP/1.1\r\nHost: {page.host}\r\n\r\n".encode())
        return writer

    async def feed(state: PageState) -> None:
        iteration = 30
        while True:
            iteration += 1
            for event in one_iteration(iteration % 60, iteration, float(iteration)):
                state.tell(event)
            await asyncio.sleep(0.05)

    async def numbers_of(page: Served, frames: int) -> list[int]:
        async with page.stream() as frame:
            read = [await frame() for _ in range(frames)]
        return [each["n"] for each in read if each]

    async def test() -> None:
        async with served(state_of(a_job(workers=60, iterations=30)), tell=feed) as page:
            stuck = await never_reads(page)
            for seen in await asyncio.gather(*(numbers_of(page, 12) for _ in range(19))):
                assert len(seen) == 12
                assert seen == sorted(set(seen))
            stuck.transport.abort()

    run(test)


def test_a_trace_that_is_not_one_ends_the_page() -> None:
    async def fail(state: PageState) -> None:
        raise ValueError("no trace")

    async def test() -> None:
        with pytest.raises(ValueError, match="no trace"):
            async with served(state_of(a_job()), tell=fail):
                await asyncio.sleep(0.1)

    run(test)


@pytest.mark.core
def test_a_closed_page_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame is due to the page that is closed: it has all of them."""

    async def is_let_in(page: Served) -> bool:
        reader, writer = await page.open("/events")
        await reader.readuntil(b"\r\n\r\n")
        begin = await reader.readuntil(b": ")
        writer.close()
        return begin.endswith(b"data: ")

    monkeypatch.setattr(frames, "MAX_VIEWERS", 1)
    monkeypatch.setattr(frames, "SLOW", 1e6)

    async def test() -> None:
        async with served(state_of(a_job())) as page:
            async with page.stream() as frame:
                assert await frame()
                refused = await page.get("/events")
                assert refused.text == f"retry: {1000 * AGAIN}\nevent: refused\ndata: {TOO_MANY}\n\n"
                assert (refused.status, refused.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            while not await is_let_in(page):
                await asyncio.sleep(0.02)

    run(test)


def test_a_request_for_the_head_of_the_stream_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_VIEWERS", 1)

    async def test() -> None:
        async with served(state_of(a_job())) as page:
            reader, writer = await page.open("/events", method="HEAD")
            head = await reader.read()  # ends
            assert head.startswith(b"HTTP/1.1 200")
            assert b"text/event-stream" in head
            async with page.stream() as frame:
                assert await frame()
            writer.close()

    run(test)


def test_the_end_is_quiet_although_a_viewer_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    async def feed(state: PageState) -> None:
        iteration = 30
        while True:
            iteration += 1
            for event in one_iteration(iteration % 60, iteration, float(iteration)):
                state.tell(event)
            await asyncio.sleep(0.001)

    async def test() -> None:
        async with served(state_of(a_job(workers=60, iterations=30)), tell=feed) as page:
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            held.connect((page.host, page.port))
            held.send(f"GET /events HTTP/1.1\r\nHost: {page.host}\r\n\r\n".encode())
            async with page.stream() as frame:
                for _ in range(5):
                    assert await frame()
            strange = socket.create_connection((page.host, page.port))
            strange.send(b"no HTTP\r\n\r\n")
        held.close()
        strange.close()

    run(test)
    assert caplog.text == ""


def test_errors_of_the_page_are_seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug in the page")

    monkeypatch.setattr(frames.Frames, "enter", fail)

    async def test() -> None:
        async with served(state_of(a_job())) as page:
            assert (await page.get("/events")).status == 500

    run(test)
    assert "a bug in the page" in caplog.text
    assert "Uvicorn running" not in caplog.text
