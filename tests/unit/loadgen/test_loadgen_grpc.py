"""The gRPC client and checker against a fake service that can misbehave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadgen.checker import FaultKind, Outcome, Verdict
from loadgen.checker.judge import Judgement
from loadgen.load.workload import RequestSpec
from loadgen.target import Target
from loadgen.wire.capture import Capture, Transport
from loadgen.wire.client_grpc import GrpcClient, encode_request
from quadriga.errors import ConfigError
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from tests.fake_service.grpc_server import (
    GRPC_FAULTS,
    GRPC_SERVER_FAULTS,
    FakeGrpcOptions,
    FakeGrpcServer,
)
from tests.unit.loadgen.conftest import make_spec

EXPECTED: dict[str, FaultKind] = {
    "gap": FaultKind.GAP,
    "duplicate": FaultKind.DUPLICATE,
    "wrong_usage": FaultKind.USAGE,
    "no_usage": FaultKind.USAGE,
    "early_usage": FaultKind.ORDER,
    "error_message": FaultKind.STATUS,
    "not_a_message": FaultKind.FRAMING,
    "half_character": FaultKind.FRAMING,
    "id_changes": FaultKind.IDENTITY,
    "model_changes": FaultKind.IDENTITY,
    "choice_out_of_range": FaultKind.CHOICE,
    "empty_message": FaultKind.ORDER,
    "early_end": FaultKind.USAGE,
    "no_finish": FaultKind.FINISH_REASON,
    "after_finish": FaultKind.ORDER,
    "refuse_without_retry_after": FaultKind.ERROR_FORMAT,
    "internal": FaultKind.STATUS,
    "hang": FaultKind.TIMEOUT,
    "one_token_less": FaultKind.LENGTH,
}


def exchange(spec: RequestSpec, timeout_s: float = 20.0, **options: Any) -> Verdict:
    async def call() -> Capture:
        async with FakeGrpcServer(FakeGrpcOptions(**options)) as server:
            client = GrpcClient(server.address, timeout_s=timeout_s)
            try:
                return await client.prepare(spec, "fake", "unused")()
            finally:
                await client.close()

    return Judgement(Target("fake", 4096))(asyncio.run(call()), spec, "unused")


def test_every_fault_of_the_fake_is_judged() -> None:
    assert {*EXPECTED, "refuse"} == {*GRPC_FAULTS, *GRPC_SERVER_FAULTS}


@pytest.mark.parametrize("fault", sorted(EXPECTED))
def test_fault_fails_the_request(fault: str) -> None:
    verdict = exchange(make_spec(), timeout_s=0.5 if fault == "hang" else 20.0, fault=fault)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.faults[0].kind is EXPECTED[fault], verdict.faults


@pytest.mark.parametrize("form", [{}, {"endpoint": "chat", "prompt": "say it"}, {"prompt": "go"}])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("choices", [1, 2])
def test_good_response_passes(form: dict[str, str], stream: bool, group: int, choices: int) -> None:
    spec = make_spec(stream=stream, num_choices=choices, **form)
    verdict = exchange(spec, tokens_per_write=group)
    assert verdict.faults == []
    assert [choice.num_tokens for choice in verdict.choices] == [40] * choices


def test_answer_that_ends_by_itself_passes() -> None:
    spec = make_spec(prompt="ping", ignore_eos=False)
    verdict = exchange(spec, answer=lambda prompt: f"{prompt} pong 🙂")
    assert verdict.faults == []
    assert verdict.choices[0].text == "ping pong 🙂"


@pytest.mark.parametrize("kind", [pb.GenerateResponse, pb.GenerateOnceResponse])
def test_an_answer_that_calls_functions_needs_no_text(kind: Any) -> None:
    calls = [{"name": "look", "arguments": "{}"}]
    choice = {"token_ids": [7], "tool_calls": calls, "finish_reason": pb.FINISH_REASON_TOOL_CALLS}
    usage = pb.Usage(prompt_tokens=3, completion_tokens=1, total_tokens=4)
    message = kind(request_id="a", model="fake", choices=[choice], usage=usage)
    capture = Capture(Transport.GRPC, 0.0, [(1.0, message.SerializeToString())], status="OK")
    spec = make_spec(stream=kind is pb.GenerateResponse, ignore_eos=False)
    verdict = Judgement(Target("fake", 4096))(capture, spec, "unused")
    assert verdict.faults == [] and verdict.choices[0].calls == "look{}"


def test_refusal_is_neither_success_nor_failure() -> None:
    verdict = exchange(make_spec(), fault="refuse")
    assert verdict.outcome is Outcome.REFUSED
    assert verdict.retry_after_s == 1.5


def test_nobody_listening_is_a_connection_fault() -> None:
    async def call() -> Capture:
        client = GrpcClient("127.0.0.1:1", timeout_s=20.0)
        try:
            return await client.prepare(make_spec(), "fake", "unused")()
        finally:
            await client.close()

    verdict = Judgement(Target("fake", 4096))(asyncio.run(call()), make_spec(), "unused")
    assert [fault.kind for fault in verdict.faults] == [FaultKind.CONNECTION]


def test_extra_fields_go_into_the_message() -> None:
    assert encode_request(make_spec(extra={"top_p": 0.5}), "fake").top_p == 0.5


def test_unknown_extra_field_is_refused() -> None:
    with pytest.raises(ConfigError, match="banana"):
        encode_request(make_spec(extra={"banana": 1}), "fake")
