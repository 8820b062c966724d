"""The page is shown whatever becomes of the copy that outlives the process."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.metrics.metrics_page import MetricsPage
from actors.rpc.ray_rpc import RAY_FAILED
from quadriga.clock import ManualClock, SystemClock
from quadriga.observability.load_history import INTERVAL_S
from quadriga.observability.metrics import Registry


class Store:
    """What is kept outside of the process, in a dictionary."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[str, bytes] = {}
        monkeypatch.setattr(
            "actors.controller.controller_store.load", lambda _, what: self.kept.get(what)
        )
        monkeypatch.setattr("actors.controller.controller_store.save", self.save)

    def save(self, app: str, what: str, value: bytes) -> None:
        self.kept[what] = value


FAILURES = [RayError("away"), RuntimeError("down"), ValueError("no such key"), OSError("reset")]


def test_store_failures_cover_every_error_that_ray_raises() -> None:
    assert {type(f) for f in FAILURES} == set(RAY_FAILED)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: type(f).__name__)
async def test_a_store_that_fails_costs_no_page(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr("actors.controller.controller_store.load", fail)
    monkeypatch.setattr("actors.controller.controller_store.save", fail)
    page = MetricsPage("app", SystemClock())
    await page.restore()
    assert page.is_restored.is_set()
    registry = Registry("one")
    registry.counter("quadriga_seen", "Things seen.").inc(3)
    page.push("one", registry.snapshot())
    assert b'quadriga_seen_total{replica="one"} 3' in await page.show()


def counting(tokens: int) -> bytes:
    registry = Registry("ingress")
    registry.counter("vllm:generation_tokens_total", "t", ["model_name"]).labels("m").inc(tokens)
    return registry.snapshot()


async def test_a_successor_shows_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    Store(monkeypatch)
    clock = ManualClock(1000 * INTERVAL_S)
    page = MetricsPage("app", clock)
    for tokens in (0, 50, 150):
        page.push("ingress", counting(tokens))
        page.history.sample(page.hub, now_s=clock.now_s(), now_unix_s=clock.unix_s())
        clock.advance(INTERVAL_S)
    await page.keep()
    successor = MetricsPage("app", clock)
    await successor.restore()
    shown = successor.history.columns(now_unix_s=clock.unix_s())
    assert shown == page.history.columns(now_unix_s=clock.unix_s())
    assert shown["tokens_per_s"][-2:] == [10, 20]
    clock.advance(2 * INTERVAL_S)
    successor.push("ingress", counting(1150))
    successor.history.sample(successor.hub, now_s=clock.now_s(), now_unix_s=clock.unix_s())
    tokens = successor.history.columns(now_unix_s=clock.unix_s())["tokens_per_s"]
    assert tokens[-5:] == [10, 20, None, None, None], "the time without a controller is a gap"


async def test_a_store_that_answers_late_gets_the_newest_values_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, begun = Store(monkeypatch), list[str]()
    may_write, is_begun = threading.Event(), threading.Event()
    monkeypatch.setattr("actors.metrics.metrics_page.KEEP_TIMEOUT_S", 0.05)

    def save(app: str, what: str, value: bytes) -> None:
        begun.append(what)
        is_begun.set()
        may_write.wait(20.0)
        store.save(app, what, value)

    monkeypatch.setattr("actors.controller.controller_store.save", save)
    page = MetricsPage("app", SystemClock())
    for tokens in (1, 2, 3):
        page.push("ingress", counting(tokens))
        assert f"}} {tokens}" in (await page.show()).decode(), "a scrape does not wait for it"
    assert await asyncio.to_thread(is_begun.wait, 20.0)
    assert begun == ["metrics"], "one writer, however many scrapes"
    monkeypatch.setattr("actors.metrics.metrics_page.KEEP_TIMEOUT_S", 20.0)
    may_write.set()
    await page.keep()
    await (successor := MetricsPage("app", SystemClock())).restore()
    assert "} 3" in (await successor.show()).decode()
    await page.close()
    store.kept.clear()
    await page.keep()
    assert not store.kept


async def test_a_damaged_copy_costs_the_past_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    store.kept["load_history"] = b"what is this"
    page = MetricsPage("app", SystemClock())
    await page.restore()
    assert page.is_restored.is_set()
    assert set(page.history.columns(now_unix_s=0.0)["tokens_per_s"]) == {None}


async def test_the_history_is_sampled_at_every_intervals_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Store(monkeypatch)
    clock = ManualClock(1000 * INTERVAL_S + 1.0)
    page = MetricsPage("app", clock)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds + 0.4)
        if len(slept) == 2:
            monkeypatch.setattr(page.history, "sample", fail)
        if len(slept) == 4:
            await page.close()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the sampling breaks")

    monkeypatch.setattr("actors.metrics.metrics_page.asyncio.sleep", sleep)
    await page.restore()
    await page.sample_forever()
    assert slept == pytest.approx([4.0, 4.6, 4.6, 4.6])
    assert len(json.loads(page.history.dump())) == 1
