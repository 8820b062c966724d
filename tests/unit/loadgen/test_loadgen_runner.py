"""Open and closed loops against the fake service."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from loadgen.bench.fake_service.server import MODEL, FakeOptions, FakeServer
from loadgen.checker import AnswerChoice, FaultKind, Outcome, Verdict
from loadgen.checker.judge import Judgement
from loadgen.checker.verify_text import verify_texts
from loadgen.load.workload import RequestSpec
from loadgen.runner import Live, LoadOptions, Record, RunResult, now_s, run_load
from loadgen.target import Target, find_target
from loadgen.wire.capture import Call, Capture, Transport
from loadgen.wire.client_http import HttpClient, parse_url
from quadriga.errors import ConfigError
from tests.unit.loadgen.conftest import make_spec

TARGET = Target(MODEL, 4096)


def specs(num: int, gap_s: float = 0.0, **changes: Any) -> list[RequestSpec]:
    return [make_spec(index=i, arrival_s=i * gap_s, **changes) for i in range(num)]


def load(
    requests: list[RequestSpec], options: LoadOptions, fake: FakeOptions | None = None
) -> tuple[RunResult, FakeServer]:
    async def run() -> tuple[RunResult, FakeServer]:
        async with FakeServer(fake or FakeOptions()) as server:
            client = HttpClient(parse_url(server.url), now_s=now_s, timeout_s=20.0)
            result = await run_load(requests, client, MODEL, Judgement(TARGET), options, Live())
            await verify_texts(client, MODEL, result.records)
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


def test_retry_after_is_honoured_when_asked() -> None:
    options = LoadOptions(concurrency=1, honour_refusals=1)
    result, server = load(specs(1), options, FakeOptions(refuse_first=1))
    (record,) = result.records
    assert record.verdict.outcome is Outcome.OK
    assert record.attempts == 2
    assert record.lag_s < 0.9 and record.ended_s - record.sent_s >= 1.0  # the fake's Retry-After
    assert server.num_requests == 2


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
            client = HttpClient(parse_url(server.url), now_s=now_s, timeout_s=20.0)
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


def test_special_tokens_are_not_expected_in_the_text() -> None:
    texts = {(7,): " seven", (1,): "<|pad|>", (1, 7): "<|pad|> seven"}

    class Client(HttpClient):
        async def fetch(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
            return 200, {"prompt": texts[tuple(body["tokens"])]}

    def record(text: str) -> Record:
        choice = AnswerChoice(texts=[text], token_ids=[1, 7], num_tokens=2, finish_reason="length")
        verdict = Verdict(choices=[choice])
        return Record(make_spec(), "id", 0.0, 0.0, 1.0, 1, 10, verdict)

    good, bad = record(" seven"), record(" eight")
    client = Client(parse_url("http://nowhere"), now_s=now_s, timeout_s=1.0)
    assert asyncio.run(verify_texts(client, MODEL, [good, bad])) == 2
    assert good.verdict.outcome is Outcome.OK
    assert bad.verdict.outcome is Outcome.FAILED


def test_stop_string_may_cut_the_text() -> None:
    class Client(HttpClient):
        async def fetch(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
            return 200, {"prompt": "one two thr"}

    def record(text: str, **extra: Any) -> Record:
        choice = AnswerChoice(texts=[text], token_ids=[1, 2], num_tokens=2, finish_reason="stop")
        verdict = Verdict(choices=[choice])
        return Record(make_spec(extra=extra), "id", 0.0, 0.0, 1.0, 1, 10, verdict)

    good, bad, echoed = record("one t", stop="wo"), record("one t"), record("prompt one", echo=True)
    client = Client(parse_url("http://nowhere"), now_s=now_s, timeout_s=1.0)
    assert asyncio.run(verify_texts(client, MODEL, [good, bad, echoed])) == 2
    outcomes = [one.verdict.outcome for one in (good, bad, echoed)]
    assert outcomes == [Outcome.OK, Outcome.FAILED, Outcome.OK]
