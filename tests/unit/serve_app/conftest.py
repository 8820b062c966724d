from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from quadriga.checkpoint.folder import ASSETS, read_checkpoint
from quadriga.config.loader import load_config
from quadriga.text import load_tokenizer
from serve_app.auth.api_keys import ApiKeys
from serve_app.http.server import HttpServer
from serve_app.openai.models import ModelDirectory, ServedModel
from serve_app.request.engine_client import EngineClient
from tests.fakes import FakeCluster

ANSWER = "Hello wörld 😀 and 12 more."
MODEL = ServedModel(
    read_checkpoint("quadriga-s"),
    load_tokenizer(ASSETS / "quadriga-s", "quadriga-s"),
    2048,
    depth=read_checkpoint("quadriga-s").num_layers,
)
END_ID = 0


@dataclass(slots=True)
class Stand:
    """An engine client over a fake cluster, and an HTTP client of its server."""

    engine: EngineClient
    cluster: FakeCluster
    http: httpx.AsyncClient

    async def complete(
        self, *, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"model": "quadriga-s", "prompt": "hi", "max_tokens": 100} | fields
        return await self.http.post("/v1/completions", json=body, headers=headers)


MakeStand = Callable[..., Awaitable[Stand]]


@pytest.fixture
def model() -> ServedModel:
    return MODEL


@pytest_asyncio.fixture
async def make_stand() -> AsyncIterator[MakeStand]:
    """Make stands, over a new cluster or a given one; other arguments go to `FakeCluster`."""
    made: list[Stand] = []

    async def make(
        *,
        config: dict[str, Any] | None = None,
        keys: ApiKeys | None = None,
        adapter: str = "",
        says: str = ANSWER,
        ingress_id: str = "ingress-0",
        cluster: FakeCluster | None = None,
        **fake: Any,
    ) -> Stand:
        script = [*MODEL.tokenizer.encode(says), END_ID]
        cluster = cluster or FakeCluster("quadriga-s", script, **fake)
        engine = EngineClient(
            load_config(config or {}),
            ModelDirectory([MODEL, replace(MODEL, adapter=adapter)] if adapter else [MODEL]),
            keys or ApiKeys(),
            cluster,
            ingress_id=ingress_id,
        )
        engine.start()
        app = HttpServer(engine).application()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        made.append(Stand(engine, cluster, client))
        return made[-1]

    yield make
    for stand in reversed(made):
        await stand.http.aclose()
        await stand.engine.close()


@pytest_asyncio.fixture
async def stand(make_stand: MakeStand) -> Stand:
    return await make_stand()
