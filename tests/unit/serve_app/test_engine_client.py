"""The engine client over a fake cluster: admission, moves, losses, cancellation, resumption."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from quadriga.core.routing import Admission, AdmitRequest
from quadriga.errors import (
    Overloaded,
    QuadrigaError,
    ReplicaDied,
    ReplicaError,
    Unavailable,
    UnknownModel,
)
from quadriga.observability.load_history import LoadHistory
from quadriga.observability.metrics import MetricsHub, parse_exposition
from quadriga.observability.running_requests import KEPT_S, MOST_SHOWN, RunningRequests
from serve_app.auth.api_keys import ApiKeys
from serve_app.request import request_manager
from tests.unit.serve_app.conftest import ANSWER, MakeStand, Stand
from tests.waiting import until


async def is_idle(stand: Stand) -> None:
    """Nothing runs, nothing is held, and every end was reported to the scheduler."""
    await until(
        lambda: stand.cluster.num_held == 0 and not stand.engine._request_manager.open_requests()
    )
    submitted = {s.sequence_id for s in stand.cluster.submitted}
    await until(lambda: submitted <= {*stand.cluster.finished_ids})


async def test_an_answer_comes_from_both_replicas(stand: Stand) -> None:
    reply = (await stand.complete()).json()
    assert reply["choices"][0]["text"] == ANSWER
    assert stand.cluster.prefill.num_polls > 0
    assert stand.cluster.decode.num_polls > 0
    await is_idle(stand)


async def test_lost_replies_lose_nothing(make_stand: MakeStand) -> None:
    stand = await make_stand(tokens_per_step=3)
    stand.cluster.prefill.lost_replies = 1
    stand.cluster.decode.lost_replies = 2
    assert (await stand.complete()).json()["choices"][0]["text"] == ANSWER


async def test_a_stop_string_frees_the_replica(make_stand: MakeStand) -> None:
    gate = asyncio.Event()
    stand = await make_stand(gate=gate)
    waiting = asyncio.ensure_future(stand.complete(stop="wör"))
    await until(lambda: bool(stand.cluster.decode.held))
    gate.set()
    reply = (await waiting).json()
    assert reply["choices"][0] == reply["choices"][0] | {"text": "Hello ", "finish_reason": "stop"}
    await is_idle(stand)


async def test_streams_end_where_rebuilding_is_no_use(make_stand: MakeStand) -> None:
    stand = await make_stand(gate=asyncio.Event(), config={"ingress.rebuild_patience_s": 0.3})
    waiting = asyncio.ensure_future(stand.complete(stream=True))
    await until(lambda: stand.cluster.decode.num_polls > 0)
    stand.cluster.refuse_submission = [ReplicaDied("gone")] * 100
    stand.cluster.decode.die()
    stand.cluster.prefill.die()
    text = (await waiting).text
    frames = [json.loads(f[6:]) for f in text.strip().split("\n\n")]
    assert frames[0]["choices"][0]["text"] == "H"
    assert frames[-1]["error"]["code"] == "unavailable"  # no replica is left
    assert "data: [DONE]" not in text


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_keep_their_status(stand: Stand, stream: bool) -> None:
    stand.cluster.refuse_admission = Overloaded("full", retry_after_s=1.4)
    reply = await stand.complete(stream=stream, n=2)
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "2"
    assert reply.headers["retry-after-ms"] == "1400"
    assert "x-should-retry" not in reply.headers
    assert reply.json()["error"]["code"] == "overloaded"
    series = parse_exposition((await stand.http.get("/metrics")).text)
    name = 'quadriga_requests_refused_total{reason="overloaded",replica="ingress-0"}'
    assert series[name] == 1, "a request, however many choices it has"


async def test_a_moment_without_replicas_is_waited_out(stand: Stand) -> None:
    """After a stall of the machine all reports are old at once, although the replicas live."""
    admit, refused = stand.cluster.admit, 0

    async def stale(requests: Sequence[AdmitRequest]) -> list[Admission]:
        nonlocal refused
        refused += 1
        if refused <= 3:
            raise Unavailable("no replica is ready", retry_after_s=1.0)
        return await admit(requests)

    stand.cluster.admit = stale  # type: ignore[method-assign]
    assert (await stand.complete()).json()["choices"][0]["text"] == ANSWER
    assert refused == 4
    await is_idle(stand)


@pytest.mark.parametrize(("patience_s", "retry_after_s"), [(0.3, 0.2), (600.0, 600.0)])
async def test_waiting_for_replicas_ends_and_does_not_begin_where_it_takes_longer(
    make_stand: MakeStand, patience_s: float, retry_after_s: float
) -> None:
    stand = await make_stand(config={"ingress.admission_patience_s": patience_s})
    stand.cluster.refuse_admission = Unavailable("none is ready", retry_after_s=retry_after_s)
    asked_s = time.monotonic()
    reply = await stand.complete()
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == f"{max(1.0, retry_after_s):.0f}"
    assert (time.monotonic() - asked_s >= patience_s) == (retry_after_s < patience_s)


async def test_the_deadline_and_the_client_end_the_waiting(stand: Stand) -> None:
    asked = 0

    async def unavailable(requests: Sequence[AdmitRequest]) -> list[Admission]:
        nonlocal asked
        asked += 1
        raise Unavailable("no replica is ready", retry_after_s=1.0)

    stand.cluster.admit = unavailable  # type: ignore[method-assign]
    assert (await stand.complete(deadline_ms=50)).status_code == 504
    waiting = asyncio.ensure_future(stand.complete())
    await until(lambda: asked >= 2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: not stand.engine._request_manager.open_requests())
    seen = asked
    await asyncio.sleep(0.5)  # longer than the next pause would be
    assert asked == seen, "requests of clients that are gone are not admitted"


async def test_an_unknown_model_is_refused_at_once(stand: Stand) -> None:
    stand.cluster.refuse_admission = UnknownModel("not served")
    asked_s = time.monotonic()
    assert (await stand.complete()).status_code == 404
    assert time.monotonic() - asked_s < 2.0


async def test_a_failed_submission_is_tried_elsewhere(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_manager, "MAX_ADMISSION_PAUSE_S", 0.1)
    draining = [Unavailable("draining")] * 4  # named until it reports, many calls later
    stand.cluster.refuse_submission = [ReplicaDied("gone"), Overloaded("full"), *draining]
    assert (await stand.complete()).json()["choices"][0]["text"] == ANSWER
    assert len(stand.cluster.submitted) == 1
    await is_idle(stand)


async def test_submissions_are_not_tried_for_ever(stand: Stand) -> None:
    stand.cluster.refuse_submission = [ReplicaError("silent")] * 3
    assert (await stand.complete()).status_code == 500
    await is_idle(stand)


async def test_without_the_scheduler_the_last_view_admits(stand: Stand) -> None:
    await until(lambda: bool(stand.engine._cluster_state.view.snapshots))
    stand.cluster.refuse_admission = ReplicaDied("scheduler")
    assert (await stand.complete()).json()["choices"][0]["text"] == ANSWER


async def test_a_deadline_ends_the_request(make_stand: MakeStand) -> None:
    stand = await make_stand(gate=asyncio.Event())
    reply = await stand.complete(deadline_ms=50)
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    await is_idle(stand)
    streamed = await stand.complete(deadline_ms=50, stream=True)
    assert streamed.status_code == 200, "the first token was there in time"
    assert "deadline_exceeded" in streamed.text


async def test_a_cancelled_handler_frees_everything(make_stand: MakeStand) -> None:
    stand = await make_stand(gate=asyncio.Event())
    waiting = asyncio.ensure_future(stand.complete(n=3))
    await until(lambda: len(stand.cluster.decode.held) == 3)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await is_idle(stand)
    told = {*stand.cluster.prefill.cancelled, *stand.cluster.decode.cancelled}
    assert {s.sequence_id for s in stand.cluster.submitted} <= told


async def test_one_failing_choice_ends_the_request(stand: Stand) -> None:
    stand.cluster.refuse_submission = [Overloaded("full")] * 6
    assert (await stand.complete(n=2)).status_code == 429
    await is_idle(stand)


async def test_the_limit_of_open_requests(make_stand: MakeStand) -> None:
    gate = asyncio.Event()
    stand = await make_stand(gate=gate, config={"ingress.max_ongoing_requests": 2})
    waiting = [asyncio.ensure_future(stand.complete()) for _ in range(2)]
    await until(lambda: len(stand.cluster.submitted) == 2)
    assert (await stand.complete()).status_code == 429
    gate.set()
    assert [(await w).status_code for w in waiting] == [200, 200]
    assert (await stand.complete()).status_code == 200


async def test_a_key_resumes_and_never_runs_twice(make_stand: MakeStand) -> None:
    gate = asyncio.Event()
    stand = await make_stand(gate=gate)
    headers = {"idempotency-key": "k1"}
    first = asyncio.ensure_future(stand.complete(stream=True, headers=headers))
    await until(lambda: bool(stand.cluster.decode.held))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert stand.cluster.num_held == 1, "kept for a resumption"
    gate.set()
    again = await stand.complete(stream=True, headers=headers | {"x-resume-index": "1"})
    frames = [json.loads(f[6:]) for f in again.text.strip().split("\n\n")[:-1]]
    assert "".join(f["choices"][0]["text"] for f in frames) == ANSWER[1:]
    assert len(stand.cluster.submitted) == 1


async def test_nothing_to_resume_runs_nothing(stand: Stand) -> None:
    headers = {"idempotency-key": "k", "x-resume-index": "3"}
    assert (await stand.complete(headers=headers)).status_code == 404
    assert stand.cluster.submitted == []
    without_key = await stand.complete(headers={"x-resume-index": "1"})
    assert without_key.status_code == 400 and stand.cluster.submitted == []
    assert "needs the header idempotency-key" in without_key.json()["error"]["message"]
    fresh = headers | {"x-resume-index": "0"}
    assert (await stand.complete(headers=fresh)).status_code == 200


async def test_keys_are_scoped_by_owner(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=ApiKeys.of(["a", "b"]))
    for key in ("a", "b", "a"):
        headers = {"authorization": f"Bearer {key}", "idempotency-key": "same"}
        assert (await stand.complete(headers=headers)).status_code == 200
    assert len(stand.cluster.submitted) == 2


async def test_a_failed_request_may_be_tried_again_under_its_key(stand: Stand) -> None:
    headers = {"idempotency-key": "k"}
    stand.cluster.refuse_admission = Overloaded("full")
    assert (await stand.complete(headers=headers)).status_code == 429
    stand.cluster.refuse_admission = None
    assert (await stand.complete(headers=headers)).status_code == 200


async def test_health_follows_the_cluster(stand: Stand) -> None:
    await until(lambda: bool(stand.engine._cluster_state.view.snapshots))
    assert (await stand.http.get("/health")).status_code == 200
    stand.engine.drain(60.0)
    assert (await stand.http.get("/health")).status_code == 503
    assert (await stand.http.get("/live")).status_code == 200


async def test_a_failing_background_turn_is_tried_again(stand: Stand) -> None:
    async def broken() -> Any:
        raise QuadrigaError("the scheduler is away")

    beats = stand.cluster.heartbeats
    stand.cluster.directory = broken  # type: ignore[method-assign]
    assert (await stand.complete()).status_code == 200
    assert stand.cluster.heartbeats >= beats


async def test_recoveries_are_on_the_page_before_the_first(stand: Stand) -> None:
    series = parse_exposition((await stand.http.get("/metrics")).text)
    for result in ("adopted", "failed", "recovered"):
        assert series[f'quadriga_recoveries_total{{result="{result}",replica="ingress-0"}}'] == 0


async def test_the_first_answer_of_a_service_is_in_its_history(stand: Stand) -> None:
    hub, history = MetricsHub(), LoadHistory()
    for at_s in (5.0, 10.0):
        hub.push("ingress-0", stand.engine.metrics.registry.snapshot(), now_s=at_s)
        history.sample(hub, now_s=at_s, now_unix_s=at_s)
        await stand.complete()
    shown = history.columns(now_unix_s=10.0)
    assert shown["tokens_per_s"][-1] > 0 and shown["ttft_p50_s"][-1] is not None


async def test_probes_by_whichever_method_are_no_requests(stand: Stand) -> None:
    for method, path in (("GET", "/health"), ("HEAD", "/health"), ("POST", "/ping")):
        assert (await stand.http.request(method, path)).is_success
    assert "quadriga_requests_total{" not in (await stand.http.get("/metrics")).text


async def test_metrics_count_what_the_client_saw(stand: Stand) -> None:
    reply = (await stand.complete()).json()
    await stand.complete(temperature=-1)
    series = parse_exposition((await stand.http.get("/metrics")).text)
    labels = '{model_name="quadriga-s",replica="ingress-0"}'
    assert series["vllm:generation_tokens_total" + labels] == reply["usage"]["completion_tokens"]
    assert series["vllm:time_to_first_token_seconds_count" + labels] == 1
    assert series["vllm:e2e_request_latency_seconds_count" + labels] == 1
    assert series['quadriga_requests_total{code="400",door="http",replica="ingress-0"}'] == 1
    assert series['quadriga_ingress_open_requests{replica="ingress-0"}'] == 0
    names = {key.split("{")[0] for key in series}
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= names


async def test_operators_see_only_so_many_requests_and_no_text(make_stand: MakeStand) -> None:
    stand = await make_stand(gate=(gate := asyncio.Event()))
    asked = [stand.complete(prompt=f"zebra {k}") for k in range(MOST_SHOWN + 5)]
    answers = asyncio.gather(*asked)
    await until(lambda: len(stand.cluster.decode.held) == len(asked))
    await stand.engine._push_metrics()
    rows, submitted = stand.cluster.running, stand.cluster.submitted[:MOST_SHOWN]
    assert [r["sequence_id"] for r in rows] == [s.sequence_id for s in submitted], "the first"
    assert "zebra" not in json.dumps(rows) and len(json.dumps(rows)) < 400 * MOST_SHOWN
    gate.set()
    await answers
    await stand.engine._push_metrics()
    assert stand.cluster.running == []


def test_of_all_ingresses_the_requests_that_run_longest_are_shown() -> None:
    requests = RunningRequests()
    rows = [{"running_s": 100.0 - k, "sequence_id": f"{k}"} for k in range(MOST_SHOWN)]
    requests.push("two", [{"running_s": 98.5, "sequence_id": "a"}, rows[2]], now_s=1.0)
    requests.push("one", rows, now_s=0.0)
    shown = [r["running_s"] for r in requests.longest(now_s=2.0)]
    assert shown[:5] == [100.0, 99.0, 98.5, 98.0, 97.0] and len(shown) == MOST_SHOWN
    assert len(requests.longest(now_s=KEPT_S + 0.5)) == 2, "one ingress is gone"
    requests.push("two", [], now_s=KEPT_S + 0.5)
    assert requests.longest(now_s=KEPT_S + 0.5) == [] and list(requests._said) == ["two"]
