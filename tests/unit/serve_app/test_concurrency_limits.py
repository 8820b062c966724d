"""Calls that last and are no generations are bounded, and a refused caller is known again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest
from grpc_health.v1 import health_pb2

from quadriga.core.routing import Admission, AdmitRequest
from quadriga.errors import Overloaded
from serve_app.auth.api_keys import ApiKeys
from serve_app.auth.rate_limiter import MAX_READERS, ConcurrencyLimiter
from serve_app.grpc import server as grpc_server
from serve_app.grpc.server import GrpcServer
from tests.unit.serve_app.conftest import ANSWER, MakeStand, Stand
from tests.unit.serve_app.test_engine_client import is_idle
from tests.unit.serve_app.test_grpc_server import KEYS, Context, wants
from tests.unit.serve_app.test_rate_limiter import bearer
from tests.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_place_is_given_back_on_every_way_out() -> None:
    limiter = ConcurrencyLimiter(1, "do a thing")
    with limiter.slot(), pytest.raises(Overloaded, match="1 calls at once do a thing"):
        limiter.slot().__enter__()
    with contextlib.suppress(ValueError), limiter.slot():
        raise ValueError
    assert limiter.num_taken == 0


@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize"])
async def test_slow_bodies_do_not_use_up_all_calls(stand: Stand, route: str) -> None:
    stand.engine.body_limiter = ConcurrencyLimiter(2, "send their bodies")
    whole = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"model": "quadriga-s", "prompt": '
        await whole.wait()
        yield b'"hi", "max_tokens": 100}' if route == "/v1/completions" else b'"hi"}'

    slow = [asyncio.ensure_future(stand.http.post(route, content=slowly())) for _ in range(2)]
    await until(lambda: stand.engine.body_limiter.is_full)
    refused = await stand.complete()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert (await stand.http.get("/health")).status_code == 200
    whole.set()
    assert [reply.status_code for reply in await asyncio.gather(*slow)] == [200, 200]
    assert (await stand.complete()).json()["choices"][0]["text"] == ANSWER


async def test_what_an_ingress_refuses_by_its_own_limits_is_counted(make_stand: MakeStand) -> None:
    gate, config = asyncio.Event(), {"ingress.max_ongoing_requests": 1}
    stand = await make_stand(gate=gate, config=config, keys=KEYS)
    running = asyncio.ensure_future(stand.complete())
    await until(lambda: bool(stand.cluster.decode.held))
    assert (await stand.complete()).status_code == 429
    await GrpcServer(stand.engine).generate_once(wants(), Context())
    stand.engine.body_limiter = ConcurrencyLimiter(0, "send their bodies")
    assert (await stand.http.post("/tokenize", json={"prompt": "a"})).status_code == 429
    assert stand.engine.metrics.refused.labels("ingress_full")._value.get() == 3
    gate.set()
    assert (await running).status_code == 200


async def test_of_too_many_health_watches_the_last_gets_the_state_once(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "HEALTH_WATCH_INTERVAL_S", 0.001)
    server = GrpcServer(stand.engine)
    server._watches = ConcurrencyLimiter(1, "watch")
    await until(lambda: server.health("").status == SERVING)
    first = server.watch("")
    assert (await anext(first)).status == SERVING
    news = asyncio.ensure_future(anext(first))
    await until(lambda: server._watches.is_full)
    assert [answer.status async for answer in server.watch("")] == [SERVING]
    stand.engine.drain(60.0)
    assert (await asyncio.wait_for(news, 60)).status == NOT_SERVING
    await first.aclose()
    assert server._watches.num_taken == 0


async def test_one_request_has_so_many_readers_at_once(make_stand: MakeStand) -> None:
    gate = asyncio.Event()
    stand = await make_stand(gate=gate)
    headers = {"idempotency-key": "k"}
    body = {"model": "quadriga-s", "prompt": "hi", "max_tokens": 100, "stream": True}

    def follow() -> asyncio.Future[httpx.Response]:
        sent = stand.http.post("/v1/completions", json=body, headers=headers)
        return asyncio.ensure_future(sent)

    readers = [follow() for _ in range(MAX_READERS)]
    await until(
        lambda: any(
            len(s.readers) == MAX_READERS for s in stand.engine._request_manager.open_requests()
        )
    )
    assert (await follow()).status_code == 429
    gate.set()
    for reader in readers:
        assert (await reader).text.endswith("data: [DONE]\n\n")
    await is_idle(stand)


async def test_a_refused_caller_is_known_again_by_what_it_asks(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=ApiKeys.of(["a" * 32, "b" * 32]))
    admit, asked, sizes = stand.cluster.admit, [], []

    async def note(requests: Sequence[AdmitRequest]) -> list[Admission]:
        asked.append(requests[0].visitor)
        sizes.append(len(requests))
        return await admit(requests)

    stand.cluster.admit = note  # type: ignore[method-assign]

    async def call(key: str = "a" * 32, name: str = "x", **fields: object) -> str:
        body = {"model": "quadriga-s", "prompt": "hi", "max_tokens": 100} | fields
        await stand.http.post(
            "/v1/completions",
            content=json.dumps(body),
            headers=bearer(key) | {"idempotency-key": name},
        )
        return asked[-1]

    first = await call()
    assert first == await call(name="y", deadline_ms=5000)
    others = [
        await call("b" * 32, name="z"),
        await call(name="p", prompt="ho"),
        await call(name="m", max_tokens=99),
        await call(name="n", priority=1),
    ]
    assert len({first, *others}) == 5
    server = GrpcServer(stand.engine)
    async for _ in server.generate(
        wants(prompt="hi", temperature=1.0, request_id="r"), Context(f"Bearer {'a' * 32}")
    ):
        pass
    by_grpc = asked[-1]
    async for _ in server.generate(
        wants(prompt="hi", temperature=1.0, request_id="s"), Context(f"Bearer {'a' * 32}")
    ):
        pass
    assert asked[-1] == by_grpc
    await call(name="two", prompt=["hi", "ho"], n=2)
    assert sizes == [1] * (len(sizes) - 1) + [4], "the choices of a request are asked for together"
