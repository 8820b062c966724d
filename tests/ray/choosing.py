"""Applications whose models and depths are chosen: an ingress, decisions and history."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from actors.rpc.lookup import controller_name, forget_actor, get_actor
from quadriga.config.loader import load_config
from quadriga.core.replica import DepthClass
from quadriga.core.request import AUTO_MODEL
from quadriga.errors import QuadrigaError
from quadriga.policies.helios.history import HistoryTable, save_table
from quadriga.policies.helios.messages import RequestFinished
from serve_app.auth.api_keys import ApiKeys
from serve_app.http.server import HttpServer
from serve_app.openai.models import ModelDirectory
from serve_app.request.cluster_client import ClusterClient
from serve_app.request.engine_client import EngineClient
from tests.ray.apps import App
from tests.ray.ingress import call
from tests.waiting import wait_until

TIME_LIMIT_S = 150.0
EASY = "Count from 3 to 40.\n"
SURE, UNSURE = 0.3, 0.99999
"""Thresholds that almost every token passes at the first exits, and almost none."""


class OwnIngress:
    """An ingress of its own in this process, over the real actors."""

    def __init__(self, app: App, ingress_id: str = "") -> None:
        config = load_config(app.config)
        self.engine = EngineClient(
            config,
            ModelDirectory.load(config),
            ApiKeys(),
            ClusterClient(app.name),
            ingress_id=ingress_id or uuid.uuid4().hex,  # its reports are numbered
        )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(HttpServer(self.engine).application()),
            base_url="http://localhost",
            timeout=240.0,
        )

    async def __aenter__(self) -> OwnIngress:
        self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        await self.http.aclose()

    async def cut_off(self) -> None:
        """Leave everything as a killed process would: nobody is told, and nothing is freed."""
        await self.engine.tasks.close()
        self.engine.models.close()

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """Send a request, which may not fail."""
        body = {"model": AUTO_MODEL, "prompt": EASY, "max_tokens": 60, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True} | fields
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        assert found["usage"]["completion_tokens"] == body["max_tokens"]
        if body["model"] == AUTO_MODEL:
            assert sum(tokens for _, _, tokens in spans(found)) == body["max_tokens"]
        return found

    async def until(self, app: App, wanted: Wanted, **fields: Any) -> dict[str, Any]:
        """Send requests, three at once, until the machine is as wanted; none may fail."""
        give_up_s = time.monotonic() + TIME_LIMIT_S
        while True:
            await asyncio.gather(*(self.complete(**fields) for _ in range(3)))
            now = await asyncio.to_thread(history, app)
            if wanted(now):
                return now
            assert time.monotonic() < give_up_s, now


Wanted = Callable[[dict[str, Any]], bool]


def spans(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(model, layers loaded, tokens) of an answer's parts."""
    said = answer["usage"]["quadriga"].get("spans", [])
    return [(s["model"], s["depth"], s["tokens"]) for s in said]


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


def until(app: App, wanted: Wanted, timeout_s: float = 60.0) -> dict[str, Any]:
    """Wait, as an ingress would be heard of, until the machine is as wanted."""
    give_up_s = time.monotonic() + timeout_s
    while not wanted(now := history(app)):
        assert time.monotonic() < give_up_s, now
        call(controller_name(app.name), "ingress_heartbeat", "waiting")
        time.sleep(0.1)
    return now


def set_constant(actor: str, module: str, name: str, value: float) -> None:
    """Change a module's constant in an actor's process: a test has not so much time."""

    def change(_: Any) -> None:
        setattr(importlib.import_module(module), name, value)

    handle: Any = get_actor(actor)
    ray.get(handle.__ray_call__.remote(change), timeout=30)


def kill_controller(app: App) -> int:
    """Kill its process; Ray starts another. Returns the old one, which may answer for a while."""
    pid = _controller_pid(app)
    assert pid is not None
    ray.kill(get_actor(controller_name(app.name)), no_restart=False)
    forget_actor(controller_name(app.name))
    return pid


def is_another(app: App, old: int) -> bool:
    """Whether another process than this answers."""
    return _controller_pid(app) not in (None, old)


def until_another(app: App, old: int, timeout_s: float = 30.0) -> None:
    """Wait until a new process answers."""
    wait_until(lambda: is_another(app, old), timeout_s)


def _controller_pid(app: App) -> int | None:
    """The process that answers; None where none does."""
    name = controller_name(app.name)
    try:
        actor: Any = get_actor(name)
        found: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10)
        return found
    except (QuadrigaError, RayActorError, GetTimeoutError):
        forget_actor(name)
        return None


def holds(now: dict[str, Any], place: str = "decode:0") -> str | None:
    """What the replica of a place holds."""
    found: str | None = now["places"][place]["holds"] if place in now["places"] else None
    return found


def is_served(now: dict[str, Any]) -> bool:
    """Whether every place that serves holds what was chosen, and nothing is under way."""
    places = [p for p in now["places"].values() if not p["is_scout"]]
    return (
        now["target"] is not None
        and now["order"] is None
        and all(p["holds"] == now["target"] for p in places)
    )


def breaches(app: App) -> float:
    """Tokens below their threshold, of all replicas that run."""
    return app.metric("quadriga_breaches_total")


NUM_KNOWN = 5000


def write_history(path: Path, *tpots: tuple[DepthClass, float]) -> None:
    """Store a table that knows these classes and their seconds a token, so that none is profiled.

    Of the tokens nine in ten would leave at a model's second exit, and one in five at its first;
    perplexities are alike. So the fastest class is chosen for throughput. Each class is known from
    so many requests that what a partial depth serves in a test does not speak for the whole model.
    """
    table = HistoryTable()
    for at, tpot_s in tpots:
        first, second, full = {"quadriga-s": (2, 4, 8), "quadriga-l": (3, 6, 12)}[at.model]
        exits = {first: 100, second: 350, full: 50}
        if at.depth < full:
            exits = {first: 100, at.depth: 400}
        request = RequestFinished(
            replica="",
            depth_class=at,
            exit_tokens=exits,
            breaches=0 if at.depth == full else 50,
            nll=500 * math.log(1.05),
            scored_tokens=500,
            prompt_tokens=100,
            ttft_s=0.01,
            decode_s=499 * tpot_s,
        )
        for _ in range(NUM_KNOWN):
            table.add(request)
    save_table(path, table)
