"""The page in a real browser: it is read as a person reads it, and compared with the trace.

With PACELINE_PICTURES=FOLDER, the tests keep screenshots there: docs/pictures holds some of them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium here", allow_module_level=True)
playwright = pytest.importorskip("playwright.async_api")

from paceline.observe.observer import Recorder
from paceline.observe.trace import Arrived, Began, Event, Joined, Measured
from paceline.page import app, frames
from paceline.page.state import PageState
from paceline.policies import make
from paceline.serve.wire.tokens import token_for
from paceline.simulate import Cluster, limit_seconds, load_cluster
from page.test_state import a_job, one_iteration
from page.viewing import recorded, report_of, served, state_of

pytestmark = pytest.mark.slow
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PICTURES = os.environ.get("PACELINE_PICTURES")
TOKEN = b"a token of a job"
HOSTILE = "<script>document.body.dataset.harmed=1</script>"
IMAGE = "<img src=x onerror=document.body.dataset.harmed=1>"


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        started = await driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield started
        finally:
            await started.close()


@asynccontextmanager
async def looked_at(state: PageState, **look: Any) -> AsyncIterator[Any]:
    """The page of a state in a browser. Nothing may go wrong in it, and it may ask nobody else for anything."""
    errors: list[str] = []
    async with served(state) as page, browser() as started:
        context = await started.new_context(**({"viewport": {"width": 1200, "height": 800}} | look))
        tab = await context.new_page()
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        await tab.goto(page.url)
        await tab.wait_for_selector("#whole", state="attached")
        yield tab
        assert errors == []
        assert all(url.startswith((page.url, "data:")) for url in asked)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(main())


async def keep(tab: Any, name: str) -> None:
    if PICTURES:
        await tab.wait_for_timeout(500)
        await tab.screenshot(path=str(Path(PICTURES) / f"{name}.png"), full_page=True)


async def text(tab: Any, selector: str) -> str:
    return str(await tab.inner_text(selector))


async def compare(tab: Any, events: list[Event], state: PageState) -> None:
    """Compare the numbers on the page with the report of the trace."""
    report, whole = report_of(events), await tab.eval_on_selector("#whole", "row => ({...row.dataset})")
    assert float(whole["iterationSeconds"]) == pytest.approx(report.mean_iteration_seconds)
    assert float(whole["samplesPerSecond"]) == pytest.approx(report.samples_per_second)
    assert float(whole["meanStaleness"]) == pytest.approx(report.mean_staleness)
    assert (int(whole["maxStaleness"]), int(whole["updates"])) == (report.max_staleness, report.updates)
    cells = (await text(tab, "#whole")).split("\t")
    assert cells[1:] == [
        f"{report.mean_iteration_seconds:.3g} s",
        f"{report.samples_per_second:,.0f}",
        f"{report.mean_staleness:.1f} ≤{report.max_staleness}",
        f"{report.updates:,}",
    ]
    assert await text(tab, "[data-figure=updates]") == f"{report.updates:,}"
    assert (await text(tab, "[data-figure=recent_iteration_seconds]")) == (
        f"{state.situation().iteration_seconds:.3g} s"
    )
    for kind, share in state.situation().shares.items():
        shown = await tab.get_attribute(f"[data-share={kind}]", "data-value")
        assert float(shown) == pytest.approx(share)


async def colours(tab: Any, selector: str) -> dict[str, int]:
    """How many pixels of a canvas have each colour of an activity."""
    return dict(
        await tab.eval_on_selector(
            selector,
            """canvas => {
              const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, found = {};
              for (let at = 0; at < data.length; at += 4) {
                const parts = [...data.slice(at, at + 3)].map(each => each.toString(16).padStart(2, "0"));
                const colour = "#" + parts.join("");
                const kind = Object.keys(palette).find(name => palette[name] === colour);
                if (kind) found[kind] = (found[kind] || 0) + 1;
              }
              return found;
            }""",
        )
    )


@pytest.mark.core
@pytest.mark.parametrize("policy", ["bsp", "r2sp"])
def test_the_page_of_a_job(policy: str) -> None:
    spec = load_cluster("r2sp-a-vgg16")
    events: list[Event] = []
    recorder = Recorder(events.append)
    recorder.began(0.0, "VGG16 on 16 workers", policy, "whole", 0)
    Cluster(spec.with_jitter(0.05), make(policy), 30, 0, False, recorder).run()
    for number in range(40):
        recorder.measured(events[-1].time, number % 16, "accuracy", 0.9 - 0.8 / (1 + number))
    events = [
        event._replace(loss=0.05 + 2.2 * 0.99**at) if isinstance(event, Arrived) else event
        for at, event in zip(itertools.count(0, 0.1), events)
    ]
    # The metrics come at the times of the run, so that the curve has a shape.
    metrics = [event for event in events if isinstance(event, Measured)]
    events = [event for event in events if not isinstance(event, Measured)]
    for number, metric in enumerate(metrics):
        place = (number + 1) * len(events) // (len(metrics) + 1)
        events.insert(place, metric._replace(time=events[place].time))
    state = state_of(events, floors=[limit_seconds(spec, False)])

    async def test() -> None:
        async with looked_at(state) as tab:
            await compare(tab, events, state)
            assert await text(tab, "#health") == "Healthy: 16 workers train, none was lost."
            assert "the shortest that any policy allows here" in await text(tab, "#speed")
            helps = await text(tab, "#advice")
            assert helps.endswith("try r2sp.") if policy == "bsp" else helps.startswith("Nothing")
            assert "accuracy" in await text(tab, "#curves")
            found = await colours(tab, "#gantt")
            shares = state.situation().shares
            drawn = found["computing"] / (found["computing"] + found["pulling"])
            assert drawn == pytest.approx(shares["computing"] / (shares["computing"] + shares["pulling"]), abs=0.06)
            await keep(tab, f"page-{policy}")

    run(test)


def federation(clients: int) -> list[Event]:
    """A federation of simulated clients, under FL-R²SP."""
    spec = load_cluster("fl-cnn")
    many = replace(spec, workers=tuple(spec.workers[number % len(spec.workers)] for number in range(clients)))
    events: list[Event] = []
    recorder = Recorder(events.append)
    recorder.began(0.0, f"{clients:,} clients train a CNN", "fl-r2sp", "whole", 0)
    Cluster(many, make("fl-r2sp"), 6, 0, False, recorder).run()
    return events


@pytest.mark.core
def test_the_page_of_a_federation_of_a_thousand_clients() -> None:
    events = federation(1000)
    state = state_of(events)

    async def test() -> None:
        async with looked_at(state) as tab:
            await compare(tab, events, state)
            assert await text(tab, "#health") == "Healthy: 1,000 clients train, none was lost."
            assert await text(tab, "#crowd-title") == "How the 1,000 clients differ"
            charts = await tab.eval_on_selector_all("#histograms > div", "all => all.map(each => each.dataset.chart)")
            assert charts == [
                *("seconds per iteration", "staleness of updates", "updates of a client", "samples per update"),
            ]
            assert "1000 workers" not in await text(tab, "main")
            found = await colours(tab, "#gantt")
            assert found["computing"] > 10_000, "the area of clients that compute"
            await keep(tab, "page-federation")

    run(test)


def test_an_iteration_tells_its_times_and_a_worker_can_be_singled_out() -> None:
    state = state_of(a_job(workers=4))

    async def test() -> None:
        async with looked_at(state) as tab:
            place = await tab.eval_on_selector("#gantt", "canvas => canvas.getBoundingClientRect().toJSON()")
            await tab.mouse.move(place["x"] + place["width"] * 0.5, place["y"] + 36)
            told = await text(tab, "#tip")
            assert told.splitlines()[0].startswith("Worker 1, iteration ")
            for line in (
                "pulled the model: 0.2 s",
                "computed: 0.5 s",
                "waited to push: 0.1 s",
                "pushed its update: 0.2 s",
            ):
                assert line in told
            assert "batch of 32" in told
            assert "applied, 0 versions stale" in told
            await tab.mouse.click(place["x"] + place["width"] * 0.5, place["y"] + 36)
            assert (await text(tab, "#single-text")).startswith("Worker 1: waiting · iteration 10 · 1 s per iteration")
            await tab.click("#single-all")
            assert not await tab.is_visible("#single")
            await tab.mouse.move(0, 0)
            assert not await tab.is_visible("#tip")

    run(test)


@pytest.mark.core
def test_names_of_strangers_are_texts_and_nothing_else() -> None:
    """A worker, a metric, a policy, a cluster and a file that are named like HTML."""
    begin = Began(0.0, HOSTILE, f"asp:{HOSTILE}", IMAGE, 0)
    events: list[Event] = [begin, Joined(0.0, HOSTILE)]  # type: ignore[arg-type]
    for iteration in range(1, 10):
        events += one_iteration(HOSTILE, iteration, iteration - 1.0)  # type: ignore[arg-type]
        events.append(Measured(iteration, HOSTILE, IMAGE, 0.5))  # type: ignore[arg-type]
    state = state_of(events, title=f"{IMAGE}.jsonl")
    state.happenings.exclude(9.0, {HOSTILE: IMAGE})
    state.lose(f"The job cannot be watched: {IMAGE}.")

    async def test() -> None:
        async with looked_at(state) as tab:
            assert await text(tab, "#title") == f"{IMAGE}.jsonl"
            assert await tab.title() == f"{IMAGE}.jsonl · paceline"
            assert HOSTILE in await text(tab, "#policy")
            assert IMAGE in await text(tab, "#curves")
            assert f"Worker {HOSTILE} was excluded: {IMAGE}." in await text(tab, "#happenings")
            assert IMAGE in await text(tab, "#health")
            place = await tab.eval_on_selector("#gantt", "canvas => canvas.getBoundingClientRect().toJSON()")
            await tab.mouse.click(place["x"] + place["width"] * 0.4, place["y"] + 12)
            assert "<script>" in await text(tab, "#tip")
            assert "<script>" in await text(tab, "#single-text")
            assert await tab.eval_on_selector_all("main img, main script", "all => all.length") == 0
            assert await tab.evaluate("document.body.dataset.harmed") is None

    run(test)


def test_a_script_that_gets_into_the_page_does_not_run() -> None:
    """The second wall: the policy of the page lets only its own script run."""

    async def test() -> None:
        async with served(state_of(a_job())) as page, browser() as started:
            tab = await (await started.new_context()).new_page()
            await tab.goto(page.url)
            await tab.evaluate(
                """() => {
                  document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='document.body.dataset.harmed=1'>");
                  const script = document.createElement("script");
                  script.textContent = "document.body.dataset.harmed=1"; document.body.append(script);
                }"""
            )
            await tab.wait_for_timeout(300)
            assert await tab.evaluate("document.body.dataset.harmed") is None

    run(test)


def test_another_web_site_can_neither_read_nor_embed_the_page() -> None:
    async def test() -> None:
        async with served(state_of(a_job())) as page, browser() as started:
            tab = await (await started.new_context()).new_page()

            async def foreign(route: Any) -> None:
                await route.fulfill(body="<!doctype html><title>another site</title>", content_type="text/html")

            await tab.route("http://other.example/*", foreign)
            await tab.goto("http://other.example/")
            read = await tab.evaluate(
                "url => fetch(url + 'events', {mode: 'cors'}).then(() => 'read', () => 'refused')", page.url
            )
            assert read == "refused"
            await tab.evaluate(
                """url => new Promise(done => {
                  const frame = document.createElement("iframe");
                  frame.src = url; frame.onload = done; document.body.append(frame);
                })""",
                page.url,
            )
            (inside,) = [frame for frame in tab.frames if frame != tab.main_frame]
            assert "Is it healthy?" not in await inside.content()

    run(test)


def test_a_page_for_others_asks_for_the_token() -> None:
    """A browser asks its user for a password, and gives it with every request, also with the stream of frames."""

    async def test() -> None:
        async with served(state_of(a_job()), "0.0.0.0", TOKEN) as page, browser() as started:
            without = await started.new_context()
            assert (await without.request.get(page.url)).status == 401
            watch = {"username": "", "password": token_for("watch", TOKEN).decode()}
            tab = await (await started.new_context(http_credentials=watch)).new_page()
            await tab.goto(page.url)
            await tab.wait_for_selector("#whole", state="attached")
            assert await text(tab, "#health") == "Healthy: 2 workers train, none was lost."

    run(test)


def test_dark_and_on_a_phone() -> None:
    """The page takes the colours of the system, and nothing is wider than a phone."""
    state = state_of([*recorded("bsp"), *recorded("r2sp")])

    async def test() -> None:
        phone = {"viewport": {"width": 375, "height": 800}, "color_scheme": "dark", "is_mobile": True}
        async with looked_at(state, **phone) as tab:
            assert await tab.evaluate("document.documentElement.scrollWidth") == 375
            assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 24)"
            await keep(tab, "page-phone")

    run(test)


def test_the_page_moves_on_and_tells_the_end() -> None:
    state = PageState()
    for event in a_job():
        state.tell(event)

    async def test() -> None:
        async with served(state) as page, browser() as started:
            tab = await (await started.new_context()).new_page()
            await tab.goto(page.url)
            await tab.wait_for_selector("#whole[data-updates='20']", state="attached")
            for event in one_iteration(0, 11, 10.0):
                state.tell(event)
            await tab.wait_for_selector("#whole[data-updates='21']", state="attached")
            page.stop.set()
            await tab.wait_for_function("document.querySelector('#foot').textContent.includes('last picture')")
            assert await text(tab, "#health") == "Done: 21 updates."

    run(test)


@pytest.mark.core
def test_a_viewer_that_is_too_many_reads_why_and_is_let_in_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_VIEWERS", 1)
    monkeypatch.setattr(app, "AGAIN", 1)

    async def test() -> None:
        async with served(state_of(a_job())) as page, browser() as started:
            context = await started.new_context()
            first, second = await context.new_page(), await context.new_page()
            await first.goto(page.url)
            await first.wait_for_selector("#whole", state="attached")
            await second.goto(page.url)
            await second.wait_for_function("document.querySelector('#health').textContent.startsWith('Too many')")
            await asyncio.sleep(0.2)  # the answer has ended
            assert await text(second, "#foot") == await text(second, "#health") == app.TOO_MANY
            await first.close()
            await second.wait_for_selector("#whole", state="attached")
            assert await text(second, "#foot") == ""

    run(test)


def test_the_page_of_a_federation_says_clients() -> None:
    async def test() -> None:
        async with looked_at(state_of(a_job(policy="fl-r2sp"))) as tab:
            place = await tab.eval_on_selector("#gantt", "canvas => canvas.getBoundingClientRect().toJSON()")
            await tab.mouse.click(place["x"] + place["width"] * 0.4, place["y"] + 12)
            assert (await text(tab, "#tip")).startswith("Client 0, iteration ")
            assert (await text(tab, "#single-text")).startswith("Client 0: ")
            assert "orker" not in await text(tab, "body")

    run(test)
