"""Strict requests over pools of one model at two depths, without HELIOS."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import ray

from actors.rpc.lookup import controller_name, get_actor
from quadriga.checkpoint.exits import ExitParams
from quadriga.core.request import FinishReason
from quadriga.errors import Unavailable
from tests.ray.apps import App, app_fixture, pids, wait_until
from tests.ray.choosing import EASY, UNSURE, OwnIngress
from tests.ray.ingress import call

SHALLOW, DEEP = 4, 8
BOUNDED = ExitParams(UNSURE, "bounded")
STRICT = ExitParams(UNSURE, "strict")
NUM_REQUESTS = 8
NUM_TOKENS = 24


POOL: dict[str, Any] = {"model": "quadriga-s", "prefill_replicas": 1, "decode_replicas": 1}
POOL |= {"exits": {"replay_newest": 4}}

DEPTHS: dict[str, Any] = {
    "pools": [POOL | {"depth": SHALLOW}, POOL],
    "decode.max_slots": 16,
    "decode.pace": "steady-15ms",
    "engine.max_model_len": 512,
    "lifecycle.orphan_timeout_s": 300.0,
}
two_depths = app_fixture("two-depths", **DEPTHS, deterministic=True)
"""Two pools of quadriga-s: one with four of its eight layers, one with all."""
by_load = app_fixture("by-load", scope="function", **DEPTHS)
"""The same, where the load decides which exits are tested."""


def at(app: App, role: str, depth: int) -> str:
    """The replica of a role with so many layers."""
    found = [n for n in app.replicas(role) if call(n, "info").depth_class.depth == depth]
    assert len(found) == 1, found
    return found[0]


def breaches(app: App) -> int:
    """Tokens that left below their threshold, at all decode replicas."""
    actors: list[Any] = [get_actor(name) for name in app.replicas("decode")]
    counted: list[int] = ray.get(
        [a.__ray_call__.remote(lambda a: a.engine.core.loop.counters.breaches) for a in actors],
        timeout=30,
    )
    return sum(counted)


async def complete(ingress: OwnIngress, policy: str, **fields: Any) -> dict[str, Any]:
    """What a request of so many unsure tokens is answered."""
    body = {"model": "quadriga-s", "prompt": EASY, "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "exit_threshold": UNSURE, "exit_policy": policy}
    body |= fields
    if policy in ("off", "lossless"):
        del body["exit_threshold"]
    answer = await ingress.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["usage"]["completion_tokens"] == body["max_tokens"]
    return found


def exits(answer: dict[str, Any]) -> dict[int, int]:
    """Layers run → tokens."""
    return {int(k): n for k, n in answer["usage"]["quadriga"]["exits"].items()}


@pytest.mark.timeout(200)
async def test_strict_requests_go_where_all_layers_are(two_depths: App) -> None:
    """Their tokens are the whole pool's, and none is a breach, while bounded ones use both."""
    async with OwnIngress(two_depths) as ingress:
        alone = await complete(ingress, "strict")
        strict = [complete(ingress, "strict") for _ in range(NUM_REQUESTS)]
        answers = await asyncio.gather(*strict)
        assert {a["choices"][0]["text"] for a in answers} == {alone["choices"][0]["text"]}
        assert all(max(exits(a)) == DEEP for a in answers)
        assert breaches(two_depths) == 0

        await assert_only_bounded_ones_breach(ingress)
        assert breaches(two_depths) > 0


async def assert_only_bounded_ones_breach(ingress: OwnIngress) -> None:
    """Strict requests among them run all layers, or leave where they are sure."""
    mixed = [complete(ingress, policy) for policy in ("strict", "bounded") * NUM_REQUESTS]
    answers = await asyncio.gather(*mixed)
    deepest = [max(exits(a)) for a in answers]
    breached = [a["usage"]["quadriga"]["breaches"] for a in answers]
    assert set(deepest[::2]) == {DEEP} and sum(breached[::2]) == 0
    assert SHALLOW in deepest[1::2], "bounded requests use the other pool, too"
    assert sum(breached[1::2]) > 0


