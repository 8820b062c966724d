"""Pools of one model at two depths, without HELIOS: strict requests, and who may go where."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import ray

from actors.rpc.lookup import controller_name, get_actor, scheduler_name
from quadriga.checkpoint.exits import ExitParams
from quadriga.core.request import FinishReason
from quadriga.errors import Unavailable
from tests.ray.apps import App, app_fixture, pids
from tests.ray.choosing import EASY, UNSURE, OwnIngress
from tests.ray.ingress import Ingress, Stream, call
from tests.ray.moves import free_memory, pause, set_pace
from tests.waiting import wait_until

SHALLOW, DEEP = 4, 8
BOUNDED = ExitParams(UNSURE, "bounded")
STRICT = ExitParams(UNSURE, "strict")
LIMITED = ExitParams(0.99, "bounded", SHALLOW)
"""Never deeper than the layers that both have, so that a move changes no token."""
WHOLE = ExitParams(1.0, "lossless")
NUM_REQUESTS = 8
NUM_TOKENS = 24
NUM_OUTPUT = 300
PACE, SLOW_PACE = "steady-15ms", "steady-60ms"


POOL: dict[str, Any] = {"model": "quadriga-s", "prefill_replicas": 1, "decode_replicas": 1}
POOL |= {"exits": {"replay_newest": 4}}

DEPTHS: dict[str, Any] = {
    "pools": [POOL | {"depth": SHALLOW}, POOL],
    "decode.max_slots": 16,
    "decode.pace": PACE,
    "engine.max_model_len": 512,
    "lifecycle.orphan_timeout_s": 300.0,
    "scheduler.ares.interval_s": 0.5,
    "scheduler.ares.depth_pools": False,  # they may move a sequence first
}
two_depths_app = app_fixture("two-depths", **DEPTHS, deterministic=True)
"""Two pools of quadriga-s: one with four of its eight layers, one with all."""
by_load = app_fixture("by-load", scope="function", **DEPTHS)
"""The same, where the load decides which exits are tested."""


def paced(app: App, pace: str | None) -> App:
    for name in app.replicas("decode"):
        set_pace(name, pace)
    return app


@pytest.fixture
def two_depths(two_depths_app: App) -> App:
    return paced(two_depths_app, PACE)


def at(app: App, role: str, depth: int) -> str:
    """The replica of a role with so many layers."""
    found = [n for n in app.replicas(role) if call(n, "info").depth_class.depth == depth]
    assert len(found) == 1, found
    return found[0]


def resize(app: App, replica: str, depth: int) -> None:
    """Wait until the scheduler knows it: what it admits before may wait for what went."""
    assert call(replica, "resize", depth, 30.0).depth == depth

    def known() -> dict[str, int]:
        snapshots = call(scheduler_name(app.name), "directory").snapshots
        return {s.info.name: s.info.depth_class.depth for s in snapshots}

    wait_until(lambda: known()[replica] == depth, 30.0)


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
    paced(two_depths, None)
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
        paced(two_depths, None)
        alone = [await complete(ingress, policy, **one) for policy, one in fields]
        paced(two_depths, PACE)
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


# Rescue, from where memory is short to where the layers are


@pytest.fixture
def slow(two_depths_app: App) -> App:
    return paced(two_depths_app, SLOW_PACE)


def finish(app: App, ingress: Ingress, streams: list[Stream]) -> None:
    """All has been seen that a pace was needed for; what runs ends whole, and nothing is left."""
    paced(app, None)
    ingress.finish(*streams, timeout_s=150.0)
    assert [s.error for s in streams] == [None] * len(streams)
    assert all(len(s.token_ids) == NUM_OUTPUT for s in streams)
    app.until_idle()


def running_at(ingress: Ingress, replica: str, exits: ExitParams) -> tuple[Stream, list[Stream]]:
    """A stream that decodes at a replica, and all that were submitted to get it.

    Several are admitted at once, so that they are spread over the prefill replicas of both depths.
    """
    streams: list[Stream] = []
    for number in range(8):
        prompts = [[7 + number + i] * 10 for i in range(4)]
        some = ingress.submit_together(prompts, NUM_OUTPUT, exits=exits, deadline_s=250.0)
        streams += some
        ingress.until(lambda s=some: all(len(one.tokens) > 1 for one in s), 60.0)  # type: ignore[misc]
        for stream in some:
            if stream.replica == replica:
                return stream, streams
    raise AssertionError(f"none of {len(streams)} came to {replica}")


def decisions(app: App, stream: Stream) -> list[dict[str, Any]]:
    """Moves of a stream's sequence that the scheduler ordered."""
    view: dict[str, Any] = call(scheduler_name(app.name), "operators_view", timeout_s=10.0)
    return [d for d in view["recent"] if d["sequence_id"] == stream.state.sequence_id]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("here", "there"), [(DEEP, SHALLOW), (SHALLOW, DEEP)])
