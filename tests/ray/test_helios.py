"""HELIOS end to end on both bundled models: profile, choose, serve a part, break, load more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray

from actors.lookup import controller_name, forget_actor, get_actor
from quadriga.config import load_config
from quadriga.errors import QuadrigaError
from serve_app.auth import ApiKeys
from serve_app.cluster import RayCluster
from serve_app.front import FrontDesk
from serve_app.http import HttpDoor
from serve_app.models import ModelDirectory
from tests.ray.apps import App
from tests.ray.ingress import call

FULL = {"quadriga-s": 8, "quadriga-l": 12}
EASY = "Count from 3 to 40.\n"
TIME_LIMIT_S = 150.0


@pytest.fixture(scope="module")
def choosing(ray_cluster: None) -> Iterator[App]:
    """One replica of each kind that serves and one scout of each; the whole bundled family."""
    app = App.start(
        "choosing",
        **{
            "decode_replicas": 1,
            "decode.max_slots": 8,
            "decode.rebatching": "drex",
            "engine.max_model_len": 512,
            "engine.threads": 1,
            "helios.enabled": True,
            "helios.profile_requests": 2,
            "helios.min_coverage": 0.3,
            "helios.min_unchanged": 0.0,
            "helios.dwell_loads": 0.0,
            "helios.breach_window_tokens": 60,
            "lifecycle.orphan_timeout_s": 300.0,
            "lifecycle.drain_timeout_s": 20.0,
        },
    )
    yield app
    app.stop()


class Door:
    """An ingress of its own in this process, over the real actors."""

    def __init__(self, app: App) -> None:
        config = load_config(app.config)
        self.desk = FrontDesk(
            config,
            ModelDirectory.load(config),
            ApiKeys(),
            RayCluster(app.name),
            ingress_id="test-ingress",
        )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(HttpDoor(self.desk).application()),
            base_url="http://localhost",
            timeout=120.0,
        )

    async def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"model": "quadriga-auto", "prompt": EASY, "max_tokens": 60, "temperature": 0}
        body |= {"ignore_eos": True}
        answer = await self.http.post("/v1/completions", json=body | fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def until(self, app: App, wanted: Any, **fields: Any) -> dict[str, Any]:
        """Send requests, three at once, until the machine is as wanted; none may fail."""
        give_up_s = time.monotonic() + TIME_LIMIT_S
        while True:
            await asyncio.gather(*(self.complete(**fields) for _ in range(3)))
            now = await asyncio.to_thread(history, app)
            if wanted(now):
                return now
            assert time.monotonic() < give_up_s, now


def history(app: App) -> dict[str, Any]:
    """What the admin port shows; waits for a controller that is just starting anew."""
    name = controller_name(app.name)
    give_up_s = time.monotonic() + 30.0
    while True:
        try:
            found: dict[str, Any] | None = call(name, "history", timeout_s=10.0)
            if found is not None:
                return found
        except QuadrigaError:
            forget_actor(name)
        assert time.monotonic() < give_up_s, "no controller"
        time.sleep(0.2)


def serving(now: dict[str, Any]) -> str:
    """What the decode replica that serves holds."""
    return str(now["places"]["decode:0"]["holds"])


def is_served(now: dict[str, Any]) -> bool:
    return now["target"] is not None and serving(now) == now["target"] and now["order"] is None


@pytest.mark.timeout(500)
@pytest.mark.slow
async def test_profile_choose_serve_break_and_load_more(choosing: App) -> None:
    door = Door(choosing)
    door.desk.start()
    try:
        # Almost everything may leave at the first exits.
        now = await door.until(choosing, is_served, exit_threshold=0.3)
        model, depth = now["target"].split("@")
        assert int(depth) < FULL[model], now
        assert now["counters"]["profiles"] == 2, "both models were profiled"
        assert {row["model"] for row in now["rows"]} == set(FULL)
        assert all(row["perplexity"] for row in now["rows"] if row["depth"] == FULL[row["model"]])

        answer = await door.complete(exit_threshold=0.3)
        spans = answer["usage"]["quadriga"]["spans"]
        assert sum(s["tokens"] for s in spans) == answer["usage"]["completion_tokens"]
        assert {s["model"] for s in spans} == {model}
        assert spans[-1]["depth"] == int(depth)

        # Nobody is sure enough any more.
        before = now["target"]
        now = await door.until(
            choosing, lambda n: is_served(n) and n["target"] != before, exit_threshold=0.99999
        )
        assert any("below" in str(d.get("reason")) for d in now["decisions"]), now["decisions"]

        await asyncio.sleep(4.0)  # not to pass: the history is kept every two seconds
        rows = {(r["model"], r["depth"]): r["requests"] for r in history(choosing)["rows"]}
        ray.kill(get_actor(controller_name(choosing.name)), no_restart=False)
        forget_actor(controller_name(choosing.name))
        later = await asyncio.to_thread(history, choosing)
        kept = {(r["model"], r["depth"]): r["requests"] for r in later["rows"]}
        assert kept and all(kept[key] >= 1 for key in rows if rows[key] >= 1), (rows, kept)
        assert (await door.complete())["usage"]["completion_tokens"] > 0
        admin = await door.desk.history()
        assert admin["rows"]
    finally:
        await door.desk.close()
        await door.http.aclose()
