"""HELIOS end to end on both bundled models: profile, choose, serve a part, break, load more."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest
import ray

from actors.controller.helios import load_history
from actors.rpc.lookup import forget_actor, get_actor, scheduler_name
from quadriga.config.loader import load_config
from quadriga.core.replica import ReplicaSnapshot, Role
from quadriga.policies.drex import RebatchPlan
from tests.ray.apps import App, app_fixture, pids
from tests.ray.choosing import (
    EASY,
    SURE,
    UNSURE,
    OwnIngress,
    history,
    holds,
    kill_controller,
    until_another,
)
from tests.ray.moves import held
from tests.waiting import wait_until

FULL = {"quadriga-s": 8, "quadriga-l": 12}


choosing = app_fixture(
    "choosing",
    **{
        "decode_replicas": 1,
        "decode.max_slots": 8,
        "decode.rebatching": "drex",
        "engine.max_model_len": 512,
        "engine.threads": 1,
        "helios.enabled": True,
        "helios.profile_requests": 2,
        "helios.min_coverage": 0.3,
        "helios.max_changed_share": 1.0,
        "helios.dwell_loads": 0.0,
        "helios.breach_window_tokens": 60,
        "lifecycle.orphan_timeout_s": 300.0,
        "lifecycle.drain_timeout_s": 20.0,
    },
)
"""One replica of each kind that serves and one scout of each; the whole bundled family."""


def is_chosen(now: dict[str, Any]) -> bool:
    """Whether the decode replica that serves holds what was chosen."""
    return now["target"] is not None and holds(now) == now["target"] and now["order"] is None


def is_partial(now: dict[str, Any]) -> bool:
    """Whether it holds less than the whole model, as was chosen."""
    model, _, depth = (now["target"] or "").partition("@")
    return is_chosen(now) and int(depth) < FULL[model]


def set_plan(app: App, plan: RebatchPlan | None) -> None:
    """Have DREX keep a plan at all decode replicas; None: let it make its own again."""

    def change(actor: Any) -> None:
        rebatcher = actor.engine.core.loop.batch.rebatcher
        if plan is None:
            vars(rebatcher).pop("_look", None)
            vars(rebatcher).pop("_choose_probe", None)
            return
        rebatcher.plan = plan
        rebatcher._look = lambda *_, **__: None
        rebatcher._choose_probe = lambda: None

    actors: list[Any] = [get_actor(name) for name in app.replicas("decode")]
    ray.get([a.__ray_call__.remote(change) for a in actors], timeout=30)


def decoding(app: App) -> list[ReplicaSnapshot]:
    return [s for s in app.snapshots() if s.info.role is Role.DECODE]


def until_running(app: App, count: int) -> None:
    """Wait until so many sequences decode."""
    wait_until(lambda: sum(s.num_running for s in decoding(app)) == count, 60.0, app.loads)


@pytest.mark.timeout(300)
async def test_ordinary_requests_stay_off_scouts(choosing: App) -> None:
    """Before anything is chosen all hold the same, and scouts are idle. Also while there is no
    scheduler that answers."""
    replicas = await asyncio.to_thread(choosing.replicas, "decode")
    scheduler = pids(choosing.name)[scheduler_name(choosing.name)]
    async with OwnIngress(choosing) as ingress:
        for stands_still in (False, True):
            with held(replicas):
                if stands_still:
                    os.kill(scheduler, signal.SIGSTOP)
                named = {"model": "quadriga-s", "max_tokens": 300}
                asked = [asyncio.create_task(ingress.complete(**named)) for _ in range(6)]
                await asyncio.to_thread(until_running, choosing, len(asked))
                loads = {s.is_scout: s.num_running for s in decoding(choosing)}
                assert loads == {True: 0, False: len(asked)}
            await asyncio.gather(*asked)
    os.kill(scheduler, signal.SIGKILL)
    forget_actor(scheduler_name(choosing.name))
    await asyncio.to_thread(choosing.until_ready)


@pytest.mark.timeout(300)
async def test_where_no_exit_is_used_helios_knows_where_tokens_could_leave(choosing: App) -> None:
    """DREX decides about exits with HELIOS as without it; surveys say what HELIOS asks."""

    def profiled(now: dict[str, Any]) -> bool:
        return any(r["requests"] >= 2 and r["depth"] == FULL[r["model"]] for r in now["rows"])

    await asyncio.to_thread(set_plan, choosing, RebatchPlan())
    async with OwnIngress(choosing) as ingress:
        answer = await ingress.complete(exit_threshold=SURE)
        layers = {int(k) for k in answer["usage"]["quadriga"]["exits"]}
        assert layers <= {*FULL.values()}, "no token left early"
        now = await ingress.until(choosing, profiled, exit_threshold=SURE)
    row = next(r for r in now["rows"] if r["requests"] >= 2 and r["depth"] == FULL[r["model"]])
    first = min(int(k) for k in row["coverage"])
    assert first < row["depth"] and row["coverage"][first] > 0.5, row
    await asyncio.to_thread(wait_until, lambda: surveys(choosing) > 0, 20.0)
    await asyncio.to_thread(set_plan, choosing, None)


def surveys(app: App) -> float:
    return app.metric("quadriga_exit_surveys_total")


@pytest.mark.timeout(300)
async def test_another_ingress_goes_on_with_a_request_whose_model_was_chosen(choosing: App) -> None:
    """With the model that was chosen, and with its log-probabilities."""
    body = {"model": "quadriga-auto", "prompt": EASY, "max_tokens": 480, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": True, "logprobs": 1}
    body |= {"stream_options": {"include_usage": True}, "exit_threshold": SURE}  # breaks nothing
    headers = {"idempotency-key": "of-two", "x-resume-index": "2"}
    first = OwnIngress(choosing)
    first.engine.start()
    async with OwnIngress(choosing, "another-ingress") as second:
        await first.until(
            choosing,
            lambda now: is_chosen(now) and choosing.status()["is_ready"],
            exit_threshold=SURE,
        )
        path = "/v1/completions"
        replicas = await asyncio.to_thread(choosing.replicas, "decode")
        with held(replicas):
            begun = asyncio.create_task(
                first.http.post(path, json=body, headers=headers | {"x-resume-index": "0"})
            )
            await asyncio.to_thread(until_running, choosing, 1)
            await first.cut_off()
            begun.cancel()
            resumed = asyncio.create_task(second.http.post(path, json=body, headers=headers))
            while not resumed.done() and not any(  # noqa: ASYNC110
                s.state.output_ids
                for request in second.engine._request_manager.open_requests()
                for s in request.sequences
            ):
                await asyncio.sleep(0.05)
        answer = await resumed
        assert answer.status_code == 200, answer.text
    *parts, usage = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
    choices = [c for part in parts for c in part["choices"]]
    assert sum(len(c["token_ids"]) for c in choices) == 478
    assert sum(len(c["logprobs"]["token_logprobs"]) for c in choices if c["logprobs"]) == 478
    assert usage["usage"]["completion_tokens"] == 480
    spans = usage["usage"]["quadriga"]["spans"]
    assert sum(s["tokens"] for s in spans) == 480
    assert len({s["model"] for s in spans}) == 1


def known(rows: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """Models and depths that requests were served by."""
    return {(row["model"], row["depth"]) for row in rows if row["requests"] >= 1}


def stored(app: App) -> set[tuple[str, int]]:
    """Those of them that the next controller will find."""
    return known(load_history(app.name, load_config(app.config)).columns())


@pytest.mark.timeout(500)
async def test_profile_choose_serve_break_and_load_more(choosing: App) -> None:
    async with OwnIngress(choosing) as ingress:
        # Almost everything may leave at the first exits.
        # What came before may have had all layers loaded; that is looked at again.
        now = await ingress.until(choosing, is_partial, exit_threshold=SURE)
        model, depth = now["target"].split("@")
        assert now["counters"]["profiles"] >= 2, "both models were profiled"
        assert {row["model"] for row in now["rows"]} == set(FULL)
        assert all(row["perplexity"] for row in now["rows"] if row["depth"] == FULL[row["model"]])

        answer = await ingress.complete(exit_threshold=SURE)
        spans = answer["usage"]["quadriga"]["spans"]
        assert sum(s["tokens"] for s in spans) == answer["usage"]["completion_tokens"]
        assert {s["model"] for s in spans} == {model}
        assert spans[-1]["depth"] == int(depth)

        # No token is sure enough any more.
        before = now["target"]
        now = await ingress.until(
            choosing, lambda n: is_chosen(n) and n["target"] != before, exit_threshold=UNSURE
        )
        assert any("below" in str(d.get("reason")) for d in now["decisions"]), now["decisions"]

        served = known(now["rows"])
        await asyncio.to_thread(wait_until, lambda: served <= stored(choosing), 60.0)
        old = kill_controller(choosing)
        await asyncio.to_thread(until_another, choosing, old)
        later = await asyncio.to_thread(history, choosing)
        assert served and served <= known(later["rows"]), (served, later["rows"])
        assert (await ingress.complete())["usage"]["completion_tokens"] > 0
        admin = await ingress.engine.cluster.history()
        assert admin["rows"]
