"""The SDK against a server in this process that misbehaves on command."""

from __future__ import annotations

import asyncio
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import quadriga.client as sdk
from quadriga.client import AsyncClient, Client, Message, RetryPolicy
from quadriga.client.wire import CallOptions, StreamProgress, make_embed_request, make_request
from quadriga.core.request import FinishReason, token_digest
from quadriga.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    InvariantViolation,
    Overloaded,
    QuadrigaError,
    ReplicaDied,
    Unavailable,
)
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.grpc.messages import set_error
from tests.waiting import settled, until

WORDS = ["one ", "two ", "three ", "four"]
FAST = RetryPolicy(max_attempts=4, first_pause_s=0.001)


class Servicer:
    """Streams WORDS, a token each; fails as `faults` says, a fault per call."""

    def __init__(self) -> None:
        self.faults: list[tuple[int, QuadrigaError | None]] = []
        self.requests: list[Any] = []
        self.cancelled: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        self.requests.append(pb.GenerateRequest.FromString(request.SerializeToString()))
        start = request.resume_from[0] if request.resume_from else 0
        stop, error = self.faults.pop(0) if self.faults else (len(WORDS), None)
        for i in range(start, min(stop, len(WORDS))):
            last = i == len(WORDS) - 1
            delta = pb.ChoiceDelta(first_token_index=i, token_ids=[i], text=WORDS[i])
            if last:
                delta.finish_reason = pb.FINISH_REASON_LENGTH
            spans = [pb.DepthSpan(model="m", depth=k, tokens=2) for k in (8, 4)]
            usage = pb.Usage(prompt_tokens=1, completion_tokens=4, spans=spans) if last else None
            yield pb.GenerateResponse(request_id=request.request_id, choices=[delta], usage=usage)
        if error is not None:
            set_error(context, error)

    def GenerateOnce(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.may_answer.wait(30)
        _, error = self.faults.pop(0) if self.faults else (0, None)
        if error is not None:
            set_error(context, error)
            return pb.GenerateOnceResponse()
        choice = pb.Choice(
            text="".join(WORDS), token_ids=[0, 1, 2, 3], finish_reason=pb.FINISH_REASON_LENGTH
        )
        return pb.GenerateOnceResponse(request_id=request.request_id, choices=[choice])

    def Embed(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.may_answer.wait(30)
        _, error = self.faults.pop(0) if self.faults else (0, None)
        if error is not None:
            set_error(context, error)
            return pb.EmbedResponse()
        rows = [pb.Embedding(values=[len(item.text), 0.5]) for item in request.inputs]
        return pb.EmbedResponse(request_id=request.request_id, embeddings=rows, prompt_tokens=3)

    def Cancel(self, request: Any, context: Any) -> Any:
        self.cancelled.append(request.request_id)
        return pb.CancelResponse(found=True)

    def ListModels(self, request: Any, context: Any) -> Any:
        assert ("authorization", "Bearer k") in context.invocation_metadata()
        return pb.ListModelsResponse(models=[pb.Model(id="m", root="m", max_model_len=9)])


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def target(servicer: Servicer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    handlers = {}
    for method in pb.DESCRIPTOR.services_by_name["Quadriga"].methods:
        name, read = method.name, getattr(pb, method.input_type.name).FromString
        kind = "unary_stream" if name == "Generate" else "unary_unary"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        handlers[name] = make(getattr(servicer, name), read, lambda m: m.SerializeToString())
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("quadriga.v1.Quadriga", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def client(target: str) -> Iterator[Client]:
    with Client(target, api_key="k", retry=FAST, timeout_s=20) as made:
        yield made


def test_models_and_key(client: Client) -> None:
    (model,) = client.models()
    assert (model.id, model.max_model_len) == ("m", 9)


def test_a_broken_stream_is_taken_up_where_it_broke(servicer: Servicer, client: Client) -> None:
    servicer.faults = [(2, ReplicaDied("gone")), (3, Unavailable("away"))]
    pieces = list(client.stream("x"))
    assert [p.text for p in pieces] == WORDS
    assert [list(r.resume_from) for r in servicer.requests] == [[], [2], [3]]
    assert len({r.request_id for r in servicer.requests}) == 1
    digests = [[], [token_digest([0, 1])], [token_digest([0, 1, 2])]]
    assert [list(r.resume_digest) for r in servicer.requests] == digests
    assert len({r.seed for r in servicer.requests}) == 1, "the same seed, so the same answer"
    assert all(r.HasField("seed") for r in servicer.requests)
    assert pieces[-1].usage is not None
    spans = (sdk.DepthSpan("m", 8, 2), sdk.DepthSpan("m", 4, 2))
    assert pieces[-1].usage.spans == spans
    assert pieces[-1].finish_reason is FinishReason.LENGTH
    assert servicer.cancelled == []


def test_a_stream_that_ends_early_is_not_taken_for_whole(
    servicer: Servicer, client: Client
) -> None:
    servicer.faults = [(2, None)]
    assert "".join(p.text for p in client.stream("x")) == "".join(WORDS)


def test_errors_that_a_retry_cannot_help_are_raised_at_once(
    servicer: Servicer, client: Client
) -> None:
    servicer.faults = [(2, InvalidRequest("no", param="n"))]
    got: list[Any] = []
    with pytest.raises(InvalidRequest) as caught:
        got.extend(client.stream("x"))
    assert caught.value.param == "n"
    assert len(servicer.requests) == 1
    assert servicer.cancelled == [], "the request may be another's"


def test_a_message_that_grpc_does_not_send_is_not_tried_again(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [("grpc.max_send_message_length", 64)]
    monkeypatch.setattr("quadriga.client.base.CHANNEL_OPTIONS", options)
    with Client(target) as client, pytest.raises(InvalidRequest, match="larger than max"):
        client.generate("x" * 100)


def test_retries_end(servicer: Servicer, client: Client) -> None:
    servicer.faults = [(0, Overloaded("full", retry_after_s=0.001))] * 9
    with pytest.raises(Overloaded):
        client.generate("x")
    assert len(servicer.requests) == FAST.max_attempts


def test_retries_keep_the_request_id(servicer: Servicer, client: Client) -> None:
    servicer.faults = [(0, Overloaded("full")), (0, Unavailable("away"))]
    assert client.generate("x").text == "".join(WORDS)
    assert len({r.request_id for r in servicer.requests}) == 1


async def test_embeddings_by_both_clients(servicer: Servicer, client: Client, target: str) -> None:
    servicer.faults = [(0, Unavailable("away"))]
    found = client.embed(["ab", "c"], pooling="last")
    assert found.vectors == ((2.0, 0.5), (1.0, 0.5))
    assert found.prompt_tokens == 3
    first, again = servicer.requests
    assert first.request_id == again.request_id
    assert again.pooling == "last"
    async with AsyncClient(target, api_key="k", retry=FAST) as other:
        assert (await other.embed("abc")).vectors == ((3.0, 0.5),)
        await other.embed([[1, 2], [3]], model="m")
    assert [list(i.token_ids.ids) for i in servicer.requests[-1].inputs] == [[1, 2], [3]]


def test_the_servers_wait_is_honoured_and_bounded() -> None:
    policy = RetryPolicy(max_attempts=3, first_pause_s=0.1, max_pause_s=5)
    asked = policy.pause_s(Overloaded("full", retry_after_s=2.0), 1)
    assert asked is not None
    assert 2.0 <= asked <= 2.2
    assert policy.pause_s(Overloaded("full", retry_after_s=60.0), 1) is None
    assert policy.pause_s(Overloaded("full"), 3) is None
    assert policy.pause_s(InvalidRequest("no"), 1) is None
    pauses = [policy.pause_s(Unavailable("x"), n) or 0.0 for n in (1, 2)]
    often = RetryPolicy(max_attempts=10_000, max_pause_s=0.01).pause_s(Unavailable("x"), 2_000)
    assert often is not None and often <= 0.01
    assert 0.05 <= pauses[0] <= 0.1 <= pauses[1] <= 0.2


def test_leaving_a_stream_cancels_it(servicer: Servicer, client: Client) -> None:
    pieces = client.stream("x")
    next(pieces)
    pieces.close()
    assert servicer.cancelled == [servicer.requests[0].request_id]


def test_closing_the_client_cancels_streams_that_are_open(servicer: Servicer, target: str) -> None:
    with Client(target, api_key="k", timeout_s=20) as client:
        assert len(list(client.stream("x", request_id="whole"))) == len(WORDS)
        read, left = client.stream("x", request_id="read"), client.stream("x", request_id="left")
        assert [next(read).text for _ in WORDS] == WORDS
        next(left)
    assert servicer.cancelled == ["left"]


async def test_closing_a_client_cancels_whole_answers_that_are_awaited(
    servicer: Servicer, target: str
) -> None:
    servicer.may_answer.clear()
    client, plain = AsyncClient(target), Client(target)
    running = [
        asyncio.ensure_future(client.generate("x", request_id="a")),
        asyncio.ensure_future(client.embed("x", request_id="b")),
        asyncio.ensure_future(asyncio.to_thread(plain.generate, "x", request_id="c")),
    ]
    await until(lambda: len(servicer.requests) == len(running))
    await client.close()
    await asyncio.to_thread(plain.close)
    servicer.may_answer.set()
    await asyncio.wait(running)
    assert sorted(servicer.cancelled) == ["a", "b", "c"]


def test_timeouts(servicer: Servicer, client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.generate("x", timeout_s=0.0)
    servicer.faults = [(0, Unavailable("away", retry_after_s=9.0))]
    begun_s = time.monotonic()
    with pytest.raises(Unavailable):
        client.generate("x", timeout_s=8.0)
    with pytest.raises(ValueError, match="timeout_s: must be a finite number of seconds"):
        client.generate("x", timeout_s=math.inf)
    assert time.monotonic() - begun_s < 8.0, "no wait that cannot help"


def test_an_url_is_no_target() -> None:
    with pytest.raises(ValueError, match="must be host:port"):
        Client("http://127.0.0.1:9000")


def test_nobody_there() -> None:
    policy = RetryPolicy(max_attempts=2, first_pause_s=0.001)
    with Client("127.0.0.1:1", retry=policy, timeout_s=5) as client, pytest.raises(Unavailable):
        client.generate("x")


async def test_the_async_client(servicer: Servicer, target: str) -> None:
    servicer.faults = [(1, ReplicaDied("gone"))]
    async with AsyncClient(target, api_key="k", retry=FAST, timeout_s=20) as client:
        assert [p.text async for p in client.stream("x")] == WORDS
        assert (await client.generate("x")).choices[0].token_ids == (0, 1, 2, 3)
        assert (await client.models())[0].id == "m"
        assert await client.cancel("r")


async def test_the_async_client_leaves_a_stream(servicer: Servicer, target: str) -> None:
    servicer.faults = [(2, InvalidRequest("no", param="n"))]
    async with AsyncClient(target, api_key="k", timeout_s=20) as client:
        with pytest.raises(InvalidRequest):
            [p async for p in client.stream("x", request_id="of another")]
        pieces = client.stream("x", request_id="left")
        await anext(pieces)
        await pieces.aclose()
        read = client.stream("x", request_id="read")
        assert [(await anext(read)).text for _ in WORDS] == WORDS
        async for _ in client.stream("x", request_id="broken off"):
            break
    assert servicer.cancelled == ["left", "broken off"]


def test_the_services_own_limit_holds_where_the_caller_sets_none(
    servicer: Servicer, target: str
) -> None:
    with Client(target, api_key="k") as client:
        client.generate("x")
        client.generate("x", timeout_s=9.0)
    unlimited, limited = servicer.requests
    assert not unlimited.HasField("deadline_ms") and 0 < limited.deadline_ms <= 9000


def test_an_option_that_is_none_is_as_one_left_out() -> None:
    names: Any = sorted(CallOptions.__annotations__)
    assert make_request("x", "m", "r", dict.fromkeys(names)) == make_request("x", "m", "r", {})
    with pytest.raises(TypeError, match=r'tool_choice: give "auto"'):
        make_request("x", None, None, {"tool_choice": {"type": "auto"}})  # type: ignore[typeddict-item]


def test_requests_as_messages() -> None:
    messages = [Message("system", "s"), Message("user", "u", name="n")]
    options: Any = {"stop": "one", "logit_bias": {3: 1.5}, "n": 2, "seed": -1}
    request = make_request(messages, "m", None, options)
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "s"), ("user", "u")]
    assert list(request.stop) == ["one"]
    assert dict(request.logit_bias) == {3: 1.5}
    assert request.request_id
    assert list(make_request([1, 2], None, "r", {}).prompt_token_ids.ids) == [1, 2]
    with pytest.raises(TypeError, match="unknown options: colour"):
        make_request("x", None, None, {"colour": 1})  # type: ignore[typeddict-unknown-key]


def test_messages_may_be_dicts() -> None:
    messages: list[Any] = [
        {"role": "system", "content": "s"},
        Message("user", "u"),
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "name": "n", "tool_calls": None},
    ]
    sent = make_request(messages, None, None, {}).chat.messages
    wanted = [("system", "s"), ("user", "u"), ("user", "ab"), ("assistant", "c")]
    assert [(m.role, m.content) for m in sent] == wanted
    assert sent[3].name == "n"
    assert not sent[0].HasField("name")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "user"}], r"messages\[0\].content: must be text, not NoneType"),
        ([{"content": "a"}], r"messages\[0\].role: must be text"),
        ([Message("user", "a"), {"role": "user", "content": 7}], r"messages\[1\].content"),
        ([{"role": "user", "content": "a", "tools": []}], "tools not supported"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "must be text, not a list"),
        (["a", "b"], "not a list with str"),
        ([Message("user", "a"), "b"], "not a list with Message"),
        ([1.5], "not a list with float"),
        (b"a", "not bytes"),
        ({"role": "user", "content": "a"}, "not dict"),
        (None, "not NoneType"),
    ],
)
def test_what_is_no_prompt_is_told(prompt: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_request(prompt, None, None, {})


def test_token_ids_may_be_an_array_and_bytes_are_none() -> None:
    ids: Any = np.array([5, 6])
    assert make_request(ids, None, None, {}).prompt_token_ids.ids == [5, 6]
    for one, rows in ((ids, [[5, 6]]), (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]])):
        sent = make_embed_request(one, None, None, {}).inputs
        assert [list(i.token_ids.ids) for i in sent] == rows
    for wrong in (b"hi", [b"hi"], [1.5], ["a", 5]):
        with pytest.raises(TypeError, match=r"inputs\[.\]: give text or a list of token ids, not"):
            make_embed_request(wrong, None, None, {})  # type: ignore[arg-type]


