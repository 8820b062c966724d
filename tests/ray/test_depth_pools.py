"""Shallow and deep sequences on live replicas: told apart, moved, and placed with their like."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from actors.rpc.lookup import scheduler_name
from quadriga.checkpoint.exits import ExitParams
from quadriga.config.pacing import find_profile
from quadriga.core.replica import DepthClass
from quadriga.policies.ares import depth_pools
from tests.ray.apps import App, app_fixture
from tests.ray.choosing import OwnIngress, set_constant
from tests.ray.ingress import call
from tests.ray.moves import set_device, set_pace
from tests.waiting import wait_until

SHALLOW, DEEP = ExitParams(0.0, "bounded"), ExitParams(1.0, "off")
CLASS = DepthClass("quadriga-s", 8)
NUM_EACH, LONG = 5, 900


split = app_fixture(
    "split",
    **{
        "decode_replicas": 2,
        "decode.max_slots": 16,
        "decode.pace": "steady-60ms",
        "deterministic": True,
        "engine.max_model_len": 1024,
        "scheduler.ares.interval_s": 0.5,
        "lifecycle.orphan_timeout_s": 300.0,
    },
)
"""Two decode replicas that test every exit, whatever the load."""


def pools(app: App) -> dict[str, Any]:
    found: dict[str, Any] = call(scheduler_name(app.name), "operators_view", timeout_s=10.0)
    return dict(found["depth_pools"].get(str(CLASS), {}))


async def sides(app: App) -> list[list[str]]:
    """What a shallow and a deep request are told of the side that they ran on."""
    asked: list[dict[str, Any]] = [
        {"exit_policy": "bounded", "exit_threshold": 0.0},
        {"exit_policy": "off"},
    ]
    async with OwnIngress(app) as ingress:
        complete = partial(ingress.complete, model=CLASS.model, max_tokens=8)
        answers = await asyncio.gather(*(complete(**fields) for fields in asked))
    return [answer["usage"]["quadriga"]["depth_pools"] for answer in answers]


@pytest.mark.timeout(400)
def test_shallow_and_deep_sequences_come_to_run_on_replicas_of_their_own(split: App) -> None:
    # The scheduler looks once a minute.
    set_constant(scheduler_name(split.name), depth_pools.__name__, "PLAN_EVERY_S", 1.0)
    replicas, ingress = split.replicas("decode"), split.ingress()
    for name in replicas:  # what runs outlasts what a busy machine does meanwhile
        set_device(name, replace(find_profile("steady-60ms"), base_s=0.3))
    streams = {
        kind: [
            ingress.submit([5 + i] * 20, LONG, deadline_s=380.0, exits=exits)
            for i in range(NUM_EACH)
        ]
        for kind, exits in (("shallow", SHALLOW), ("deep", DEEP))
    }
    ingress.until(lambda: bool(pools(split).get("is_on")), 120.0)

    def is_apart() -> bool:
        shallow = set(pools(split)["shallow"])
        return all(
            (stream.replica in shallow) == (kind == "shallow")
            for kind, some in streams.items()
            for stream in some
        )

    ingress.until(is_apart, 120.0)
    decided = pools(split)
    assert len(decided["shallow"]) == 1
    assert decided["gain"] >= 0.03
    assert decided["cut"] < 1.0
    wait_until(lambda: split.metric("quadriga_depth_pool_shallow_replicas") == 1.0, 30.0)
    wait_until(lambda: split.metric("quadriga_depth_pool_gain") >= 0.03, 30.0)
    why = call(scheduler_name(split.name), "operators_view")["last_tick"]["why"][str(CLASS)]
    assert "depths apart: 1 of 2 replicas" in why
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(asyncio.run, sides(split))
        ingress.until(told.done, 120.0)
        assert told.result() == [["shallow"], ["deep"]]

    for exits, side in ((DEEP, "deep"), (SHALLOW, "shallow")):
        new = ingress.submit([9] * 10, LONG, deadline_s=300.0, exits=exits)
        ingress.until(lambda s=new: len(s.tokens) > 2, 60.0)  # type: ignore[misc]
        assert (new.replica in decided["shallow"]) == (side == "shallow")
        ingress.cancel(new)
    ingress.cancel(*(stream for some in streams.values() for stream in some))
    for name in replicas:
        set_pace(name, None)
    split.until_idle()
