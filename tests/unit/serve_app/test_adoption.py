"""When an ingress is gone, another one takes over what still runs, for its owner only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from quadriga.core.output import PollReply
from quadriga.core.request import ResumableSequence, token_digest
from quadriga.observability.metrics import parse_exposition
from serve_app.auth.api_keys import ApiKeys
from serve_app.grpc.server import GrpcServer
from tests.unit.serve_app.conftest import ANSWER, MakeStand, Stand
from tests.unit.serve_app.test_grpc_server import KEYS, Context, wants
from tests.waiting import until

BODY = {"prompt": "hi", "max_tokens": 100, "stream": True, "return_token_ids": True}
HAD = 6
HEADERS = {"idempotency-key": "k"}


async def another(
    make_stand: MakeStand, first: Stand, keys: ApiKeys | None = None, *, is_alone: bool = True
) -> Stand:
    """A second ingress over the same cluster.

    Args:
        is_alone: The first one has died without a word.
    """
    if is_alone:
        await first.engine.tasks.close()
    return await make_stand(keys=keys, cluster=first.cluster, ingress_id="ingress-1")


async def begin(
    stand: Stand, gate: asyncio.Event, *, headers: dict[str, str] = HEADERS, body: Any = BODY
) -> None:
    """Have a request decode until the client has `HAD` tokens; then it stands still."""
    reading = asyncio.ensure_future(
        stand.http.post("/v1/completions", json=body, headers=headers, timeout=30)
    )
    gate.set()
    await until(lambda: any(n >= HAD for n in stand.cluster.num_said.values()))
    gate.clear()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def resume(
    stand: Stand, *, headers: dict[str, str] = HEADERS, body: Any = BODY
) -> httpx.Response:
    """Ask for what comes after the `HAD` tokens that the client has."""
    headers = headers | {"x-resume-index": str(HAD)}
    return await stand.http.post("/v1/completions", json=body, headers=headers, timeout=30)


def choices(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    return [json.loads(f[6:])["choices"][0] for f in reply.text.strip().split("\n\n")[:-1]]


def text(reply: httpx.Response) -> str:
    return "".join(choice["text"] for choice in choices(reply))


@pytest.fixture
def gate() -> asyncio.Event:
    return asyncio.Event()


async def test_an_http_client_resumes_at_another_ingress(
    make_stand: MakeStand, gate: asyncio.Event
) -> None:
    first = await make_stand(gate=gate, step_s=0.001)
    await begin(first, gate)
    stand = await another(make_stand, first)
    gate.set()
    reply = await resume(stand)
    assert text(reply) == ANSWER[HAD:]
    tokens = [t for c in choices(reply) for t in c["token_ids"]]
    assert tokens == stand.cluster.script[HAD:]
    assert len(stand.cluster.submitted) == 1, "nothing was computed again"
    assert stand.cluster.num_orphan_calls == 1
    counts = parse_exposition((await stand.engine.metrics_page()).decode())
    counts = {key.split(",replica")[0]: n for key, n in counts.items() if "ingress-1" in key}
    assert counts['quadriga_recoveries_total{result="adopted"'] == 1
    of_model = '{model_name="quadriga-s"'
    assert counts["vllm:time_to_first_token_seconds_count" + of_model] == 0
    num_gaps = counts["vllm:inter_token_latency_seconds_count" + of_model]
    assert 0 < num_gaps <= len(tokens), "only of tokens that came after the adoption"
    assert counts["vllm:generation_tokens_total" + of_model] == num_gaps
    name = "vllm:request_time_per_output_token_seconds_sum" + of_model
    took_s = counts["vllm:request_decode_time_seconds_sum" + of_model]
    assert counts[name] == pytest.approx(took_s / num_gaps)


async def test_a_reader_at_the_former_ingress_gets_an_error_and_may_resume(
    make_stand: MakeStand, gate: asyncio.Event
) -> None:
    """Two connections follow one request, at two ingresses that both live."""
    first = await make_stand(gate=gate, step_s=0.001)
    await begin(first, gate)
    second = await another(make_stand, first, is_alone=False)
    async with asyncio.timeout(20.0):
        here = asyncio.create_task(resume(first))
        await until(lambda: any(s.readers for s in first.engine.requests._by_key.values()))
        there = asyncio.create_task(resume(second))
        assert '"code": "taken_over"' in (await here).text
        assert not there.done()
        again = asyncio.create_task(resume(first))  # the earlier error is not repeated
        assert '"code": "taken_over"' in (await there).text
        gate.set()
        assert text(await again) == ANSWER[HAD:]
        assert len(first.cluster.submitted) == 1, "nothing was computed again"


async def test_an_ingress_that_ends_leaves_alone_what_another_one_has_adopted(
    make_stand: MakeStand, gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's connection broke; the first ingress lives on for a while, and hears nothing."""
    monkeypatch.setattr("serve_app.request.request_manager.AUDIT_AFTER_S", 0.1)
    first = await make_stand(gate=gate, step_s=0.001)
    cluster, adopted = first.cluster, asyncio.Event()
    poll, adopt, is_deaf = cluster.poll, cluster.adopt, False

    async def fetched(replica: str, ingress_id: str, *args: Any) -> PollReply:
        reply = await poll(replica, ingress_id, *args)
        if is_deaf and ingress_id != "ingress-1":
            await asyncio.Event().wait()
        return reply

    monkeypatch.setattr(cluster, "poll", fetched)
    await begin(first, gate)
    is_deaf = True

    async def noticed(*args: Any) -> bool:
        is_there = await adopt(*args)
        adopted.set()
        return is_there

    monkeypatch.setattr(cluster, "adopt", noticed)
    stand = await another(make_stand, first, is_alone=False)
    reading = asyncio.create_task(resume(stand))
    async with asyncio.timeout(60):
        await adopted.wait()
    await first.engine.close()
    assert cluster.decode.cancelled == [cluster.submitted[0].sequence_id], "it tried"
    gate.set()
    assert text(await reading) == ANSWER[HAD:]
    assert len(cluster.submitted) == 1, "nothing was computed again"
    assert cluster.num_held == 0