async def test_what_no_metadata_can_hold_is_told_at_once(servicer: Servicer, target: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="api_key: only printable ASCII") as caught:
            kind(target, api_key="secret\n")
        assert "secret" not in str(caught.value)
    with Client(target) as client, pytest.raises(ValueError, match="request_id: only"):
        next(client.stream("x", request_id="für mich"))
    async with AsyncClient(target) as other:
        for call in (other.generate("x", request_id="a\n"), other.cancel("a\n")):
            with pytest.raises(ValueError, match="request_id: only"):
                await call
    assert not servicer.requests


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 1.5), ("stop", 5), ("exit_policy", 3), ("tools", {"a": 1}), ("seed", 2**70)],
)
def test_an_option_of_another_type_is_named(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .* cannot be sent"):
        make_request("x", None, None, {name: value})  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"^pooling: 3 cannot be sent"):
        make_embed_request("x", None, None, {"pooling": 3})  # type: ignore[typeddict-item]


def test_one_text_is_no_list_of_choices() -> None:
    with pytest.raises(TypeError, match="give a list of texts"):
        make_request("x", None, None, {"structured_outputs": {"choice": "yes"}})


def test_a_gap_in_a_stream_is_an_error() -> None:
    progress = StreamProgress(make_request("x", None, None, {}))
    with pytest.raises(InvariantViolation):
        progress.take(pb.GenerateResponse(choices=[pb.ChoiceDelta(first_token_index=1)]))