def test_who_stands_in_host_memory_is_moved_to_the_other_depth(
    slow: App, here: int, there: int
) -> None:
    """Nobody comes back where it stood; it goes on where the layers it uses are."""
    source, destination = at(slow, "decode", here), at(slow, "decode", there)
    ingress = slow.ingress()
    standing, streams = running_at(ingress, source, LIMITED)
    assert pause(source, standing.state.sequence_id)
    ingress.until(lambda: standing.replica == destination, 60.0)
    free_memory(source)
    finish(slow, ingress, streams)
    wait_until(lambda: all(d["report"] for d in decisions(slow, standing)), 30.0)
    first, *_ = decisions(slow, standing)
    assert (first["cause"], first["report"]["outcome"]) == ("memory", "moved")
    # What is answered undisturbed: the first token is of either prefill replica's last layer.
    prompt = standing.state.prompt_ids
    alone = [ingress.submit(prompt, NUM_OUTPUT, exits=LIMITED, deadline_s=200.0) for _ in range(8)]
    finish(slow, ingress, alone)
    assert standing.token_ids in [s.token_ids for s in alone]


@pytest.mark.timeout(300)
def test_balance_goes_on_while_a_replica_has_fewer_layers(slow: App) -> None:
    """What the deeper replica ran is cancelled, and so it takes some of what the other runs."""
    shallow, deep = at(slow, "decode", SHALLOW), at(slow, "decode", DEEP)
    resize(slow, shallow, DEEP)
    ingress = slow.ingress()
    streams = [
        ingress.submit([i] * 9, NUM_OUTPUT, exits=LIMITED, deadline_s=250.0) for i in range(7, 19)
    ]
    ingress.until(lambda: all(len(s.tokens) > 1 for s in streams), 60.0)
    resize(slow, shallow, SHALLOW)
    kept = [s for s in streams if s.replica == shallow]
    ingress.cancel(*(s for s in streams if s.replica == deep))
    ingress.until(lambda: any(s.replica == deep for s in kept), 60.0)
    finish(slow, ingress, kept)
    moved = next(d for s in kept for d in decisions(slow, s) if d["destination"] == deep)
    assert (moved["cause"], moved["source"]) == ("balance", shallow)


@pytest.mark.timeout(300)
def test_who_needs_all_layers_waits_where_they_are(slow: App) -> None:
    """A paused sequence that runs every layer has nowhere to go, until its replica has room."""
    deep = at(slow, "decode", DEEP)
    ingress = slow.ingress()
    standing, streams = running_at(ingress, deep, WHOLE)
    other, more = running_at(ingress, deep, LIMITED)
    assert pause(deep, standing.state.sequence_id)
    assert pause(deep, other.state.sequence_id)
    # The scheduler had time enough to move both, and moved the one that may go.
    ingress.until(lambda: other.replica != deep, 60.0)
    assert standing.replica == deep and not decisions(slow, standing)
    free_memory(deep)
    finish(slow, ingress, streams + more)
    assert standing.replica == deep
