"""When an ingress is gone, another one takes over what still runs, for its owner only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from quadriga.config.loader import load_config
from quadriga.core.output import PollReply
from quadriga.core.request import ResumableSequence, token_digest
from serve_app.auth.api_keys import ApiKeys
from serve_app.grpc.server import GrpcServer
from serve_app.http.server import HttpServer
from serve_app.openai.models import ModelDirectory
from serve_app.request.engine_client import EngineClient
from tests.unit.serve_app.conftest import ANSWER, MODEL, MakeStand, Stand
from tests.unit.serve_app.test_grpc_server import KEYS, Context, wants

BODY = {"prompt": "hi", "max_tokens": 100, "stream": True, "return_token_ids": True}
HAD = 6


@asynccontextmanager
async def another(
    stand: Stand, keys: ApiKeys | None = None, *, is_alone: bool = True
) -> AsyncIterator[Stand]:
    """A second ingress over the same cluster.

    Args:
        is_alone: The first one has died without a word.
    """
    if is_alone:
        await stand.engine.tasks.close()
    engine_client = EngineClient(
        load_config({}),
        ModelDirectory([MODEL]),
        keys or ApiKeys(),
        stand.cluster,
        ingress_id="ingress-1",
    )
    engine_client.start()
    app = HttpServer(engine_client).application()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        yield Stand(engine_client, stand.cluster, client)
    await engine_client.close()


async def begin(
    stand: Stand, headers: dict[str, str], gate: asyncio.Event, body: dict[str, Any] = BODY
) -> None:
    """Have a request decode until the client has `HAD` tokens; then it stands still."""
    reading = asyncio.ensure_future(
        stand.http.post("/v1/completions", json=body, headers=headers, timeout=30)
    )
    gate.set()
    async with asyncio.timeout(5.0):
        while not any(n >= HAD for n in stand.cluster.num_said.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    gate.clear()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


def frames(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    return [json.loads(f[6:]) for f in reply.text.strip().split("\n\n")[:-1]]


@pytest.fixture
def gate() -> asyncio.Event:
    return asyncio.Event()


async def test_an_http_client_resumes_at_another_ingress(
    make_stand: MakeStand, gate: asyncio.Event
) -> None:
    first = await make_stand(gate=gate, step_s=0.001)
    headers = {"idempotency-key": "k"}
    await begin(first, headers, gate)
    async with another(first) as stand:
        gate.set()
        reply = await stand.http.post(
            "/v1/completions", json=BODY, headers=headers | {"x-resume-index": str(HAD)}
        )
        choices = [f["choices"][0] for f in frames(reply)]
        assert "".join(c["text"] for c in choices) == ANSWER[HAD:]
        tokens = [t for c in choices for t in c["token_ids"]]
        assert tokens == stand.cluster.script[HAD:]
        assert len(stand.cluster.submitted) == 1, "nothing was computed again"
        assert stand.cluster.num_orphan_calls == 1
        page = stand.engine.metrics.registry.snapshot()
        assert b"adopted" in page


async def test_a_reader_at_the_former_ingress_gets_an_error_and_may_resume(
    make_stand: MakeStand, gate: asyncio.Event
) -> None:
    """Two connections follow one request, at two ingresses that both live."""
    first = await make_stand(gate=gate, step_s=0.001)
    headers = {"idempotency-key": "k"}
    resumed = headers | {"x-resume-index": str(HAD)}
    await begin(first, headers, gate)

    def follow(stand: Stand) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(
            stand.http.post("/v1/completions", json=BODY, headers=resumed, timeout=30)
        )

    async with asyncio.timeout(20.0), another(first, is_alone=False) as second:
        here = follow(first)
        while not any(s.readers for s in first.engine.requests._by_key.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        there = follow(second)
        assert '"code": "taken_over"' in (await here).text
        assert not there.done()
        again = follow(first)  # the earlier error is not repeated
        assert '"code": "taken_over"' in (await there).text
        gate.set()
        text = "".join(f["choices"][0]["text"] for f in frames(await again))
        assert text == ANSWER[HAD:]
        assert len(first.cluster.submitted) == 1, "nothing was computed again"


async def test_an_ingress_that_ends_leaves_alone_what_another_one_has_adopted(
    make_stand: MakeStand, gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's connection broke; the first ingress lives on for a while, and hears nothing."""
    monkeypatch.setattr("serve_app.request.request_manager.AUDIT_AFTER_S", 0.1)
    first = await make_stand(gate=gate, step_s=0.001)
    headers = {"idempotency-key": "k"}
    cluster, adopted = first.cluster, asyncio.Event()
    poll, adopt, is_deaf = cluster.poll, cluster.adopt, False

    async def fetched(replica: str, ingress_id: str, *args: Any) -> PollReply:
        reply = await poll(replica, ingress_id, *args)
        if is_deaf and ingress_id != "ingress-1":
            await asyncio.Event().wait()
        return reply

    monkeypatch.setattr(cluster, "poll", fetched)
    await begin(first, headers, gate)
    is_deaf = True

    async def noticed(*args: Any) -> bool:
        is_there = await adopt(*args)
        adopted.set()
        return is_there

    monkeypatch.setattr(cluster, "adopt", noticed)
    async with another(first, is_alone=False) as stand:
        reading = asyncio.ensure_future(
            stand.http.post(
                "/v1/completions", json=BODY, headers=headers | {"x-resume-index": str(HAD)}
            )
        )
        async with asyncio.timeout(5.0):
            await adopted.wait()
        await first.engine.close()
        assert cluster.decode.cancelled == [cluster.submitted[0].sequence_id], "it tried"
        gate.set()
        text = "".join(f["choices"][0]["text"] for f in frames(await reading))
        assert text == ANSWER[HAD:]
        assert len(cluster.submitted) == 1, "nothing was computed again"
        assert cluster.num_held == 0


