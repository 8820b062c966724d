"""Memory promised as it is used: pauses change no token, and the important come first."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from actors.rpc.lookup import get_actor
from quadriga.core.request import FinishReason
from quadriga.policies.drex import DrexRebatcher
from tests.promql import evaluate
from tests.ray.apps import App, app_fixture
from tests.ray.choosing import OwnIngress
from tests.ray.ingress import Stream, call
from tests.ray.moves import held, set_pace
from tests.waiting import wait_until

ALERTS = Path(__file__).parents[2] / "deploy" / "alerts" / "quadriga.yaml"
MAX_LEN = 256
TOKEN_BYTES = 8 * 2 * 2 * 32 * 4  # quadriga-s in float32
CAPACITY_TOKENS = 2 * MAX_LEN
NUM_SEQUENCES = 10
NUM_OUTPUT = 200
NUM_AT_ONCE = 4
"""So many fit by what answers are taken to be, 64 tokens; at their whole length two do."""
UNKNOWN: dict[str, Any] = {"ignore_eos": False, "min_tokens": NUM_OUTPUT}
"""Nobody can tell in advance how long such a sequence becomes, and all become equally long."""


crowded = app_fixture(
    "crowded",
    **{
        "decode_replicas": 1,
        "decode.max_slots": 12,
        "decode.pace": "steady-15ms",
        "scheduler.max_wait_s": None,  # a slow machine lets them wait, and refuses nobody
        "engine.max_model_len": MAX_LEN,
        "engine.kv_memory_bytes": CAPACITY_TOKENS * TOKEN_BYTES,
        "lifecycle.orphan_timeout_s": 300.0,
    },
)
"""One decode replica whose memory holds two sequences at their longest, and many rows."""


def prompts(count: int, *, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 500) for _ in range(rng.randrange(8, 40))] for _ in range(count)]


def assert_whole(streams: list[Stream]) -> None:
    assert [s.error for s in streams] == [None] * len(streams)
    assert {s.finish for s in streams} == {FinishReason.LENGTH}


def test_blocks_that_go_for_others_are_told(crowded: App) -> None:
    """A prompt that comes twice is stored once; its blocks go where the next one needs memory."""
    ingress, (prefill,), told = crowded.ingress(), crowded.replicas("prefill"), []
    after = call(prefill, "kv_events", 0)["seq"]
    for first in (5, 5, 99):
        ingress.finish(ingress.submit([first + i % 90 for i in range(200)], 2))
        answer = call(prefill, "kv_events", after)
        after = answer["seq"]
        told.append({event["type"]: event["block_hashes"] for event in answer["events"]})
    assert len(told[0]["BlockStored"]) == 3 and told[1] == {}
    assert {*told[0]["BlockStored"]} & {*told[2]["BlockRemoved"]}
    assert call(prefill, "kv_events", 0)["events"][0] == {"type": "AllBlocksCleared"}
    crowded.until_idle()


@pytest.mark.timeout(300)
def test_paused_sequences_say_what_they_say_alone(crowded: App) -> None:
    """The crowd comes first, while answers are taken to be shorter than these are."""
    ingress = crowded.ingress()
    (decode,) = crowded.replicas("decode")
    # Steps of a second: nobody ends, and tells how long answers are, before the others come.
    with held([decode], 1.0):
        crowd = [
            ingress.submit(p, NUM_OUTPUT, deadline_s=250.0, **UNKNOWN)
            for p in prompts(NUM_SEQUENCES, seed=7)
        ]
        ingress.until(lambda: sum(len(s.tokens) > 1 for s in crowd) >= NUM_AT_ONCE, 100.0)
        set_pace(decode, None)
    ingress.finish(*crowd, timeout_s=200.0)
    assert_whole(crowd)
    crowded.until_idle()
    num_pauses = call(decode, "heartbeat", 0.0).load.num_pauses
    assert num_pauses >= 2
    for name in ("quadriga_pauses_total", "quadriga_resumes_total", "vllm:num_preemptions_total"):
        wait_until(lambda n=name: crowded.metric(n) == num_pauses, 60.0)  # type: ignore[misc]
    wait_until(lambda: crowded.metric("quadriga_paused_kv_bytes") == 0.0, 60.0)
    alone = []
    for prompt in prompts(NUM_SEQUENCES, seed=7):
        stream = ingress.submit(prompt, NUM_OUTPUT, deadline_s=200.0, **UNKNOWN)
        ingress.finish(stream, timeout_s=200.0)
        alone.append(stream)
    assert_whole(alone)
    assert [s.token_ids for s in crowd] == [s.token_ids for s in alone]
    assert call(decode, "heartbeat", 0.0).load.num_pauses == num_pauses


@pytest.mark.timeout(180)
def test_the_alert_names_the_replica_whose_memory_runs_out(crowded: App) -> None:
    """By its own rule, on the page that is scraped; it is silent before and afterwards."""
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    groups = rules.get("spec", rules)["groups"]
    (rule,) = (
        rule
        for group in groups
        for rule in group["rules"]
        if rule.get("alert") == "QuadrigaOutOfMemorySoon"
    )

    def firing() -> list[dict[str, str]]:
        return [dict(labels) for labels in evaluate(rule["expr"], crowded.page())]

    (decode,) = crowded.replicas("decode")
    wait_until(lambda: firing() == [], 30.0, firing)
    ingress = crowded.ingress()
    with held([decode], 0.05):  # it stays full for a while, whatever the machine does
        crowd = [
            ingress.submit(p, NUM_OUTPUT, deadline_s=150.0, **UNKNOWN)
            for p in prompts(NUM_SEQUENCES, seed=9)
        ]
        ingress.until(lambda: firing() == [{"replica": decode}], 60.0)
        set_pace(decode, None)
    ingress.finish(*crowd, timeout_s=100.0)
    assert_whole(crowd)
    crowded.until_idle()
    wait_until(lambda: firing() == [], 30.0, firing)


@pytest.mark.timeout(300)
async def test_a_quality_budget_is_spent_where_tokens_come_late_or_memory_runs_short(
    crowded: App,
) -> None:
    """No replica gives a token every microsecond; nobody is sure enough of 0.9999 by itself.

    Two sequences that grow as long as they may have memory enough in the end, and none to spare:
    nobody is ever paused, and thresholds fall all the same.
    """

    def test_every_exit(replica: Any) -> None:
        def change(core: Any) -> None:
            batch, counters = core.loop.batch, core.loop.counters
            costs = batch.rebatcher.costs
            batch.rebatcher = DrexRebatcher(costs, counters=counters, deterministic=True)

        replica.engine._inbox.put(change)

    (decode,) = crowded.replicas("decode")
    ray.get(get_actor(decode).__ray_call__.remote(test_every_exit), timeout=10.0)
    unsure = {"model": "quadriga-s", "prompt": [7] * 20, "exit_threshold": 0.9999}
    unsure |= {"exit_policy": "bounded", "max_tokens": NUM_OUTPUT}
    as_long_as_may_be = unsure | {"max_tokens": MAX_LEN - 20, "quality_budget": 0.3}
    async with OwnIngress(crowded) as ingress:

        async def spent(**fields: Any) -> int:
            said = (await ingress.complete(**fields))["usage"]["quadriga"]
            assert said["pauses"] == 0
            return int(said["lowered"])

        lowered = [await spent(**unsure, sla_tbt_ms=0.001, quality_budget=b) for b in (0.0, 0.3)]
        assert lowered[0] == 0 < lowered[1] <= 0.3 * NUM_OUTPUT
        assert await spent(**as_long_as_may_be) == 0, "alone it has memory to spare"
        with held([decode], 0.5):  # both begin before either has gone far
            pair = [asyncio.create_task(spent(**as_long_as_may_be)) for _ in range(2)]
            await asyncio.to_thread(
                wait_until, lambda: call(decode, "snapshot").num_running == 2, 60.0
            )
        lowered += await asyncio.gather(*pair)
        assert 0 < max(lowered[2:]) <= 0.3 * (MAX_LEN - 20)
    await asyncio.to_thread(
        wait_until,
        lambda: crowded.metric("quadriga_lowered_tokens_total") == sum(lowered),
        30.0,
    )
    await asyncio.to_thread(crowded.until_idle)


@pytest.mark.timeout(300)
def test_the_important_do_not_wait_for_the_others(crowded: App) -> None:
    """When the replica is full to its mark, a more important sequence takes somebody's place."""
    ingress = crowded.ingress()
    with held(crowded.replicas("decode")):
        others = [
            ingress.submit(p, 200, priority=5, deadline_s=200.0)
            for p in prompts(NUM_SEQUENCES, seed=8)
        ]
        ingress.until(lambda: len(others[0].tokens) > 3)
        important = ingress.submit([9] * 30, 20, priority=-1)
        ingress.finish(important, timeout_s=60.0)
        assert_whole([important])
        assert not any(s.is_over for s in others), "it came last and was over first"
    ingress.finish(*others, timeout_s=200.0)
    assert_whole(others)
    crowded.until_idle()


@pytest.mark.timeout(300)
def test_books_that_contradict_themselves_end_the_replica(crowded: App) -> None:
    """An idle engine finds it out; the violation is counted, and a successor takes over."""

    def lose_a_row(replica: Any) -> None:
        replica.engine.core.loop.slots._free_rows.pop()

    crowded.until_ready()
    before = crowded.metric("quadriga_integrity_violations_total")
    (victim,) = crowded.replicas("decode")
    ray.get(get_actor(victim).__ray_call__.remote(lose_a_row), timeout=10.0)
    ingress = crowded.ingress()
    last = ingress.submit([5] * 10, 3)
    ingress.finish(last)
    assert_whole([last])
    wait_until(lambda: victim not in crowded.replicas("decode"), 60.0)
    wait_until(lambda: crowded.metric("quadriga_integrity_violations_total") == before + 1, 20.0)
    crowded.until_ready()
    after = ingress.submit([5] * 20, 10)
    ingress.finish(after)
    assert_whole([after])
    crowded.until_idle()