async def test_an_adoption_that_fails_in_any_way_ends_the_request(
    make_stand: MakeStand, gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the replica has heard of it is not known: what runs there is freed."""
    first = await make_stand(gate=gate, step_s=0.001)
    await begin(first, gate)

    async def adopt(*_: Any) -> bool:
        raise MemoryError

    monkeypatch.setattr(first.cluster, "adopt", adopt)
    stand = await another(make_stand, first)
    async with asyncio.timeout(60):
        reply = await resume(stand)
    assert reply.status_code == 404, reply.text
    assert stand.engine.metrics.recoveries.labels("failed")._value.get() == 1
    await until(lambda: not stand.cluster.num_held)


async def test_a_sequence_that_is_moving_is_looked_for_again(
    make_stand: MakeStand, gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its way between two replicas it is at neither; that is no reason to say it is lost."""
    monkeypatch.setattr("serve_app.request.engine_client.RESUME_PAUSE_S", 0.001)
    first = await make_stand(gate=gate, step_s=0.001)
    await begin(first, gate)
    stand = await another(make_stand, first)
    find, calls = stand.cluster.find_resumable, 0

    async def late(claims: Sequence[str]) -> list[ResumableSequence]:
        nonlocal calls
        calls += 1
        if calls == 1:
            return []
        gate.set()
        return await find(claims)

    monkeypatch.setattr(stand.cluster, "find_resumable", late)
    assert text(await resume(stand)) == ANSWER[HAD:]
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
    stand = await another(make_stand, first, KEYS)
    gate.set()
    again = wants(request_id="r", resume_from=[len(had)], resume_digest=[token_digest(had)])
    rest = [m async for m in GrpcServer(stand.engine).generate(again, Context())]
    assert had + [t for m in rest for d in m.choices for t in d.token_ids] == stand.cluster.script
    assert len(stand.cluster.submitted) == 1
    await stream.aclose()


@pytest.mark.parametrize(
    "other",
    [
        {"headers": {"idempotency-key": "another"}},
        {"json": {"prompt": "ho"}},
        {"headers": {"authorization": "Bearer b"}},
    ],
)
async def test_a_sequence_is_adopted_only_by_its_owner(
    make_stand: MakeStand, gate: asyncio.Event, other: dict[str, Any]
) -> None:
    keys = ApiKeys.of(["a", "b"])
    first = await make_stand(gate=gate, keys=keys, step_s=0.001)
    headers = HEADERS | {"authorization": "Bearer a"}
    await begin(first, gate, headers=headers)
    stand = await another(make_stand, first, keys)
    asked = headers | other.get("headers", {})
    reply = await resume(stand, headers=asked, body=BODY | other.get("json", {}))
    assert reply.status_code == 404
    assert len(stand.cluster.submitted) == 1


async def test_what_is_lost_on_the_way_is_an_error_or_begun_anew(
    make_stand: MakeStand, gate: asyncio.Event
) -> None:
    """Over HTTP the answers cannot be compared; over gRPC a digest compares them."""
    first = await make_stand(gate=gate, keys=KEYS, step_s=0.001)
    headers = HEADERS | {"authorization": "Bearer one"}
    await begin(first, gate, headers=headers)
    stream = GrpcServer(first.engine).generate(wants(request_id="r"), Context())
    await anext(stream)
    first.cluster.loses_orphans = True
    stand = await another(make_stand, first, KEYS)
    reply = await resume(stand, headers=headers)
    assert reply.status_code == 404, reply.text
    gate.set()
    had = stand.cluster.script[:1]
    again = wants(request_id="r", resume_from=[1], resume_digest=[token_digest(had)])
    rest = [m async for m in GrpcServer(stand.engine).generate(again, Context())]
    assert [t for m in rest for d in m.choices for t in d.token_ids] == stand.cluster.script[1:]
    await stream.aclose()


async def test_log_probabilities_are_taken_over_with_their_tokens(
    make_stand: MakeStand, gate: asyncio.Event
) -> None:
    first = await make_stand(gate=gate, step_s=0.001)
    body = BODY | {"logprobs": 1}
    await begin(first, gate, body=body)
    stand = await another(make_stand, first)
    gate.set()
    reply = await resume(stand, body=body)
    assert text(reply) == ANSWER[HAD:]
    found = choices(reply)
    said = [p for c in found if c["logprobs"] for p in c["logprobs"]["token_logprobs"]]
    assert len(said) == sum(len(c["token_ids"]) for c in found) > 0
