"""Open and closed loops against the fake service."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from loadgen.checker import AnswerChoice, FaultKind, Outcome, Verdict
from loadgen.checker.judge import Judgement
from loadgen.checker.verify_text import verify_texts
from loadgen.load.workload import RequestSpec
from loadgen.runner import Live, LoadOptions, Record, RunResult, run_load
from loadgen.target import Target, find_target
from loadgen.wire.capture import Call, Capture, Transport, now_s
from loadgen.wire.client_http import HttpClient, parse_url
from quadriga.errors import ConfigError
from tests.fake_service.server import MODEL, FakeOptions, FakeServer
from tests.unit.loadgen.conftest import make_spec

TARGET = Target(MODEL, 4096)


def specs(num: int, gap_s: float = 0.0, **changes: Any) -> list[RequestSpec]:
    return [make_spec(index=i, arrival_s=i * gap_s, **changes) for i in range(num)]


def load(
    requests: list[RequestSpec], options: LoadOptions, fake: FakeOptions | None = None
) -> tuple[RunResult, FakeServer]:
    async def run() -> tuple[RunResult, FakeServer]:
        async with FakeServer(fake or FakeOptions()) as server:
            client = HttpClient(server.url, timeout_s=20.0)
            result = await run_load(requests, client, MODEL, Judgement(TARGET), options, Live())
            await verify_texts(client, TARGET, result.records)
            return result, server

    return asyncio.run(run())


def test_closed_loop_keeps_its_concurrency() -> None:
    result, server = load(specs(12), LoadOptions(concurrency=3), FakeOptions(step_s=0.001))
    assert [record.verdict.outcome for record in result.records] == [Outcome.OK] * 12
    assert server.num_requests == 12
    assert server.max_in_flight == 3


def test_open_loop_does_not_wait_for_answers() -> None:
    # Every answer takes at least 1.2 s; all requests are to be sent within 0.05 s.
    result, server = load(specs(6, gap_s=0.01), LoadOptions(), FakeOptions(step_s=0.03))
    assert server.max_in_flight == 6
    for record in result.records:
        assert record.sent_s >= record.scheduled_s
    assert [record.spec.index for record in result.records] == list(range(6))


def test_refusals_are_counted_and_sent_once_by_default() -> None:
    result, server = load(specs(3), LoadOptions(concurrency=1), FakeOptions(refuse_first=2))
    outcomes = [record.verdict.outcome for record in result.records]
    assert outcomes == [Outcome.REFUSED, Outcome.REFUSED, Outcome.OK]
    assert server.num_requests == 3


def test_a_refused_request_is_sent_again_and_answers_are_judged_once_after_the_load() -> None:
    """What was refused is seen by its status: judging the rest would cost the measurement."""
    live, seen = Live(), []

    def judge(capture: Capture, spec: RequestSpec, request_id: str) -> Verdict:
        seen.append((spec.index, live.ended))
        return Judgement(TARGET)(capture, spec, request_id)

    async def run() -> RunResult:
        async with FakeServer(FakeOptions(refuse_first=1)) as server:
            client = HttpClient(server.url, timeout_s=20.0)
            options = LoadOptions(concurrency=1, honour_refusals=2)
            return await run_load(specs(2), client, MODEL, judge, options, live)

    first, second = asyncio.run(run()).records
    assert seen == [(0, 0), (0, 2), (1, 2)]
    assert first.verdict.outcome is Outcome.OK and (first.attempts, second.attempts) == (2, 1)
    assert first.lag_s < 0.9 and first.ended_s - first.sent_s >= 1.0  # the fake's Retry-After
    refused = Capture(Transport.GRPC, sent_s=0.0, status="RESOURCE_EXHAUSTED")
    assert refused.is_refusal and not Capture(Transport.HTTP, sent_s=0.0).is_refusal


def test_text_that_is_not_its_tokens_fails() -> None:
    result, _ = load(specs(1), LoadOptions(), FakeOptions(fault="wrong_text"))
    assert [fault.kind for fault in result.records[0].verdict.faults] == [FaultKind.TEXT]
    assert result.records[0].verdict.outcome is Outcome.FAILED


def test_failed_captures_are_kept() -> None:
    options = LoadOptions(concurrency=2, keep_failed=2)
    result, _ = load(specs(4), options, FakeOptions(fault="no_done"))
    assert len(result.failed_captures) == 2


def test_interruption_keeps_what_has_ended_for_those_who_ask_for_it() -> None:
    """The warm-up, or a benchmark, would take a load that was cut short for a whole one."""

    async def run(**options: bool) -> RunResult:
        begun, judge = asyncio.Event(), Judgement(TARGET)
        async with FakeServer(FakeOptions(fault="hang")) as server:
            client = HttpClient(server.url, timeout_s=20.0)
            client.on_data = lambda _: begun.set()
            run = run_load(specs(2), client, MODEL, judge, LoadOptions(), Live(), **options)
            task = asyncio.create_task(run)
            await asyncio.wait_for(begun.wait(), 20)
            task.cancel()
            return await task

    result = asyncio.run(run(keeps_partial=True))
    assert result.was_interrupted
    assert result.records == []
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


def test_lag_of_a_slow_generator_is_seen() -> None:
    """A sender that blocks the loop makes the following request late, and the record says so."""

    class Blocking:
        def prepare(self, spec: RequestSpec, model: str, request_id: str) -> Call:
            async def call() -> Capture:
                sent_s = now_s()
                while now_s() < sent_s + 0.05:
                    pass
                return Capture(Transport.HTTP, sent_s=sent_s, ended_s=now_s(), fault="none")

            return call

    async def run() -> RunResult:
        judgement = Judgement(TARGET)
        return await run_load(specs(3), Blocking(), MODEL, judgement, LoadOptions(), Live())

    lags = [record.lag_s for record in asyncio.run(run()).records]
    assert lags[2] > 0.09


def test_bad_urls_are_refused() -> None:
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x?y=1"):
        with pytest.raises(ConfigError, match="--url"):
            parse_url(url)
    client: Any = Mock(fetch=AsyncMock(return_value=(200, {"data": 5})))
    with pytest.raises(ConfigError, match=r"lists no models: \{'data': 5\}"):
        asyncio.run(find_target(client, None))
    address = parse_url("http://[::1]:81/proxy/v1/")
    assert (address.host_header, address.prefix) == ("[::1]:81", "/proxy")


def test_request_ids_differ_between_requests() -> None:
    result, _ = load(specs(3), LoadOptions())
    assert len({record.request_id for record in result.records}) == 3


def verdicts(
    text: str, ids: list[int], finish: str = "length", target: Target = TARGET, **extra: Any
) -> Outcome:
    """What becomes of an answer of such tokens; the first is special."""
    texts = ["</s>", "Hello", ".\n", "<div>"]

    class Client(HttpClient):
        async def fetch(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
            hides = target.is_ours and body["skip_special_tokens"]
            return 200, {"prompt": "".join(texts[t] for t in body["tokens"] if t or not hides)}

    choice = AnswerChoice(texts=[text], token_ids=ids, finish_reason=finish)
    verdict = Verdict(choices=[choice])
    record = Record(make_spec(extra=extra), "id", 0.0, 0.0, 1.0, 1, 10, verdict)
    client = Client("http://nowhere", timeout_s=1.0)
    asyncio.run(verify_texts(client, target, [record]))
    return verdict.outcome


@pytest.mark.parametrize("is_ours", [True, False])
def test_special_tokens_are_not_expected_in_the_text(is_ours: bool) -> None:
    target = Target(MODEL, 4096, is_ours=is_ours)
    assert verdicts("Hello", [0, 1], target=target) is Outcome.OK
    assert verdicts("hello", [0, 1], target=target) is Outcome.FAILED
    assert verdicts("<div>Hello", [3, 1], target=target) is Outcome.OK


def test_which_tokens_are_special_says_the_service_and_not_their_shape() -> None:
    assert verdicts("<div>Hello", [3, 0, 1]) is Outcome.OK
    assert verdicts("Hello", [3, 1]) is Outcome.FAILED


@pytest.mark.parametrize(
    ("text", "stop", "outcome"),
    [
        ("Hello.", "\n", Outcome.OK),  # inside of a token
        ("He", ["zzz", "llo"], Outcome.OK),
        ("Hello", None, Outcome.OK),  # by the token that ends a sequence
        ("Hello", "zzz", Outcome.OK),
        ("He", None, Outcome.FAILED),
        ("He", "zzz", Outcome.FAILED),
        ("", ["zzz"], Outcome.FAILED),
        ("Hello.", "zzz", Outcome.FAILED),
    ],
)
def test_a_text_ends_before_a_stop_string_or_before_the_token_that_ends_it(
    text: str, stop: Any, outcome: Outcome
) -> None:
    assert verdicts(text, [1, 2], "stop", stop=stop) is outcome


def test_a_text_that_lacks_calls_or_begins_with_its_prompt_is_not_compared() -> None:
    assert verdicts("", [1], tools=[{}]) is verdicts("prompt Hello", [1], echo=True) is Outcome.OK
