"""Every call is counted once, as what it ended in, however its client leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from quadriga.observability.metrics import parse_exposition
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.grpc.server import GrpcServer
from serve_app.http.call import Call
from serve_app.http.server import HttpServer
from serve_app.openai.rendering import COMPLETION
from tests.unit.serve_app.conftest import MakeStand, Stand
from tests.unit.serve_app.test_grpc_server import KEYS, Context, wants
from tests.waiting import until


async def counted(stand: Stand, server: str) -> dict[str, float]:
    series = parse_exposition((await stand.engine.metrics_page()).decode())
    begin = "quadriga_requests_total{"
    return {
        key.split('code="')[1].split('"')[0]: value
        for key, value in series.items()
        if key.startswith(begin) and f'door="{server}"' in key
    }


async def test_grpc_calls_whose_client_left(make_stand: MakeStand) -> None:
    gate = asyncio.Event()
    stand = await make_stand(keys=KEYS, gate=gate)
    server = GrpcServer(stand.engine)
    stream = server.generate(wants(), Context())
    await anext(stream)
    await stream.aclose()
    await until(lambda: stand.cluster.num_held == 0)
    once = asyncio.create_task(server.generate_once(wants(), Context()))
    await until(lambda: bool(stand.cluster.decode.held))
    once.cancel()
    await asyncio.wait({once})
    assert await counted(stand, "grpc") == {"CANCELLED": 2}
    gate.set()
    assert [m async for m in server.generate(wants(), Context())]
    await server.generate_once(wants(), Context())
    assert await counted(stand, "grpc") == {"CANCELLED": 2, "OK": 2}


async def test_grpc_calls_that_are_answered_at_once(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    server = GrpcServer(stand.engine)
    assert (await server.list_models(b"", Context())).models
    assert not (await server.list_models(b"", Context(None))).models
    await server.cancel(pb.CancelRequest(request_id="a").SerializeToString(), Context())
    await server.cancel(b"", Context())
    counts = {"OK": 2, "UNAUTHENTICATED": 1, "INVALID_ARGUMENT": 1}
    assert await counted(stand, "grpc") == counts


async def test_an_http_call_that_is_cancelled_before_its_answer(make_stand: MakeStand) -> None:
    """As Serve does with a request whose client is gone."""
    stand = await make_stand(gate=asyncio.Event())
    app: Any = HttpServer(stand.engine).application()
    body = json.dumps({"model": "quadriga-s", "prompt": "hi"}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()  # type: ignore[return-value]  # never returns

    async def send(message: Any) -> None:
        raise AssertionError("nothing is there to be said")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"",
        "query_string": b"",
        "headers": [],
        "root_path": "",
        "scheme": "http",
    }
    call = asyncio.create_task(app(scope, receive, send))
    await until(lambda: bool(stand.cluster.decode.held))
    call.cancel()
    await asyncio.wait({call})
    await until(lambda: stand.cluster.num_held == 0)
    assert await counted(stand, "http") == {"499": 1}
    hang_up = Mock()
    await Call(scope, AsyncMock(side_effect=KeyError), send).watch_disconnect(hang_up)
    hang_up.assert_called_once_with()


async def test_a_stream_that_our_own_fault_breaks_counts_as_500(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await make_stand()
    monkeypatch.setattr(COMPLETION, "events", None)
    with pytest.raises(TypeError):
        await stand.complete(stream=True)
    assert await counted(stand, "http") == {"500": 1}


async def test_a_stream_that_breaks_counts_as_what_broke_it(make_stand: MakeStand) -> None:
    stand = await make_stand(gate=asyncio.Event())
    asked = asyncio.create_task(stand.complete(stream=True, deadline_ms=100))
    await until(lambda: bool(stand.cluster.decode.held))
    reply = await asked
    assert reply.status_code == 200 and "deadline_exceeded" in reply.text
    assert (await stand.http.get("/health")).status_code == 200
    assert await counted(stand, "http") == {"504": 1}, "and no probe"