@pytest.mark.timeout(300)
async def test_where_the_load_decides_about_exits_strict_and_seeded_answers_do_not_change(
    by_load: App,
) -> None:
    """No strict token leaves unsure; what runs the whole model says the same as alone."""
    seeded = [
        (policy, {"seed": 7 + i, "temperature": 0.9})
        for i, policy in enumerate(("off", "lossless") * 4)
    ]
    async with OwnIngress(by_load) as ingress:
        alone = [await complete(ingress, policy, **one) for policy, one in seeded]
        tasks = [asyncio.create_task(complete(ingress, policy, **one)) for policy, one in seeded]
        await assert_only_bounded_ones_breach(ingress)
        answers = await asyncio.gather(*tasks)
    assert [a["choices"][0]["text"] for a in answers] == [a["choices"][0]["text"] for a in alone]


@pytest.mark.timeout(200)
def test_a_prompt_that_needs_more_layers_is_refused_where_they_are_not(two_depths: App) -> None:
    """Whoever sends it there: nothing tests a prompt's own token."""
    ingress = two_depths.ingress()
    stream = ingress.submit([20] * 8, 2, exits=BOUNDED)
    ingress.finish(stream)
    assert stream.error is None
    again = replace(stream.state, sequence_id="again", exits=STRICT)
    with pytest.raises(Unavailable, match="may need 8 layers, and this replica has 4"):
        call(at(two_depths, "prefill", SHALLOW), "submit", again)


@pytest.mark.timeout(200)
def test_a_strict_sequence_moves_up_from_a_shallow_replica(two_depths: App) -> None:
    """Its token waits there, the controller has it moved, and it goes on with all layers."""
    shallow, deep = at(two_depths, "decode", SHALLOW), at(two_depths, "decode", DEEP)
    ingress = two_depths.ingress()
    streams = []
    while True:  # a bounded one may be prefilled at either
        stream = ingress.submit([20] * 8, 400, exits=BOUNDED)
        streams.append(stream)
        ingress.until(lambda s=stream: len(s.tokens) > 2)  # type: ignore[misc]
        if stream.replica == shallow:
            break
        assert len(streams) < 2 * NUM_REQUESTS

    def become_strict(actor: Any) -> None:
        def change(core: Any) -> None:
            sequence = core.loop.batch.sequences[stream.state.sequence_id]
            sequence.state.exits, sequence.is_strict = STRICT, True

        actor.engine._inbox.put(change)

    ray.get(get_actor(shallow).__ray_call__.remote(become_strict), timeout=30)
    ingress.until(lambda: deep in stream.moved_to)
    ingress.finish(*streams, timeout_s=100.0)
    assert stream.error is None and stream.finish is FinishReason.LENGTH
    assert stream.moved_to[-1] == deep
    two_depths.until_idle()


@pytest.mark.timeout(200)
async def test_seeded_answers_under_load_and_after_a_death_are_those_of_a_request_alone(
    two_depths: App,
) -> None:
    """With exits in use and skipped positions replayed. While no replica has all layers a strict
    request waits, and is not served by fewer."""
    deep = at(two_depths, "decode", DEEP)
    two_depths.until_idle()
    before = breaches(two_depths)
    fields = [
        (policy, {"seed": 7 + i, "temperature": 0.9, "exit_threshold": 0.9, "max_tokens": 120})
        for i, policy in enumerate(("strict", "lossless", "off") * 3)
    ]
    async with OwnIngress(two_depths) as ingress:
        alone = [await complete(ingress, policy, **one) for policy, one in fields]
        assert any(len(exits(a)) > 2 for a in alone[::3]), "tokens leave early"
        for dies in (False, True):
            tasks = [
                asyncio.create_task(complete(ingress, policy, **one)) for policy, one in fields
            ]
            await asyncio.sleep(0.7)  # in their middle, at 15 ms a token; else the death tells less
            if dies:
                os.kill(pids(two_depths.name)[deep], signal.SIGKILL)
            answers = await asyncio.gather(*tasks)
            for answer, wanted in zip(answers, alone, strict=True):
                assert answer["choices"][0]["text"] == wanted["choices"][0]["text"]
                assert exits(answer) == exits(wanted)
    await asyncio.to_thread(
        wait_until, lambda: bool(call(controller_name(two_depths.name), "status")["is_ready"]), 60.0
    )
    assert breaches(two_depths) == before
