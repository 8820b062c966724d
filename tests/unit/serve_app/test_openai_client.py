"""What OpenAI's package makes of our answers: its stream helpers read what the server writes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from quadriga.core.request import SequenceState
from tests.fakes import FakeCluster
from tests.unit.serve_app.conftest import ANSWER, END_ID, MODEL, MakeStand, Stand
from tests.unit.serve_app.test_tool_calls import SAID, TOOLS, USER
from tests.waiting import until

ASK: dict[str, Any] = {"model": "quadriga-s", "messages": [USER], "seed": 1}


def client_of(stand: Stand) -> AsyncOpenAI:
    http: Any = stand.http
    return AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


def called(call: Any) -> tuple[str, str]:
    return call.function.name, call.function.arguments


async def streamed(stand: Stand, **fields: Any) -> tuple[list[Any], Any]:
    """The helper's events, and the completion that it puts together."""
    async with client_of(stand).chat.completions.stream(**ASK, **fields) as stream:
        events = [event async for event in stream]
        return events, await stream.get_final_completion()


@pytest.mark.parametrize("size", [1, 7, 500])
@pytest.mark.parametrize("stop", [None, "1}", '"add", "arguments": {}'])
async def test_the_helper_tells_of_each_call_however_tokens_come(
    make_stand: MakeStand, size: int, stop: str | None
) -> None:
    stand = await make_stand(says=SAID, tokens_per_step=size)
    fields: dict[str, Any] = {"tools": TOOLS, "n": 2, "stop": stop}
    whole = await client_of(stand).chat.completions.create(**ASK, **fields)
    events, final = await streamed(stand, **fields)
    for choice, read in zip(whole.choices, final.choices, strict=True):
        calls = choice.message.tool_calls or []
        reason = "stop" if stop == "1}" else "tool_calls"  # a call that is cut is none to be made
        assert read.finish_reason == choice.finish_reason == reason
        assert [called(c) for c in read.message.tool_calls or []] == [called(c) for c in calls]
        assert (read.message.content or "") == (choice.message.content or "")
    done = [e.arguments for e in events if e.type == "tool_calls.function.arguments.done"]
    assert sorted(done) == sorted(c.function.arguments for c in calls for _ in whole.choices)


class Late(FakeCluster):
    """The first choice says nothing before the others are over, and a while longer."""

    async def _run(self, state: SequenceState) -> None:
        if state.choice == 0:
            others = [len(self.script)] * 2
            await until(lambda: sorted(self.num_said.values()) == others, within_s=60.0)
            await asyncio.sleep(0.05)
        await super()._run(state)


async def test_choices_of_a_chat_begin_in_order(make_stand: MakeStand) -> None:
    script = [*MODEL.tokenizer.encode(ANSWER), END_ID]
    stand = await make_stand(cluster=Late("quadriga-s", script))
    _, final = await streamed(stand, n=3, logprobs=True)
    for index, choice in enumerate(final.choices):
        assert (choice.index, choice.message.role) == (index, "assistant")
        assert choice.message.content == ANSWER
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == len(script), "each token once"


HISTORY: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "refusal": "I will not."},
    {"role": "assistant", "content": "2", "reasoning": "1 and 1"},
]


async def test_what_a_message_of_openai_or_vllm_has_beside_its_content_reaches_the_template(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}|{% endfor %}"
    monkeypatch.setattr(MODEL.tokenizer._fast, "chat_template", template)
    older = HISTORY[2] | {"reasoning": "no", "reasoning_content": "yes"}
    for last, shown in ((HISTORY[2], "1 and 1|2|"), (older, "yes|2|")):
        body = {"messages": [*HISTORY[:2], last]}
        reply = await stand.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        prompt = MODEL.tokenizer.decode(stand.cluster.submitted[-1].prompt_ids)
        assert prompt == f"|{USER['content']}||I will not.|{shown}"
