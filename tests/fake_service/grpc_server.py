"""A fake gRPC service: well-formed by default, wrong in one way when asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from loadgen.wire.client_grpc import SERVICE
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from tests.fake_service.model import (
    END_ID,
    END_TEXT,
    Answer,
    babble,
    chat_text,
    detokenize,
    stream_text,
    tokenize,
)

Messages = list[pb.GenerateResponse]
Mutation = Callable[[Messages], list[pb.GenerateResponse | bytes]]


def _change(position: int, change: Callable[[pb.GenerateResponse], Any]) -> Mutation:
    def mutate(messages: Messages) -> list[pb.GenerateResponse | bytes]:
        change(messages[position])
        return [*messages]

    return mutate


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda message: setattr(message, name, value)


_ERROR = pb.GenerateResponse(error=pb.Error(code="replica_died", message="gone"))

# The message at 5 is in the middle; the last one brings the end and the usage.
GRPC_FAULTS: dict[str, Mutation] = {
    "gap": lambda messages: [*messages[:5], *messages[6:]],
    "duplicate": lambda messages: [*messages[:6], messages[5], *messages[6:]],
    "wrong_usage": _change(-1, lambda m: m.usage.MergeFrom(pb.Usage(completion_tokens=1))),
    "no_usage": _change(-1, lambda m: m.ClearField("usage")),
    "early_usage": _change(5, lambda m: m.usage.SetInParent()),
    "error_message": lambda messages: [*messages[:5], _ERROR],
    "not_a_message": lambda messages: [*messages[:5], b"\xff\xff", *messages[6:]],
    "half_character": lambda messages: [
        *messages[:5],
        messages[5].SerializeToString().replace(b" w", b"\xc3w"),
        *messages[6:],
    ],
    "id_changes": _change(5, _set("request_id", "other")),
    "model_changes": _change(5, _set("model", "other")),
    "choice_out_of_range": _change(5, lambda m: _set("index", 7)(m.choices[0])),
    "empty_message": lambda messages: [
        *messages[:5],
        pb.GenerateResponse(request_id="fake", model="fake"),
        *messages[5:],
    ],
    "early_end": lambda messages: [*messages[:5]],
    "no_finish": _change(-1, lambda m: _set("finish_reason", 0)(m.choices[0])),
    "after_finish": lambda messages: [*messages, messages[5]],
}
GRPC_SERVER_FAULTS = ("refuse", "refuse_without_retry_after", "internal", "hang", "one_token_less")


@dataclass(frozen=True, slots=True)
class FakeGrpcOptions:
    """How the fake behaves; see `FakeOptions`."""

    fault: str | None = None
    tokens_per_write: int = 1
    answer: Answer | None = None


class FakeGrpcServer:
    """`async with FakeGrpcServer(options) as server:` listens on `server.address`."""

    def __init__(self, options: FakeGrpcOptions | None = None) -> None:
        self.options = options or FakeGrpcOptions()
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> FakeGrpcServer:
        self._server = grpc.aio.server()
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self._generate, request_deserializer=pb.GenerateRequest.FromString
            ),
            "GenerateOnce": grpc.unary_unary_rpc_method_handler(
                self._generate_once, request_deserializer=pb.GenerateRequest.FromString
            ),
        }
        generic = grpc.method_handlers_generic_handler(SERVICE.strip("/"), handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await self._server.stop(grace=None)

    async def _generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[bytes]:
        await self._refuse(context)
        fault = self.options.fault
        messages = self._messages(request)
        mutate = GRPC_FAULTS.get(fault or "")
        for part in mutate(messages) if mutate else messages:
            yield part if isinstance(part, bytes) else part.SerializeToString()
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "error_message":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async def _generate_once(self, request: pb.GenerateRequest, context: Any) -> bytes:
        await self._refuse(context)
        outputs, reason = self._outputs(request)
        answer = pb.GenerateOnceResponse(request_id="fake", model=request.model)
        for index, ids in enumerate(outputs):
            text = detokenize(ids).removesuffix(END_TEXT)
            answer.choices.add(index=index, token_ids=ids, text=text, finish_reason=reason)
        answer.usage.CopyFrom(self._usage(request, outputs))
        return answer.SerializeToString()

    async def _refuse(self, context: Any) -> None:
        fault = self.options.fault
        if fault in ("refuse", "refuse_without_retry_after"):
            trailers = (("retry-after-ms", "1500"),) if fault == "refuse" else ()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", trailers)
        if fault == "internal":
            await context.abort(grpc.StatusCode.INTERNAL, "broken")

    def _messages(self, request: pb.GenerateRequest) -> Messages:
        outputs, reason = self._outputs(request)
        messages: Messages = []
        for index, output in enumerate(outputs):
            sent = 0
            for ids, text in stream_text(output, self.options.tokens_per_write):
                message = pb.GenerateResponse(request_id="fake", model=request.model)
                delta = message.choices.add(
                    index=index, first_token_index=sent, token_ids=ids, text=text
                )
                sent += len(ids)
                if sent == len(output):
                    delta.finish_reason = reason
                messages.append(message)
        messages[-1].usage.CopyFrom(self._usage(request, outputs))
        return messages

    def _outputs(self, request: pb.GenerateRequest) -> tuple[list[list[int]], Any]:
        prompt_ids = _prompt_ids(request)
        limit = request.max_tokens - (self.options.fault == "one_token_less")
        if self.options.answer is not None:
            answer = self.options.answer(detokenize(prompt_ids))
            if answer is not None:
                ids = [*tokenize(answer), END_ID][:limit]
                is_end = ids[-1] == END_ID
                return [ids], pb.FINISH_REASON_STOP if is_end else pb.FINISH_REASON_LENGTH
        num_choices = request.n if request.HasField("n") else 1
        outputs = [babble(prompt_ids, choice, limit) for choice in range(num_choices)]
        return outputs, pb.FINISH_REASON_LENGTH

    def _usage(self, request: pb.GenerateRequest, outputs: list[list[int]]) -> pb.Usage:
        prompt, output = len(_prompt_ids(request)), sum(map(len, outputs))
        return pb.Usage(
            prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output
        )


def _prompt_ids(request: pb.GenerateRequest) -> list[int]:
    match request.WhichOneof("input"):
        case "prompt_token_ids":
            return list(request.prompt_token_ids.ids)
        case "chat":
            return tokenize(chat_text([{"content": m.content} for m in request.chat.messages]))
        case _:
            return tokenize(request.prompt)
