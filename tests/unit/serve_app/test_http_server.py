"""The HTTP server: for any input the answer has the documented form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quadriga.errors import InvalidRequest
from serve_app.openai.bodies import parse_body, parse_json
from serve_app.openai.rendering import CompletionFormat
from serve_app.openai.schema import ChatBody, CompletionBody
from serve_app.openai.unsupported import CHAT, COMPLETIONS
from serve_app.request.request import Request
from tests.unit.serve_app.conftest import ANSWER, END_ID, MODEL, Stand
from tests.waiting import until

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(
    sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *COMPLETIONS, *CHAT})
)


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(fields=st.dictionaries(NAMES, JSON, max_size=4), chat=st.booleans())
async def test_no_body_makes_an_internal_error(
    stand: Stand, fields: dict[str, Any], chat: bool
) -> None:
    base: dict[str, Any] = {"max_tokens": 3}
    base |= {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    reply = await stand.http.post(path, content=json.dumps(base | fields).encode())
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@given(data=st.binary(max_size=40))
def test_no_bytes_escape_the_parser(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        parse_body(CompletionBody, parse_json(data))


async def test_a_bug_is_an_internal_error_and_is_logged(
    stand: Stand, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: str) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(stand.engine.models, "find", broken)
    with caplog.at_level(logging.ERROR):
        reply = await stand.complete()
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"
    assert "a bug" not in reply.text
    assert "unexpected failure" in caplog.text


async def test_events_are_framed_to_the_letter(stand: Stand) -> None:
    reply = await stand.complete(stream=True, stream_options={"include_usage": True})
    frames = reply.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == ANSWER
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(stand.cluster.script)
    assert all(c["usage"] is None for c in chunks[:-1])


async def test_chunks_are_compact_and_their_head_is_made_once(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = CompletionFormat._head

    def counted(self: CompletionFormat, request: Request) -> str:
        made.append(make(self, request))
        return made[-1]

    monkeypatch.setattr(CompletionFormat, "_head", counted)
    asked = {"include_usage": True, "continuous_usage_stats": True}
    reply = await stand.complete(stream=True, stream_options=asked)
    chunks = [f.removeprefix("data: ") for f in reply.text.split("\n\n")[:-2]]
    assert len(chunks) > 3
    assert all(json.loads(chunk)["usage"]["prompt_tokens"] for chunk in chunks)
    assert [json.dumps(json.loads(c), separators=(",", ":")) for c in chunks] == chunks
    assert len(made) == 2, "for the chunks of tokens, and for the last"
    assert all(f"data: {chunk}".startswith(made[0]) for chunk in chunks)


async def test_token_ids_come_with_every_choice_that_asks(stand: Stand) -> None:
    whole = (await stand.complete(return_token_ids=True)).json()
    streamed = await stand.complete(stream=True, return_token_ids=True)
    chunks = [json.loads(f.removeprefix("data: ")) for f in streamed.text.split("\n\n")[:-2]]
    in_chunks = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert in_chunks == whole["choices"][0]["token_ids"]
    assert len(in_chunks) == whole["usage"]["completion_tokens"]
    plain = (await stand.complete()).json()
    assert not {"token_ids", "prompt_token_ids"} & plain["choices"][0].keys()


async def test_ids_of_the_prompt_come_once_where_vllm_has_them(stand: Stand) -> None:
    wanted = MODEL.tokenizer.encode("a")
    say = {"messages": [{"role": "user", "content": "a"}], "n": 2}
    for path, body in (("/v1/completions", {"prompt": "a", "n": 2}), ("/v1/chat/completions", say)):
        body |= {"return_token_ids": True, "max_tokens": 3, "seed": 1}
        whole = (await stand.http.post(path, json=body)).json()
        streamed = await stand.http.post(path, json=body | {"stream": True})
        chunks = [json.loads(f.removeprefix("data: ")) for f in streamed.text.split("\n\n")[:-2]]
        if path == "/v1/completions":
            found = [choice["prompt_token_ids"] for choice in whole["choices"]]
            said = [c["choices"][0].get("prompt_token_ids") for c in chunks]
        else:
            found = [whole["prompt_token_ids"]]
            said = [c.get("prompt_token_ids") for c in chunks]
            wanted = MODEL.tokenizer.prompt_ids(say["messages"])
        assert found == [ids for ids in said if ids is not None] == [wanted] * len(found)
        key = {"idempotency-key": f"key-of-{body['n']}-{len(path)}"}
        await stand.http.post(path, json=body | {"stream": True}, headers=key)
        key["x-resume-index"] = "1,1"
        again = await stand.http.post(path, json=body | {"stream": True}, headers=key)
        assert again.status_code == 200 and "prompt_token_ids" not in again.text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"max_tokens": 1}, None),
        ({"stop": ["nothing", ANSWER[2:4]]}, ANSWER[2:4]),
        ({"stop_token_ids": [END_ID]}, None),
        ({"stop_token_ids": [END_ID], "ignore_eos": True}, END_ID),
    ],
)
async def test_which_stop_string_or_token_ended_an_answer_is_told(
    stand: Stand, fields: dict[str, Any], reason: str | int | None
) -> None:
    whole = (await stand.complete(**fields)).json()
    assert whole["choices"][0]["stop_reason"] == reason
    streamed = await stand.complete(stream=True, **fields)
    chunks = [json.loads(f.removeprefix("data: ")) for f in streamed.text.split("\n\n")[:-2]]
    said = [chunk["choices"][0].get("stop_reason", "") for chunk in chunks]
    assert said[-1] == reason and set(said[:-1]) <= {""}


async def test_role_and_first_text_come_together(stand: Stand) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    reply = await stand.http.post("/v1/chat/completions", json=body)
    deltas = [
        json.loads(frame[6:])["choices"][0]["delta"]
        for frame in reply.text.strip().split("\n\n")[:-1]
    ]
    assert deltas[0]["role"] == "assistant"
    assert deltas[0]["content"]
    assert all("role" not in delta for delta in deltas[1:])


async def test_the_page_of_the_api_needs_no_internet(stand: Stand) -> None:
    page = await stand.http.get("/docs")
    assert page.status_code == 200
    assert "http" not in page.text.replace("http-equiv", ""), "nothing from elsewhere"
    names = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
    assert len(names) == 3
    for name in names:
        reply = await stand.http.get(f"/{name}")
        assert reply.status_code == 200
        assert len(reply.content) > 1000
    assert "url: 'openapi.json'" in page.text


async def test_routes_of_other_servers(stand: Stand) -> None:
    await until(lambda: stand.engine._cluster_state.view.snapshots != [])
    for method in ("GET", "POST"):
        reply = await stand.http.request(method, "/ping")
        assert (reply.status_code, reply.content) == (200, b"")
    assert set((await stand.http.get("/version")).json()) == {"version"}
    load = (await stand.http.get("/load")).json()
    assert load == {"server_load": 0, "num_running": 0, "num_waiting": 0}
    stand.engine._cluster_state._taken_s -= 60.0
    stand.cluster.directory = None  # type: ignore[assignment, method-assign]  # the scheduler is away
    load = (await stand.http.get("/load")).json()
    assert load == {"server_load": 0, "num_running": None, "num_waiting": None}


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/health/", "/docs/"])
async def test_a_slash_too_many_redirects_nobody(path: str, stand: Stand) -> None:
    """Behind TLS that would be to `http://`, where a client repeats its prompt in the clear."""
    reply = await stand.http.request("POST" if "v1" in path else "GET", path)
    assert (reply.status_code, "location" in reply.headers) == (404, False)
    assert path in reply.json()["error"]["message"]
    assert reply.json()["error"]["message"].endswith(f"try {path[:-1]}")


async def test_a_route_that_is_not_there_is_told_one_that_is(stand: Stand) -> None:
    for path, instead in (("/", "/docs"), ("/v1/v1/chat/completions", "/v1/chat/completions")):
        assert (await stand.http.get(path)).json()["error"]["message"].endswith(f"; try {instead}")


async def test_who_names_no_model_gets_the_default(stand: Stand) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "model": ""}),
        ("/v1/responses", {"input": "a", "model": None}),
        ("/tokenize", {"prompt": "a", "model": None}),
        ("/detokenize", {"tokens": [1], "model": None}),
    ):
        reply = await stand.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json().get("model", "quadriga-s") == "quadriga-s"
    listing = await stand.http.get("/v1/models")
    assert (await stand.http.get("/v1/models/")).json() == listing.json()


async def test_every_5xx_has_a_line_in_the_log(
    stand: Stand, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.http.server_metrics.LOG_INTERVAL_S", 0.0)
    await stand.engine.close()
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/v1/completions")):
        reply = await stand.http.request(method, path, json={"prompt": "a"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
        assert f"answered 503: {method} {path}" in caplog.text


async def test_long_prompts_are_encoded_off_the_loop(stand: Stand) -> None:
    reply = await stand.complete(prompt="7 " * 1200)
    assert reply.status_code == 200
    assert stand.cluster.submitted[0].prompt_ids == (
        stand.engine.models.find("quadriga-s").tokenizer.encode("7 " * 1200)
    )


async def test_prompts_of_ids_that_are_echoed_are_decoded_off_the_loop(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, threads = MODEL.tokenizer.decode, set[str]()

    def noted(*args: Any, **named: Any) -> str:
        threads.add(threading.current_thread().name.partition("_")[0])
        return decode(*args, **named)

    monkeypatch.setattr(MODEL.tokenizer, "decode", noted)
    monkeypatch.setattr("serve_app.openai.models.INLINE_SIZE", 2)
    reply = await stand.complete(prompt=MODEL.tokenizer.encode("hi you"), echo=True, max_tokens=0)
    assert reply.json()["choices"][0]["text"] == "hi you"
    assert threads == {"encode"}


async def test_special_tokens_have_no_text_where_that_is_asked(stand: Stand) -> None:
    body = {"model": "quadriga-s", "tokens": [*MODEL.tokenizer.encode("hi"), END_ID]}
    shown = (await stand.http.post("/detokenize", json=body)).json()["prompt"]
    hidden = await stand.http.post("/detokenize", json=body | {"skip_special_tokens": True})
    assert hidden.json() == {"prompt": "hi"} and shown.startswith("hi") and len(shown) > 2


async def test_few_long_texts_wait(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, text = threading.Event(), "7 " * 1200
    busy = asyncio.ensure_future(stand.engine.models.off_loop(4000, gate.wait))
    await asyncio.sleep(0)
    late = await stand.complete(prompt=text, deadline_ms=50)
    monkeypatch.setattr("serve_app.openai.models.MAX_WAITING_SIZE", 5000)
    refused = await stand.complete(prompt=text)
    gate.set()
    await busy
    assert (late.status_code, refused.status_code) == (504, 429)


async def test_the_sequence_state_holds_every_field(stand: Stand) -> None:
    await stand.complete(
        seed=-5, n=2, priority=3, top_k=-1, stop_token_ids=[7, 7], deadline_ms=9000
    )
    first, second = sorted(stand.cluster.submitted, key=lambda s: s.choice)
    assert (first.choice, second.choice) == (0, 1)
    assert first.sampling == second.sampling
    assert (first.sampling.seed, first.sampling.top_k) == (-5, 0)
    assert first.sampling.stop_token_ids == (7,)
    assert (first.priority, first.ingress_id) == (3, "ingress-0")
    assert first.deadline_unix_s - first.arrival_unix_s == pytest.approx(9.0)


async def test_a_seed_is_drawn_where_none_was_given(stand: Stand) -> None:
    await stand.complete()
    await stand.complete()
    seeds = {s.sampling.seed for s in stand.cluster.submitted}
    assert len(seeds) == 2
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
