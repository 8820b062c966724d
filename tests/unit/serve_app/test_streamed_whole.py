"""A stream, put together, is the whole answer: text, log-probabilities, ends and usage."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from serve_app.http import call, generation, server
from serve_app.openai import rendering, validation
from tests.hostile import tried
from tests.unit.serve_app.conftest import MakeStand, Stand

OPTIONS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["hi", ["hi", "sort: 3 1"], [5, 6, 7], [[5], [6, 7, 8]]]),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(0, 30),
        "echo": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 2]),
        "stop": st.sampled_from([None, "wör", "é", "😀 and", ["more", "12"], "Hello"]),
        "return_token_ids": st.booleans(),
        "stream_options": st.sampled_from([None, {"include_usage": True}]),
    }
).filter(lambda o: o["echo"] or o["max_tokens"])


def put_together(events: bytes) -> tuple[dict[int, dict[str, Any]], dict[str, Any] | None]:
    """Choices by index, and the usage, of a stream that ended well."""
    lines = [line.removeprefix("data: ") for line in events.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in map(json.loads, lines):
        usage = chunk.get("usage") or usage
        for new in chunk["choices"]:
            choice = choices.setdefault(new["index"], {"text": "", "logprobs": None})
            assert choice.get("finish_reason") is None, "nothing comes after the end"
            choice["text"] += new["text"]
            choice["finish_reason"] = new["finish_reason"]
            for name in {"stop_reason", "prompt_token_ids"} & new.keys():
                assert name not in choice, "once"
                choice[name] = new[name]
            if "token_ids" in new:
                choice.setdefault("token_ids", []).extend(new["token_ids"])
            if new["logprobs"] is not None:
                table = choice["logprobs"] or {key: [] for key in new["logprobs"]}
                choice["logprobs"] = {k: table[k] + v for k, v in new["logprobs"].items()}
    return choices, usage


@pytest_asyncio.fixture(params=[1, 5])
async def stand(make_stand: MakeStand, request: Any, monkeypatch: pytest.MonkeyPatch) -> Stand:
    monkeypatch.setattr("serve_app.request.request.LOGPROBS_AT_ONCE", 3)
    return await make_stand(tokens_per_step=request.param)


@tried(60)
@given(options=OPTIONS)
async def test_a_stream_put_together_is_the_whole(stand: Stand, options: dict[str, Any]) -> None:
    asked = {k: v for k, v in options.items() if v is not None and k != "stream_options"}
    whole = (await stand.complete(**asked)).json()
    streamed = await stand.complete(**asked, stream=True, stream_options=options["stream_options"])
    choices, usage = put_together(streamed.content)
    assert sorted(choices) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        assert choices[choice.pop("index")] == choice
    assert usage == (whole["usage"] if options["stream_options"] else None)


ECHOED = {"prompt": "é😀a", "max_tokens": 4, "echo": True, "logprobs": 1}
MARKED = "a<|pad|>"
"""A special token's own characters are no answer's text, but the prompt's."""


@pytest.mark.parametrize("prompt", ["é😀a", MARKED])
async def test_offsets_count_characters(stand: Stand, prompt: str) -> None:
    (choice,) = (await stand.complete(**ECHOED | {"prompt": prompt})).json()["choices"]
    offsets = choice["logprobs"]["text_offset"]
    named = zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True)
    assert all(token in top for token, top in named if top is not None), "as OpenAI's have it"
    begins = [
        choice["text"][at:].startswith(word) for at, word in zip(offsets[-4:], "Hell", strict=True)
    ]
    end = len(prompt)
    assert offsets[0] == 0 and offsets[-4:] == [end, end + 1, end + 2, end + 3] and all(begins)


@pytest.mark.parametrize("fields", [{}, {"stop": "wörx"}, ECHOED, ECHOED | {"prompt": MARKED}])
async def test_offsets_go_on_after_a_resumption(stand: Stand, fields: dict[str, Any]) -> None:
    asked = {"logprobs": 0, "stream": True} | fields

    async def offsets(cursor: int) -> list[int]:
        headers = {"idempotency-key": "k", "x-resume-index": str(cursor)}
        choices, _ = put_together((await stand.complete(headers=headers, **asked)).content)
        return list(choices[0]["logprobs"]["text_offset"])

    whole = await offsets(0)
    for cursor in range(1, min(len(stand.cluster.script), fields.get("max_tokens", 100))):
        assert (rest := await offsets(cursor)) == whole[-len(rest) :], cursor


async def test_log_probabilities_that_no_memory_holds_are_refused(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await stand.complete(prompt=["a"] * 32, n=16, max_tokens=1000, logprobs=20)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "logprobs"
    assert "are 10752000 log-probabilities, above the limit" in reply.json()["error"]["message"]
    monkeypatch.setattr(validation, "MAX_LOGPROBS", 2 * 21 * 7)
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    reply = await stand.http.post("/v1/chat/completions", json=body | {"n": 2})
    assert reply.json()["usage"]["completion_tokens"] == 14, "who names no limit has this one"


async def test_long_answers_are_written_beside_the_event_loop(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[bool] = []

    def noted(place: Any, name: str) -> None:
        render = getattr(place, name)

        def note(*args: Any) -> bytes:
            on_loop.append(threading.current_thread() is threading.main_thread())
            return bytes(render(*args))

        monkeypatch.setattr(place, name, note)

    noted(rendering.COMPLETION, "events")
    noted(generation, "json_in_parts")
    noted(server, "json_in_parts")
    assert (await stand.complete(logprobs=1, stream=True)).status_code == 200
    monkeypatch.setattr(call, "PLAIN_ITEMS", 1000)
    for logprobs in (None, 1):
        assert (await stand.complete(logprobs=logprobs)).status_code == 200
    body = {"prompt": "7 " * 2500, "return_token_strs": True}
    answer = (await stand.http.post("/tokenize", json=body)).json()
    assert "".join(answer["token_strs"]) == body["prompt"]
    assert len(answer["tokens"]) == answer["count"] == len(answer["token_strs"])
    assert on_loop == [False] * (len(on_loop) - 3) + [True, False, False]