def test_usage_comes_though_the_last_choice_had_ended_before_a_break() -> None:
    progress = StreamProgress(make_request("x", None, None, {"n": 2}))
    ends = [pb.ChoiceDelta(index=i, finish_reason=pb.FINISH_REASON_STOP) for i in (0, 1)]
    progress.take(pb.GenerateResponse(choices=ends[1:]))
    usage = pb.Usage(completion_tokens=4)
    progress.take(pb.GenerateResponse(choices=ends[:1]))  # and here it broke again
    assert not progress.is_complete
    (piece,) = progress.take(pb.GenerateResponse(choices=ends[::-1], usage=usage))
    assert (piece.index, piece.usage and piece.usage.completion_tokens) == (0, 4)
    assert progress.is_complete
    # Another ingress begins a choice anew that had ended, and is done with it last.
    (piece,) = progress.take(pb.GenerateResponse(choices=ends[:1], usage=usage))
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("", (), FinishReason.STOP)
    assert piece.usage and piece.usage.completion_tokens == 4


def test_no_text_is_read_twice() -> None:
    """The text of tokens that are told again cannot be told from the text of new ones."""
    progress = StreamProgress(make_request("x", None, None, {}))

    def told(first: int, *ids: int) -> Any:
        delta = pb.ChoiceDelta(first_token_index=first, token_ids=ids, text="ab"[: len(ids)])
        return pb.GenerateResponse(choices=[delta])

    progress.take(told(0, 4, 5))
    with pytest.raises(InvariantViolation, match="goes back to token 1, 2 are there"):
        progress.take(told(1, 6, 7))


