"""The HTTP API as OpenAI's clients and the load tools see it."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import httpx
import openai
import torch
from transformers import AutoModel

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.text import load_tokenizer
from tests.e2e.conftest import ADAPTER, Service

PROMPT = "Sort: 42 7 19 7 88\n"


def sse(reply: httpx.Response) -> list[Any]:
    """Decode a stream, checking its framing to the letter."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("\n\n")
    frames = reply.text[:-2].split("\n\n")
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame[6:]) for frame in frames[:-1]]


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "quadriga-s", "prompt": PROMPT, "temperature": 0} | fields
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def stream(http: httpx.Client, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    body = {"model": "quadriga-s", "temperature": 0, "stream": True} | fields
    if path.endswith("s") and "messages" not in body:
        body.setdefault("prompt", PROMPT)
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return sse(reply)


# --- small routes ---------------------------------------------------------------------------------


def test_health_and_live(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/live").status_code == 200


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    ids = [model.id for model in client.models.list().data]
    assert [name for name in ids if name != ADAPTER] == ["quadriga-s", "quadriga-auto"]
    card = http.get("/v1/models/quadriga-auto").json()
    assert (card["root"], card["object"], card["max_model_len"]) == ("quadriga-s", "model", 2048)
    assert client.models.retrieve("quadriga-s").owned_by == "quadriga"


def test_embeddings_equal_transformers(client: openai.OpenAI) -> None:
    """By openai's package as it is, which asks for base64 where nobody says otherwise."""
    texts = [PROMPT, "Count from 3 to 20.\n" * 30]
    path = read_checkpoint("quadriga-s").path
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    tokenizer = load_tokenizer(path, "quadriga-s")
    for pooling in ("mean", "last"):
        answer = client.embeddings.create(
            model="quadriga-s", input=texts, extra_body={"pooling": pooling}
        )
        plain = client.embeddings.create(
            model="quadriga-s",
            input=texts,
            encoding_format="float",
            extra_body={"pooling": pooling},
        )
        total = 0
        for row, (text, said) in enumerate(zip(texts, answer.data, strict=True)):
            ids = tokenizer.encode(text)
            total += len(ids)
            with torch.inference_mode():
                states = model(torch.tensor([ids])).last_hidden_state[0]
            exact = states.mean(0) if pooling == "mean" else states[-1]
            assert (torch.tensor(said.embedding) - exact).abs().max() < 1e-4
            assert (torch.tensor(plain.data[row].embedding) - exact).abs().max() < 1e-4
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == total


def test_tokenize_and_back(http: httpx.Client) -> None:
    text = "sort 12, 7 — naïve 😀"
    tokens = http.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    back = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": text}


def test_request_id_is_echoed_once(http: httpx.Client) -> None:
    given = http.get("/live", headers={"x-request-id": "trace-7"})
    assert given.headers.get_list("x-request-id") == ["trace-7"]
    assert len(http.get("/live").headers.get_list("x-request-id")) == 1


# --- completions ----------------------------------------------------------------------------------


def test_completion_by_the_client(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="quadriga-s", prompt=PROMPT, temperature=0)
    assert answer.object == "text_completion"
    assert answer.model == "quadriga-s"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 16
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_the_alias_names_the_model_that_answered(http: httpx.Client) -> None:
    assert complete(http, model="quadriga-auto")["model"] == "quadriga-s"


def test_stream_equals_the_whole_answer(http: httpx.Client) -> None:
    whole = complete(http, max_tokens=40, ignore_eos=True)
    chunks = stream(http, max_tokens=40, ignore_eos=True, stream_options={"include_usage": True})
    text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    assert text == whole["choices"][0]["text"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in chunks[:-1])
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "length"
    assert {c["id"] for c in chunks} == {chunks[0]["id"]}
    assert {c["object"] for c in chunks} == {"text_completion"}


def test_continuous_usage(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(http, max_tokens=12, ignore_eos=True, stream_options=options)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_max_tokens_and_ignore_eos(http: httpx.Client) -> None:
    for wanted in (1, 2, 33):
        answer = complete(http, max_tokens=wanted, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == wanted
        assert answer["choices"][0]["finish_reason"] == "length"


def test_min_tokens_holds_the_end_back(http: httpx.Client) -> None:
    free = complete(http, max_tokens=64)
    assert free["choices"][0]["finish_reason"] == "stop"
    least = free["usage"]["completion_tokens"] + 8
    longer = complete(http, max_tokens=least + 64, min_tokens=least)
    assert longer["usage"]["completion_tokens"] >= least


def test_prompts_and_choices(http: httpx.Client) -> None:
    prompts = [PROMPT, "Reverse: 5 6 7\n"]
    answer = complete(http, prompt=prompts, n=2, max_tokens=10)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    texts = [c["text"] for c in answer["choices"]]
    alone = [complete(http, prompt=p, max_tokens=10)["choices"][0]["text"] for p in prompts]
    assert texts == [alone[0], alone[0], alone[1], alone[1]]  # greedy: choices agree


def test_token_ids_as_prompt(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    by_text = complete(http, max_tokens=8)["choices"][0]["text"]
    assert complete(http, prompt=ids, max_tokens=8)["choices"][0]["text"] == by_text
    both = complete(http, prompt=[ids, ids], max_tokens=8)["choices"]
    assert [c["text"] for c in both] == [by_text, by_text]


def test_seeds(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"temperature": 1.5, "max_tokens": 24, "ignore_eos": True}
    first = complete(http, seed=-7, **fields)["choices"][0]["text"]
    assert complete(http, seed=-7, **fields)["choices"][0]["text"] == first
    assert complete(http, seed=2**63 - 1, **fields)["choices"][0]["text"] != first
    several = complete(http, seed=-7, n=3, **fields)["choices"]
    assert several[0]["text"] == first
    assert len({c["text"] for c in several}) == 3


def test_echo_and_logprobs(http: httpx.Client) -> None:
    answer = complete(http, echo=True, logprobs=2, max_tokens=4, ignore_eos=True)
    choice = answer["choices"][0]
    table = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert "".join(table["tokens"]).startswith(PROMPT)
    assert len(table["tokens"]) == answer["usage"]["total_tokens"]
    assert table["token_logprobs"][0] is None
    assert all(value <= 0 for value in table["token_logprobs"][1:])
    assert table["text_offset"][0] == 0
    assert all(len(top) <= 3 for top in table["top_logprobs"][1:])
    # Greedy tokens are the most probable ones.
    for token, top in zip(table["tokens"][-4:], table["top_logprobs"][-4:], strict=True):
        assert max(top, key=top.get) == token


def test_echo_of_the_prompt_alone(http: httpx.Client) -> None:
    plain = complete(http, echo=True, max_tokens=0)
    assert plain["choices"][0]["text"] == PROMPT
    assert plain["usage"]["completion_tokens"] == 0
    scored = complete(http, echo=True, max_tokens=0, logprobs=0)
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == scored["usage"]["prompt_tokens"]


def test_stop_string_across_tokens(http: httpx.Client) -> None:
    free = complete(http, max_tokens=40, ignore_eos=True)["choices"][0]["text"]
    stop = free[7:12]  # cuts through token borders
    cut = complete(http, max_tokens=40, ignore_eos=True, stop=stop)["choices"][0]
    assert cut == cut | {"text": free[: free.index(stop)], "finish_reason": "stop"}
    chunks = stream(http, max_tokens=40, ignore_eos=True, stop=["never seen", stop])
    assert "".join(c["choices"][0]["text"] for c in chunks) == cut["text"]


def test_stop_token_ids(http: httpx.Client) -> None:
    table = complete(http, max_tokens=8, ignore_eos=True, logprobs=0)["choices"][0]["logprobs"]
    ids = http.post("/tokenize", json={"prompt": table["tokens"][3]}).json()["tokens"]
    cut = complete(http, max_tokens=8, ignore_eos=True, stop_token_ids=ids)
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] <= 4


def test_nulls_mean_absent(http: httpx.Client) -> None:
    fields = ("max_tokens", "stop", "logprobs", "seed", "n", "logit_bias", "user", "min_tokens")
    answer = complete(http, **dict.fromkeys(fields))
    assert answer["usage"]["completion_tokens"] <= 16


def test_logit_bias_bans_a_token(http: httpx.Client) -> None:
    table = complete(http, max_tokens=1, logprobs=0)["choices"][0]["logprobs"]
    ids = http.post("/tokenize", json={"prompt": table["tokens"][0]}).json()["tokens"]
    biased = complete(http, max_tokens=1, logprobs=0, logit_bias={str(ids[0]): -100})
    assert biased["choices"][0]["logprobs"]["tokens"] != table["tokens"]


def test_default_length_of_a_prompt_that_fills_the_context(http: httpx.Client) -> None:
    answer = complete(http, prompt=[40] * 2040, max_tokens=None, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8


# --- chat -----------------------------------------------------------------------------------------


def test_chat_by_the_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="quadriga-s",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
        ],
        temperature=0,
        max_completion_tokens=20,
        logprobs=True,
        top_logprobs=2,
    )
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.logprobs is not None
    assert answer.usage is not None
    rows = choice.logprobs.content or []
    assert len(rows) == answer.usage.completion_tokens
    assert all(len(row.top_logprobs) == 2 for row in rows)


def test_chat_stream_by_the_client(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "quadriga-s",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 20,
    }
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(stream=True, **fields))
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content, "the role comes with the first text"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content


async def test_many_streams_by_the_async_client(service: Service) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{service.base_url}/v1", api_key="none", max_retries=0
    ) as client:

        async def one(i: int) -> int:
            counted = 0
            opened = await client.completions.create(
                model="quadriga-s",
                prompt=f"Sort: {i} 30 2\n",
                max_tokens=20 + i,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async for chunk in opened:
                if chunk.usage is not None:
                    counted = chunk.usage.completion_tokens
            return counted

        counts = await asyncio.gather(*(one(i) for i in range(24)))
    assert counts == [20 + i for i in range(24)]


# --- deadlines, idempotency -----------------------------------------------------------------------


def test_deadline_before_the_first_token(http: httpx.Client) -> None:
    body = {"prompt": [40] * 2000, "max_tokens": 40, "deadline_ms": 1, "stream": True}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    assert reply.headers["x-should-retry"] == "false"


def test_deadline_in_mid_stream(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "n": 16, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    for deadline_ms in (1200, 2400, 4800, 9600):  # until the first token comes in time
        reply = http.post("/v1/completions", json=body | {"deadline_ms": deadline_ms})
        if reply.status_code == 200:
            break
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "deadline_exceeded"
    assert reply.status_code == 200
    first, *_, last = reply.text.strip().split("\n\n")
    assert json.loads(first[6:])["choices"]
    assert json.loads(last[6:])["error"]["code"] == "deadline_exceeded"


def test_an_idempotency_key_never_runs_twice(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "temperature": 1.0}
    headers = {"idempotency-key": uuid.uuid4().hex}
    first = http.post("/v1/completions", json=body, headers=headers).json()
    again = http.post("/v1/completions", json=body, headers=headers).json()
    assert again == first  # sampled without a seed: a second run would differ
    other = http.post("/v1/completions", json=body | {"max_tokens": 5}, headers=headers)
    assert other.status_code == 400
    assert other.json()["error"]["code"] == "idempotency_key_reused"


def test_resume_a_stream_that_broke(http: httpx.Client) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 120,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    headers = {"idempotency-key": uuid.uuid4().hex}
    had, count = "", 0
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                had += chunk["choices"][0]["text"]
                count = chunk["usage"]["completion_tokens"]
            if count >= 10:
                break
    resumed = http.post(
        "/v1/completions", json=body, headers=headers | {"x-resume-index": str(count)}
    )
    rest = sse(resumed)
    text = had + "".join(c["choices"][0]["text"] for c in rest if c["choices"])
    assert rest[-1]["usage"]["completion_tokens"] == 120
    whole = http.post("/v1/completions", json=body, headers=headers)
    assert "".join(c["choices"][0]["text"] for c in sse(whole) if c["choices"]) == text