async def test_an_adoption_that_fails_in_any_way_ends_the_request(
    make_stand: MakeStand, gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the replica has heard of it is not known: what runs there is freed."""
    first = await make_stand(gate=gate, step_s=0.001)
    headers = {"idempotency-key": "k"}
    await begin(first, headers, gate)

    async def adopt(*_: Any) -> bool:
        raise MemoryError

    monkeypatch.setattr(first.cluster, "adopt", adopt)
    async with another(first) as stand:
        async with asyncio.timeout(5.0):
            reply = await stand.http.post(
                "/v1/completions", json=BODY, headers=headers | {"x-resume-index": str(HAD)}
            )
        assert reply.status_code == 404, reply.text
        async with asyncio.timeout(5.0):
            while stand.cluster.num_held:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_a_sequence_that_is_moving_is_looked_for_again(
    make_stand: MakeStand, gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its way between two replicas it is at neither; that is no reason to say it is lost."""
    monkeypatch.setattr("serve_app.request.engine_client.RESUME_PAUSE_S", 0.001)
    first = await make_stand(gate=gate, step_s=0.001)
    headers = {"idempotency-key": "k"}
    await begin(first, headers, gate)
    async with another(first) as stand:
        find, calls = stand.cluster.find_resumable, 0

        async def late(claims: Sequence[str]) -> list[ResumableSequence]:
            nonlocal calls
            calls += 1
            if calls == 1:
                return []
            gate.set()
            return await find(claims)

        monkeypatch.setattr(stand.cluster, "find_resumable", late)
        reply = await stand.http.post(
            "/v1/completions", json=BODY, headers=headers | {"x-resume-index": str(HAD)}
        )
        text = "".join(f["choices"][0]["text"] for f in frames(reply))
        assert text == ANSWER[HAD:]
        assert calls == 2


async def test_the_sdk_resumes_at_another_ingress(
    make_stand: MakeStand, gate: asyncio.Event
) -> None:
    first = await make_stand(gate=gate, keys=KEYS, step_s=0.001)
    stream = GrpcServer(first.engine).generate(wants(request_id="r"), Context())
    gate.set()
    had: list[int] = []
    while len(had) < HAD:
        had += [t for d in (await anext(stream)).choices for t in d.token_ids]
    gate.clear()
    async with another(first, KEYS) as stand:
        gate.set()
        again = wants(request_id="r", resume_from=[len(had)], resume_digest=[token_digest(had)])
        rest = [m async for m in GrpcServer(stand.engine).generate(again, Context())]
        assert had + [t for m in rest for d in m.choices for t in d.token_ids] == (
            stand.cluster.script
        )
        assert len(stand.cluster.submitted) == 1
    await stream.aclose()


@pytest.mark.parametrize(
    "other",
    [
        {"key": "another"},
        {"json": {"prompt": "ho"}},
        {"headers": {"authorization": "Bearer b"}},
    ],
)
async def test_a_sequence_is_adopted_only_by_its_owner(
    make_stand: MakeStand, gate: asyncio.Event, other: dict[str, Any]
) -> None:
    keys = ApiKeys.of(["a", "b"])
    first = await make_stand(gate=gate, keys=keys, step_s=0.001)
    headers = {"idempotency-key": "k", "authorization": "Bearer a"}
    await begin(first, headers, gate)
    async with another(first, keys) as stand:
        asking = headers | other.get("headers", {}) | {"x-resume-index": str(HAD)}
        asking["idempotency-key"] = other.get("key", "k")
        reply = await stand.http.post(
            "/v1/completions", json=BODY | other.get("json", {}), headers=asking
        )
        assert reply.status_code == 404
        assert len(stand.cluster.submitted) == 1


async def test_what_is_lost_on_the_way_is_an_error_or_begun_anew(
    make_stand: MakeStand, gate: asyncio.Event
) -> None:
    """Over HTTP the answers cannot be compared; over gRPC a digest compares them."""
    first = await make_stand(gate=gate, keys=KEYS, step_s=0.001)
    headers = {"idempotency-key": "k", "authorization": "Bearer one"}
    await begin(first, headers, gate)
    stream = GrpcServer(first.engine).generate(wants(request_id="r"), Context())
    await anext(stream)
    first.cluster.loses_orphans = True
    async with another(first, KEYS) as stand:
        reply = await stand.http.post(
            "/v1/completions", json=BODY, headers=headers | {"x-resume-index": str(HAD)}
        )
        assert reply.status_code == 404, reply.text
        gate.set()
        had = stand.cluster.script[:1]
        again = wants(request_id="r", resume_from=[1], resume_digest=[token_digest(had)])
        rest = [m async for m in GrpcServer(stand.engine).generate(again, Context())]
        assert [t for m in rest for d in m.choices for t in d.token_ids] == (
            stand.cluster.script[1:]
        )
    await stream.aclose()


async def test_log_probabilities_are_taken_over_with_their_tokens(
    make_stand: MakeStand, gate: asyncio.Event
) -> None:
    first = await make_stand(gate=gate, step_s=0.001)
    headers = {"idempotency-key": "k"}
    body = BODY | {"logprobs": 1}
    await begin(first, headers, gate, body)
    async with another(first) as stand:
        gate.set()
        reply = await stand.http.post(
            "/v1/completions", json=body, headers=headers | {"x-resume-index": str(HAD)}
        )
        choices = [f["choices"][0] for f in frames(reply)]
        assert "".join(c["text"] for c in choices) == ANSWER[HAD:]
        said = [p for c in choices if c["logprobs"] for p in c["logprobs"]["token_logprobs"]]
        assert len(said) == sum(len(c["token_ids"]) for c in choices) > 0
