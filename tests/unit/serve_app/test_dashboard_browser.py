"""The live page in headless Chromium, over a real admin port with a stand-in for the actors."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, async_playwright, expect

from quadriga.ports import free_port
from serve_app.auth.api_keys import ApiKeys
from serve_app.auth.keys import ApiKey, digest
from serve_app.ops.admin import serve_admin
from tests.unit.serve_app.conftest import MakeStand
from tests.unit.serve_app.dashboard_views import busy_view, crowded_view, default_view

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
    # The driver's own pipes, which it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SHOTS = os.environ.get("QUADRIGA_SCREENSHOTS")
"""A folder; where it is named, each test leaves its pictures there."""


@dataclass(slots=True)
class Shown:
    """The page in a browser, and what it was not happy about."""

    page: Page
    view: dict[str, Any]
    complaints: list[str]
    foreign: list[str]

    async def shoot(self, name: str) -> None:
        if SHOTS is not None:
            await self.page.screenshot(path=str(Path(SHOTS) / f"{name}.png"), full_page=True)


Show = Callable[..., Awaitable[Shown]]


@pytest_asyncio.fixture
async def show(make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Show]:
    tasks: list[asyncio.Task[None]] = []
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        async def start(view: dict[str, Any], *, host: str = "127.0.0.1", **page: Any) -> Shown:
            port = free_port()
            keys = ApiKeys((ApiKey("ops", digest("boss"), is_admin=True),), is_http_open=False)
            stand = await make_stand(config={"admin.port": port, "admin.host": host}, keys=keys)

            async def operators_view() -> dict[str, Any]:
                return view

            monkeypatch.setattr(stand.cluster, "operators_view", operators_view)
            tasks.append(asyncio.ensure_future(serve_admin(stand.engine)))
            opened = await browser.new_page(**({"viewport": {"width": 1400, "height": 900}} | page))
            shown = Shown(opened, view, [], [])
            opened.on("console", lambda m: m.type == "error" and shown.complaints.append(m.text))
            opened.on("pageerror", lambda e: shown.complaints.append(str(e)))
            base = f"http://127.0.0.1:{port}"
            opened.on("request", lambda r: r.url.startswith(base) or shown.foreign.append(r.url))
            for _ in range(100):  # until the port is open
                try:
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
            await opened.goto(f"{base}/dashboard")
            return shown

        yield start
        await browser.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_it_shows_what_happens(show: Show) -> None:
    shown = await show(busy_view())
    page = shown.page
    await expect(page.locator("#state")).to_have_text("● live")
    await expect(page.locator("#replicas")).to_contain_text("decode 0")
    rows = page.locator("#replicas tr")
    assert await rows.count() == 3 + 5  # classes, replicas
    await expect(page.locator("#replicas")).to_contain_text("it has not reported yet")
    await expect(page.locator("#replicas [data-level=bad]")).to_contain_text("■")
    assert await page.locator("#moves tr").count() == 5
    await expect(page.locator("#moves")).to_contain_text("decode 0 was busier than decode 1")
    await expect(page.locator("#moves")).to_contain_text("moved, at rest for 18 ms")
    await expect(page.locator("#exits .exit").first).to_contain_text("2 layers")
    await expect(page.locator("#requests tr")).to_have_count(3)
    await expect(page.locator("#helios-panel")).to_be_hidden()
    await expect(page.locator("#quiet li")).to_have_count(1)
    await shown.shoot("busy")
    assert shown.complaints == []
    assert [url for url in shown.foreign if not url.startswith("data:")] == []


async def test_it_follows_and_pauses_by_keyboard(show: Show) -> None:
    shown = await show(busy_view(with_helios=True), color_scheme="dark")
    page = shown.page
    await expect(page.locator("#history tr")).to_have_count(2)
    await expect(page.locator("#helios-facts")).to_contain_text("12 of 128 tokens (9 %)")
    shown.view["mode"] = "load"
    await expect(page.locator("#summary")).to_contain_text("load")
    await shown.shoot("dark_with_helios")
    await page.keyboard.press("Space")
    await expect(page.locator("#state")).to_have_text("▲ paused")
    shown.view["mode"] = "off"
    await page.keyboard.press("Space")
    await expect(page.locator("#summary")).to_contain_text("off")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.id") == "pause"
    assert shown.complaints == []


async def test_names_are_text_and_never_markup(show: Show) -> None:
    view = busy_view()
    evil = "<img src=x onerror=alert(1)>"
    view["replicas"][0]["depth_class"] = evil
    view["recent"][0]["cause"] = evil
    view["missing"] = {evil: evil}
    shown = await show(view)
    await expect(shown.page.locator("#troubles")).to_contain_text(evil)
    await expect(shown.page.locator("#replicas")).to_contain_text(evil)
    assert await shown.page.locator("main img").count() == 0


async def test_off_loopback_it_asks_for_a_key(show: Show) -> None:
    shown = await show(busy_view(), host="0.0.0.0")
    page = shown.page
    await expect(page.locator("#login")).to_be_visible()
    await expect(page.locator("#replicas tr")).to_have_count(0)
    await shown.shoot("login")
    assert await page.evaluate("document.activeElement.id") == "key"
    await page.fill("#key", "wrong")
    await page.keyboard.press("Enter")
    await expect(page.locator("#state")).to_contain_text("■")
    await expect(page.locator("#login")).to_be_visible()
    await page.fill("#key", "boss")
    await page.keyboard.press("Enter")
    await expect(page.locator("#state")).to_have_text("● live")
    await expect(page.locator("#login")).to_be_hidden()


async def test_the_page_shows_that_no_answer_comes(show: Show) -> None:
    shown = await show(busy_view())
    await expect(shown.page.locator("#state")).to_have_text("● live")
    await shown.page.route("**/cluster", lambda route: route.abort())
    await expect(shown.page.locator("#state")).to_contain_text("last heard of", timeout=5000)
    await expect(shown.page.locator("#age")).to_contain_text("figures of")
    await expect(shown.page.locator("body")).to_have_class("stale")
    assert await shown.page.title() == "■ Quadriga"
    await shown.shoot("stale")
    await expect(shown.page.locator("#replicas")).to_contain_text("decode 0")  # the last it knew


async def test_it_comes_back_by_itself(show: Show) -> None:
    shown = await show(busy_view())
    page = shown.page
    await page.route(
        "**/cluster", lambda route: route.fulfill(status=502, body="<html>proxy</html>")
    )
    await expect(page.locator("#state")).to_contain_text("■ status 502", timeout=5000)
    await page.unroute("**/cluster")
    await expect(page.locator("#state")).to_have_text("● live", timeout=5000)
    await expect(page.locator("body")).not_to_have_class("stale")
    await expect(page.locator("#age")).to_be_empty()


async def test_an_answer_that_was_cut_off_is_not_shown_as_an_empty_service(show: Show) -> None:
    shown = await show(busy_view())
    page = shown.page
    await expect(page.locator("#state")).to_have_text("● live")
    await page.route("**/cluster", lambda route: route.fulfill(status=200, body='{"replicas": ['))
    await expect(page.locator("#state")).to_contain_text("■ the answer was cut off", timeout=5000)
    await expect(page.locator("#replicas")).to_contain_text("decode 0")  # the last it knew


async def test_two_hundred_replicas_can_be_looked_at(show: Show) -> None:
    shown = await show(crowded_view())
    page = shown.page
    rows = page.locator("#replicas tr")
    await expect(rows).to_have_count(1 + 2)
    await expect(page.locator("#replicas")).to_contain_text("■ silent for 9.0 s")
    await expect(page.locator("#troubles")).to_contain_text("decode 7 has not reported")
    await shown.shoot("crowd")
    more = page.locator("#replicas button")
    await expect(more).to_have_attribute("aria-expanded", "false")
    await more.focus()
    await page.keyboard.press("Enter")
    await expect(rows).to_have_count(1 + 200)
    shown.view["mode"] = "load"
    await expect(page.locator("#summary")).to_contain_text("load")  # shown anew
    assert await page.evaluate("document.activeElement.ariaExpanded") == "true", "focus stays"
    await page.fill("#find", "decode 117")
    await expect(rows).to_have_count(1 + 1)
    await page.fill("#find", "nobody")
    await expect(page.locator("#replicas")).to_contain_text("No replica is called like")
    assert shown.complaints == []


async def test_an_idle_service_is_shown_as_idle(show: Show) -> None:
    shown = await show({"at_unix_s": 0.0, "mode": "off", "replicas": [], "missing": {}})
    await expect(shown.page.locator("#replicas")).to_contain_text("No replica has reported yet")
    await expect(shown.page.locator("#quiet")).to_contain_text("rescheduling is off")
    for panel in ("charts", "exits", "decisions", "moves", "helios"):
        await expect(shown.page.locator(f"#{panel}-panel")).to_be_hidden()
    await shown.shoot("idle")
    assert shown.complaints == []


async def test_ten_minutes_are_drawn_with_their_gaps(show: Show) -> None:
    shown = await show(busy_view())
    page = shown.page
    charts = page.locator("#charts figure")
    await expect(charts).to_have_count(4)
    await expect(charts.nth(0)).to_contain_text("Tokens/s")
    assert await charts.nth(0).locator("polyline").count() == 2, "before the gap, and after it"
    assert await charts.nth(2).locator("polyline").count() == 4, "P50 and P99, twice"
    label = await charts.nth(2).locator("svg").get_attribute("aria-label")
    assert label is not None
    assert label.startswith("Time to first token of the last ten minutes. P50: ")
    assert await page.locator("output:not([aria-live=off])").count() == 0, "nobody reads them out"
    widths = [await charts.nth(k).evaluate("e => e.clientWidth") for k in range(4)]
    inner = [await charts.nth(k).locator("svg").evaluate("e => e.clientWidth") for k in range(4)]
    assert all(abs(a - b) <= 1 for a, b in zip(widths, inner, strict=True))
    assert shown.complaints == []


async def test_a_pointer_reads_all_charts_at_one_time(show: Show) -> None:
    shown = await show(busy_view())
    page = shown.page
    plots = page.locator("#charts .plot")
    await expect(plots).to_have_count(4)
    await plots.nth(0).hover(position={"x": 200, "y": 40})
    await expect(page.locator("#charts-at")).to_contain_text("ago")
    await expect(page.locator("#charts line.at")).to_have_count(4)
    await shown.shoot("pointed")
    await page.locator("h1").hover()
    await expect(page.locator("#charts-at")).to_be_empty()
    await expect(page.locator("#charts line.at")).to_have_count(0)
    assert shown.complaints == []


async def test_a_default_service_shows_no_empty_panels(show: Show) -> None:
    shown = await show(default_view())
    page = shown.page
    await expect(page.locator("#state")).to_have_text("● live")
    for panel in ("decisions", "moves", "helios"):
        await expect(page.locator(f"#{panel}-panel")).to_be_hidden()
    for column in await page.locator("th.future").all():
        await expect(column).to_be_hidden()
    await expect(page.locator("#replicas")).not_to_contain_text("no forecast")
    await expect(page.locator("#exits")).to_contain_text("at this load a full pass is cheaper")
    quiet = page.locator("#quiet li")
    await expect(quiet).to_have_count(2)
    await expect(quiet.nth(0)).to_have_text(
        "Moves: no moves yet, no forecasts: rescheduling is off, turn it on with "
        "scheduler.ares.mode=ares."
    )
    await shown.shoot("default")
    assert shown.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["busy", "default", "crowd"])
async def test_it_is_usable_on_a_phone(show: Show, name: str, scheme: str) -> None:
    view = {"busy": busy_view, "default": default_view, "crowd": crowded_view}[name]()
    shown = await show(view, viewport={"width": 390, "height": 800}, color_scheme=scheme)
    page = shown.page
    await expect(page.locator("#replicas")).to_contain_text("decode")
    await shown.shoot(f"phone_{name}_{scheme}")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    for box in await page.locator(".scroll").all():
        assert await box.evaluate("e => e.scrollWidth <= e.clientWidth"), "nothing is off screen"
    cells = page.locator("#replicas td[data-label='KV memory']")
    assert "KV memory" in await cells.first.evaluate("e => getComputedStyle(e, '::before').content")
    assert shown.complaints == []