def test_closing_ends_calls(target: str) -> None:
    client = Client(target, timeout_s=5)
    pieces = client.stream("x")
    next(pieces)
    client.close()
    with pytest.raises(Cancelled):
        list(pieces)
    with pytest.raises(Cancelled, match="was closed"):
        client.models()


def test_a_call_whose_client_is_closed_before_it_begins_was_cancelled(target: str) -> None:
    class Closed(Client):
        def _connect(self) -> Any:
            stub = super()._connect()
            self.close()  # as another thread does
            return stub

    for call in ("generate", "embed", "cancel"):
        with pytest.raises(Cancelled, match="the client was closed"):
            getattr(Closed(target, timeout_s=5), call)("x")


def test_closing_ends_a_call_that_waits_to_try_again(servicer: Servicer, target: str) -> None:
    waits, may_go_on = threading.Event(), threading.Event()

    class Waiting(RetryPolicy):
        def pause_s(self, error: QuadrigaError, attempt: int) -> float:
            waits.set()
            may_go_on.wait(30)
            return 0.0

    servicer.faults = [(0, Unavailable("away"))]
    client = Client(target, retry=Waiting())
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.generate, "x")
        waits.wait(30)
        client.close()
        may_go_on.set()
        assert isinstance(call.exception(), Cancelled)
    assert len(servicer.requests) == 1


