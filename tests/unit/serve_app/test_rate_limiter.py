"""Keys with limits: each is kept to its own, in the client's format, and the file is read again."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from quadriga.clock import ManualClock
from quadriga.config.ingress import AuthConfig
from quadriga.errors import InvalidRequest, KeyLimitReached, Overloaded, Unauthenticated
from quadriga.observability.metrics import parse_exposition
from serve_app.auth.api_keys import ApiKeys
from serve_app.auth.keys import ApiKey, KeyLimits, digest
from serve_app.auth.rate_limiter import RateLimiter
from serve_app.grpc.server import GrpcServer
from serve_app.ops.metrics import IngressMetrics
from tests.unit.serve_app.conftest import MakeStand
from tests.unit.serve_app.test_grpc_server import Context, wants
from tests.waiting import until


def keys_of(**limits: KeyLimits) -> ApiKeys:
    """Keys that are their own names."""
    made = tuple(ApiKey(name, digest(name), limit) for name, limit in limits.items())
    return ApiKeys(made, is_http_open=False)


def gate_of(**limits: KeyLimits) -> tuple[RateLimiter, ManualClock]:
    clock = ManualClock(100.0)
    return RateLimiter(keys_of(**limits), clock, IngressMetrics("i")), clock


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_requests_per_second() -> None:
    gate, clock = gate_of(a=KeyLimits(requests_per_s=2), b=KeyLimits())
    for _ in range(2):
        gate.http_caller("Bearer a")
    with pytest.raises(KeyLimitReached, match="2 requests per second") as caught:
        gate.http_caller("Bearer a")
    assert caught.value.retry_after_s == pytest.approx(0.5)
    for _ in range(50):
        gate.http_caller("Bearer b")
    clock.advance(0.49)
    with pytest.raises(KeyLimitReached):
        gate.grpc_caller("Bearer a")
    clock.advance(0.02)
    gate.grpc_caller("Bearer a")
    clock.advance(3600)
    for _ in range(2):
        gate.http_caller("Bearer a")
    with pytest.raises(KeyLimitReached):  # an hour of silence saves nothing up
        gate.http_caller("Bearer a")


def test_a_slow_rate_lets_the_first_one_in() -> None:
    gate, clock = gate_of(a=KeyLimits(requests_per_s=0.1))
    gate.http_caller("Bearer a")
    with pytest.raises(KeyLimitReached) as caught:
        gate.http_caller("Bearer a")
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.advance(10)
    gate.http_caller("Bearer a")


def test_tokens_per_minute_are_waited_for() -> None:
    gate, clock = gate_of(a=KeyLimits(tokens_per_min=600))
    caller = gate.http_caller("Bearer a")
    gate.begin(caller, 500)
    gate.begin(caller, 50)
    gate.end(caller.name, 200)  # 150 in debt at ten a second
    with pytest.raises(KeyLimitReached, match="600 tokens per minute") as caught:
        gate.begin(caller, 1)
    assert caught.value.retry_after_s == pytest.approx(15)
    gate.end(caller.name, 0)
    clock.advance(15)
    gate.begin(caller, 1)


def test_a_new_limit_counts_at_once_and_what_runs_is_not_forgotten() -> None:
    gate, _ = gate_of(a=KeyLimits(concurrency=5))
    caller = gate.http_caller("Bearer a")
    for _ in range(3):
        gate.begin(caller, 1)
    gate.keys = keys_of(a=KeyLimits(concurrency=3))
    caller = gate.http_caller("Bearer a")
    with pytest.raises(KeyLimitReached, match="3 requests at once"):
        gate.begin(caller, 1)
    gate.end(caller.name, 0)
    gate.begin(caller, 1)


async def test_the_limit_in_both_clients_formats(make_stand: MakeStand) -> None:
    gate = asyncio.Event()
    stand = await make_stand(
        keys=keys_of(a=KeyLimits(concurrency=1), b=KeyLimits(concurrency=1)), gate=gate
    )
    first = asyncio.ensure_future(stand.complete(headers=bearer("a")))
    await until(lambda: stand.cluster.num_held == 1)
    refused = await stand.complete(headers=bearer("a"))
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "1"
    assert "x-should-retry" not in refused.headers
    context = Context("Bearer a")
    await GrpcServer(stand.engine).generate_once(wants(), context)
    assert context.code is not None
    assert context.code.name == "RESOURCE_EXHAUSTED"
    assert context.trailing["retry-after-ms"] == "1000"
    other = asyncio.ensure_future(stand.complete(headers=bearer("b")))
    gate.set()
    assert (await first).status_code == 200
    assert (await other).status_code == 200
    assert (await stand.complete(headers=bearer("a"))).status_code == 200


async def test_every_way_out_makes_room(make_stand: MakeStand) -> None:
    """Success, refusal, a bad request, a client that goes: the one slot is always free again."""
    stand = await make_stand(keys=keys_of(a=KeyLimits(concurrency=1)))
    for fields in ({}, {"max_tokens": -1}, {"echo": True, "max_tokens": 0}, {"deadline_ms": 1}):
        reply = await stand.complete(headers=bearer("a"), **fields)
        assert reply.status_code != 429, reply.text
    stand.cluster.gate = asyncio.Event()
    stream = GrpcServer(stand.engine).generate(wants(), Context("Bearer a"))
    await anext(stream)
    await stream.aclose()
    stand.cluster.gate.set()
    assert (await stand.complete(headers=bearer("a"))).status_code == 200


async def test_who_is_refused_pays_nothing(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=keys_of(a=KeyLimits(tokens_per_min=60)))
    for error in (Overloaded("full", retry_after_s=1.0), *[InvalidRequest("too large")] * 2):
        stand.cluster.refuse_admission = error
        refused = await stand.complete(headers=bearer("a"), prompt="hello " * 60)
        assert refused.json()["error"]["code"] == error.code, refused.text
    stand.cluster.refuse_admission = None
    assert (await stand.complete(headers=bearer("a"))).status_code == 200
    page = parse_exposition((await stand.engine.metrics_page()).decode())
    served = [
        page[key]
        for name in ("prompt_tokens_total", "e2e_request_latency_seconds_count")
        for key in page
        if key.startswith(f"vllm:{name}")
    ]
    assert served == [len(stand.engine.models.find("quadriga-s").tokenizer.encode("hi")), 1]


async def test_a_resumed_request_is_one_request(make_stand: MakeStand) -> None:
    """An abandoned stream keeps its place; taking it up again needs no second one."""
    gate = asyncio.Event()
    stand = await make_stand(keys=keys_of(a=KeyLimits(concurrency=1)), gate=gate)
    server = GrpcServer(stand.engine)
    stream = server.generate(wants(request_id="r1"), Context("Bearer a"))
    await anext(stream)
    await stream.aclose()
    context = Context("Bearer a")
    await server.generate_once(wants(request_id="r2"), context)
    assert context.trailing["quadriga-error-code"] == "rate_limit_exceeded"
    gate.set()
    context = Context("Bearer a")
    await server.generate_once(wants(request_id="r1"), context)
    assert context.code is None


async def test_the_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def write(*names: str) -> None:
        draft = tmp_path / "draft"
        draft.write_text("\n".join(ApiKey(n, digest(n)).line() for n in names))
        os.replace(draft, file)

    file = tmp_path / "keys"
    write("a", "b")
    gate = RateLimiter(
        ApiKeys.load(AuthConfig(api_keys_file=str(file))), ManualClock(), IngressMetrics("i")
    )
    await gate.reload()
    write("b", "c")
    await gate.reload()
    gate.http_caller("Bearer c")
    with pytest.raises(Unauthenticated):
        gate.http_caller("Bearer a")
    with caplog.at_level(logging.ERROR):
        file.write_text("a line that is none")
        await gate.reload()
        file.unlink()
        await gate.reload()
    errors = [r for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == 2
    gate.http_caller("Bearer c")
    write()  # no key is left, which does not open the API
    await gate.reload()
    for caller in (gate.http_caller, gate.grpc_caller):
        with pytest.raises(Unauthenticated):
            caller("Bearer c")
