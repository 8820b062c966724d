"""POST /v1/embeddings and Embed: forms of inputs and answers, refusals, what is counted."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import grpc
import pytest

from quadriga.client.wire import embeddings, make_embed_request
from quadriga.core.request import SamplingParams
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.embeddings.answers import EmbeddingsAnswer
from serve_app.grpc.server import GrpcServer
from tests.unit.serve_app.conftest import MODEL, MakeStand, Stand
from tests.unit.serve_app.test_grpc_server import KEYS, Context

PATH = "/v1/embeddings"
LIMIT = MODEL.max_model_len


async def embed(stand: Stand, **fields: Any) -> dict[str, Any]:
    reply = await stand.http.post(PATH, json={"model": "quadriga-s"} | fields)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    EmbeddingsAnswer.model_validate(answer)
    return answer


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ([5, 6, 7, 8], [[5, 6, 7, 8]]),
        ([[5, 6, 7], [9, 8, 7]], [[5, 6, 7], [9, 8, 7]]),
        ("abc", [MODEL.tokenizer.encode("abc")]),
        (["abc", "x yz"], [MODEL.tokenizer.encode(text) for text in ("abc", "x yz")]),
    ],
)
async def test_each_form_of_input(stand: Stand, given: Any, ids: list[list[int]]) -> None:
    """The fake replica's vector is the first three token ids."""
    answer = await embed(stand, input=given)
    assert [row["embedding"] for row in answer["data"]] == [row[:3] for row in ids]
    assert [row["index"] for row in answer["data"]] == list(range(len(ids)))
    num_tokens = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert answer["model"] == "quadriga-s"


async def test_base64_and_length_one(stand: Stand) -> None:
    answer = await embed(stand, input=[3, 4, 12], encoding_format="base64", normalize=True)
    vector = array("f", base64.b64decode(answer["data"][0]["embedding"]))
    assert vector.tolist() == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    plain = await embed(stand, input=[3, 4, 12], encoding_format="float")
    assert math.hypot(*plain["data"][0]["embedding"]) == pytest.approx(13)


async def test_what_the_replica_is_asked(stand: Stand) -> None:
    await embed(stand, input=["a", "b"], pooling="last", priority=3)
    await embed(stand, input="c")
    states = list(stand.cluster.submitted)
    assert [s.sampling for s in states] == [
        SamplingParams(max_tokens=0, temperature=0.0, pooling=pooling)
        for pooling in ("last", "last", "mean")
    ]
    assert [s.priority for s in states] == [3, 3, 0]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "input", "Field required"),
        ({"input": []}, "input", "is empty"),
        ({"input": ""}, "input", "is empty"),
        ({"input": [""]}, "input.0", "is empty"),
        ({"input": [[]]}, "input.0", "is empty"),
        ({"input": 7}, "input", "must be text or token ids"),
        ({"input": ["a", [1]]}, "input.1", "of one kind"),
        ({"input": [1, "a"]}, "input.1", "whole numbers"),
        ({"input": [1, 10**9]}, "input.1", "outside the vocabulary"),
        ({"input": [7] * (LIMIT + 1)}, "input", "shorten"),
        ({"input": "7 " * LIMIT, "truncate_prompt_tokens": -1}, "input", "shorten"),
        ({"input": ["a"] * 257}, "input", "above the limit of 256"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "dimensions": 8}, "dimensions", "leave it out"),
        ({"input": "a", "pooling": "max"}, "pooling", "'mean' or 'last'"),
        ({"input": "a", "normalize": 1}, "normalize", "valid boolean"),
        ({"input": "a", "deadline_ms": 2**31 - 1}, "deadline_ms", "above the limit"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "not supported"),
    ],
)
async def test_refusals(stand: Stand, fields: dict[str, Any], param: str, says: str) -> None:
    reply = await stand.http.post(PATH, json=fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert says in error["message"]
    assert not stand.cluster.submitted


async def test_an_input_may_fill_the_context(stand: Stand) -> None:
    await embed(stand, input=[7] * LIMIT)


async def test_what_clients_say_by_themselves(stand: Stand) -> None:
    """mem0 and Llama Stack name the vectors' own length, vLLM's benchmark the model's."""
    size = MODEL.checkpoint.hidden_size
    await embed(stand, input="a", dimensions=size, truncate_prompt_tokens=-1)


async def test_an_unknown_model(stand: Stand) -> None:
    reply = await stand.http.post(PATH, json={"input": "a", "model": "gpt"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_key_runs_it_once(stand: Stand) -> None:
    headers = {"idempotency-key": "a" * 20}
    first, again = [
        await stand.http.post(PATH, json={"input": "a"}, headers=headers) for _ in range(2)
    ]
    assert first.json() == again.json()
    assert len(stand.cluster.submitted) == 1
    other = await stand.http.post(PATH, json={"input": "b"}, headers=headers)
    assert other.status_code == 400
    resumed = await stand.http.post(
        PATH, json={"input": "a"}, headers=headers | {"x-resume-index": "1"}
    )
    assert resumed.json()["error"]["param"] == "x-resume-index"


async def test_it_is_counted(stand: Stand) -> None:
    await embed(stand, input=[[5, 6, 7], [9]])
    series = stand.engine.metrics.of("quadriga-s")
    assert series.prompt_tokens._value.get() == 4
    assert series.generation_tokens._value.get() == 0
    assert stand.engine.metrics.open_requests._value.get() == 0


async def test_over_grpc(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    server, context = GrpcServer(stand.engine), Context()
    message = make_embed_request([[3, 4, 12], [1]], None, None, {"normalize": True})
    found = embeddings(await server.embed(message.SerializeToString(), context))
    assert found.vectors[0] == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert (found.vectors[1], found.prompt_tokens) == ((1.0,), 4)
    assert found.model == "quadriga-s"
    again = await server.embed(message.SerializeToString(), context)
    assert embeddings(again) == found
    assert len(stand.cluster.submitted) == 2, "the same id is the same request"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (pb.EmbedRequest(), "inputs"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput()]), "inputs.0"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")] * 257), "inputs"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")], pooling="max"), "pooling"),
        (
            pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[7] * (LIMIT + 1)))]),
            "inputs.0",
        ),
    ],
)
async def test_refusals_over_grpc(make_stand: MakeStand, message: Any, param: str) -> None:
    stand = await make_stand(keys=KEYS)
    context = Context()
    reply = await GrpcServer(stand.engine).embed(message.SerializeToString(), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert reply.error.param == param


@pytest.mark.parametrize(
    ("inputs", "options", "says"),
    [
        ([3.5], {}, "inputs.0.: give text"),
        ([["a"]], {}, "inputs.0.: give text"),
        ("a", {"dimensions": 3}, "unknown options: dimensions"),
    ],
)
def test_the_sdk_names_a_wrong_input(inputs: Any, options: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        make_embed_request(inputs, None, None, options)