def test_an_async_client_may_be_made_before_its_loop(target: str) -> None:
    client = AsyncClient(target, api_key="k")

    async def ask() -> list[sdk.Model]:
        async with client:
            return await client.models()

    assert [model.id for model in asyncio.run(ask())] == ["m"]


async def test_closing_ends_calls_of_the_async_client_in_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}")
        calls = client.generate("x"), anext(client.stream("x"))
        running = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0.1)
        await client.close()
        assert all(isinstance(ended, Cancelled) for ended in await running)
        other = AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}")
        cancel = asyncio.ensure_future(other.cancel("y"))
        await settled()
        await other.close()
        for call in (cancel, other.cancel("y")):
            with pytest.raises(Cancelled, match="was closed"):
                await call


def test_public_surface() -> None:
    assert sorted(sdk.__all__) == [
        "AsyncClient",
        "Choice",
        "Client",
        "Completion",
        "DepthSpan",
        "Embeddings",
        "Eta",
        "Message",
        "Model",
        "Piece",
        "PredictedTokens",
        "RetryPolicy",
        "ToolCall",
        "ToolCallDelta",
        "Usage",
    ]


def test_the_sdk_is_light() -> None:
    code = (
        "import sys, quadriga.client; "
        "print([m for m in ('torch', 'ray', 'pydantic', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
