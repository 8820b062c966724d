"""HELIOS on real replicas: strict requests, switches of model, loads that fail; nobody fails."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.rpc.lookup import controller_name
from quadriga.checkpoint.folder import ASSETS
from quadriga.core.replica import DepthClass
from quadriga.errors import QuadrigaError
from quadriga.policies.helios import machine
from tests.ray.apps import App
from tests.ray.choosing import (
    EASY,
    SURE,
    UNSURE,
    OwnIngress,
    breaches,
    history,
    holds,
    is_served,
    set_constant,
    spans,
    until,
    write_history,
)
from tests.ray.ingress import call
from tests.ray.moves import set_pace
from tests.waiting import wait_until

S, L = "quadriga-s", "quadriga-l"
S4, S8, L6, L12 = (DepthClass(m, k) for m, k in ((S, 4), (S, 8), (L, 6), (L, 12)))
KNOWN = ((S8, 0.05), (S4, 0.001), (L12, 0.02), (L6, 0.002))
"""Seconds a token: four layers of the small model are best; should they not do, the large one."""
STRICT = {"exit_policy": "strict", "exit_threshold": 0.99}


def start(name: str, folder: Path, **config: Any) -> App:
    """One prefill and one decode replica, no scouts, and a table from which the choice is made."""
    path = folder / f"{name}.json"
    write_history(path, *KNOWN)
    app = App.start(
        name,
        **{
            "decode_replicas": 1,
            "decode.max_slots": 8,
            "decode.pace": "steady-15ms",
            "decode.rebatching": "drex",
            "deterministic": True,
            "engine.threads": 1,
            "helios.enabled": True,
            "helios.scout": False,
            "helios.max_changed_share": 1.0,
            "helios.history_path": str(path),
            "helios.reassess_requests": 100_000,
            "helios.dwell_loads": 0.0,
            "helios.retry_s": 1.0,
            "lifecycle.orphan_timeout_s": 300.0,
            **config,
        },
    )
    until(app, is_served)
    return app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue whose files a test may damage."""
    made = tmp_path_factory.mktemp("catalogue")
    for model in (S, L):
        shutil.copytree(ASSETS / model, made / model)
    return made


@pytest.fixture(scope="module")
def choosing(ray_cluster: None, folder: Path) -> Iterator[App]:
    app = start(
        "orders",
        folder,
        **{"model": str(folder / S), "helios.catalogue": str(folder), "engine.max_model_len": 512},
    )
    yield app
    app.stop()


class Damaged:
    """A checkpoint whose weights are cut short while replicas that loaded them serve."""

    def __init__(self, checkpoint: Path) -> None:
        self._file = checkpoint / "model.safetensors"
        self._whole = checkpoint / "whole"

    def __enter__(self) -> None:
        self._file.rename(self._whole)
        self._file.write_bytes(self._whole.read_bytes()[: self._whole.stat().st_size // 2])

    def __exit__(self, *_: object) -> None:
        self._whole.replace(self._file)


@pytest.mark.timeout(300)
async def test_a_strict_request_gets_its_layers_and_waits_until_they_can_be_loaded(
    choosing: App, folder: Path
) -> None:
    app = choosing
    async with OwnIngress(app) as ingress:
        before = await asyncio.to_thread(breaches, app)
        with Damaged(folder / S):
            waits = asyncio.create_task(ingress.complete(**STRICT, max_tokens=80))
            failed = history(app)["counters"]["failures"]
            # Its layers cannot be loaded now. Others are served meanwhile, at the old depth.
            now = await ingress.until(
                app, lambda n: n["counters"]["failures"] >= failed + 3, exit_threshold=0.0
            )
            assert not waits.done(), "no token came below its threshold, and it did not fail"
            assert holds(now) == str(S4) and now["target"] == str(S4)
            assert any("cannot be read" in str(d.get("reason")) for d in now["decisions"])
        first = await waits
        assert {depth for _, depth, _ in spans(first)} <= {4, 8}
        assert spans(first)[0][:2] == (S, 8), "its first token comes of all layers, too"
        # Undisturbed: while a strict one keeps the layers, they are there from the beginning.
        keeper = asyncio.create_task(ingress.complete(**STRICT, max_tokens=450, prompt="Hello.\n"))
        for place in ("prefill:0", "decode:0"):
            await asyncio.to_thread(until, app, lambda n, p=place: holds(n, p) == str(S8))
        again = await ingress.complete(**STRICT, max_tokens=80)
        await keeper
        assert spans(again) == [(S, 8, 80)]
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        assert await asyncio.to_thread(breaches, app) == before, "strict ones never breach"
    # They are kept for half a minute after the last: others may follow it.
    set_constant(controller_name(app.name), machine.__name__, "STRICT_KEPT_S", 1.0)
    now = await asyncio.to_thread(until, app, is_served)
    assert now["target"] == str(S4), "nobody is strict any more: the layers go"
    await asyncio.to_thread(app.until_idle, 5.0)


@pytest.mark.timeout(300)
async def test_a_model_that_does_not_load_leaves_the_old_one_serving(
    choosing: App, folder: Path
) -> None:
    app = choosing
    names = sorted(r["name"] for r in app.status()["replicas"])
    async with OwnIngress(app) as ingress:
        with Damaged(folder / L):
            failed = history(app)["counters"]["failures"]
            now = await ingress.until(
                app, lambda n: n["counters"]["failures"] > failed, exit_threshold=UNSURE
            )
            asked = [d for d in now["decisions"] if d["what"] == "switch"]
            assert asked and asked[-1]["depth_class"] == str(L6), now["decisions"]
            said = [str(d["reason"]) for d in now["decisions"] if d["what"] == "keep"]
            assert any(reason.endswith(f"{S4} goes on serving") for reason in said), said
            assert now["target"] in (str(S4), str(S8)), "the old one, or already all of it"
            assert str(L6) in now["barred"] and "process" in now["barred"][str(L6)]
            assert (await ingress.complete(exit_threshold=SURE))["usage"]["completion_tokens"] == 60
        await asyncio.to_thread(app.until_ready)
        assert sorted(r["name"] for r in app.status()["replicas"]) == names, "the same processes"
        # The next time confidence breaks there is no other model: the rest of the layers comes.
        now = await ingress.until(
            app, lambda n: is_served(n) and n["target"] == str(S8), exit_threshold=UNSURE
        )
        assert now["counters"]["switches"] == 0
    await asyncio.to_thread(app.until_idle, 5.0)


@pytest.mark.timeout(300)
async def test_a_switch_moves_what_runs_to_those_that_still_have_the_model(
    ray_cluster: None, tmp_path: Path
) -> None:
    """Of two replicas the first goes over: its sequences go on at the second, and on from there."""
    app = await asyncio.to_thread(
        start,
        "moving-models",
        tmp_path,
        **{
            "decode_replicas": 2,
            "engine.max_model_len": 2048,
            "decode.pace": "ares-qwen7b-4090d-short",
            "lifecycle.drain_timeout_s": 60.0,
        },
    )
    try:
        async with OwnIngress(app) as ingress:
            doubtful = {"exit_threshold": UNSURE, "max_tokens": 1000}
            asked = [asyncio.create_task(ingress.complete(**doubtful)) for _ in range(6)]
            await asyncio.to_thread(
                until, app, lambda _: app.metric("quadriga_migrations_total") >= 1, 120.0
            )
            # They have moved. The second replica goes over once they have ended there.
            for name in await asyncio.to_thread(app.replicas, "decode"):
                with suppress(QuadrigaError, RayError):  # of one that is loading
                    await asyncio.to_thread(set_pace, name, None)
            answers = await asyncio.gather(*asked)
        now = await asyncio.to_thread(
            until, app, lambda n: is_served(n) and n["counters"]["switches"] >= 3, 120.0
        )
        assert now["target"] is not None and now["target"].startswith(L)
        assert app.metric("quadriga_migrations_total") >= 1
        assert all(answer["usage"]["quadriga"]["rebuilds"] == 0 for answer in answers)
        await asyncio.to_thread(app.until_idle, 10.0)
    finally:
        await asyncio.to_thread(app.stop)


LONG = 1900
"""Tokens; most of a minute at the pace: they outlive the switch, and the old replica's patience."""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_switch_of_model_fails_nobody(ray_cluster: None, tmp_path: Path) -> None:
    """What is in flight ends where it is, if that is soon, or goes on at the other model."""
    app = await asyncio.to_thread(
        start,
        "switching",
        tmp_path,
        **{
            "engine.max_model_len": 2048,
            "decode.pace": "ares-qwen7b-4090d-short",
            "lifecycle.drain_timeout_s": 4.0,
        },
    )
    try:
        async with OwnIngress(app) as ingress:
            doubtful = {"exit_threshold": UNSURE, "max_tokens": LONG}
            long = [asyncio.create_task(ingress.complete(**doubtful)) for _ in range(3)]
            short: list[dict[str, Any]] = []

            async def keep_on(prompt: str) -> None:
                while not all(task.done() for task in long):
                    short.append(await ingress.complete(exit_threshold=SURE, prompt=prompt))

            others = [asyncio.create_task(keep_on(p)) for p in (EASY, "Hello.\n")]
            answers = await asyncio.gather(*long)
            await asyncio.gather(*others)
        now = await asyncio.to_thread(history, app)
        assert now["counters"]["switches"] >= 2, now["decisions"]
        for answer in answers:
            models = [model for model, _, _ in spans(answer)]
            assert set(models) == {S, L}, spans(answer)
            assert models == sorted(models, reverse=True), "from the small one to the large one"
            assert answer["usage"]["quadriga"]["rebuilds"] >= 1
        served_by = [{model for model, _, _ in spans(answer)} for answer in short]
        assert {S} in served_by and {L} in served_by, "before the switch, and after it"
        assert any(str(d.get("reason")).count("switching to") for d in now["decisions"])
        wait_until(
            lambda: {r["depth_class"] for r in app.status()["replicas"]} <= {str(L6), str(L12)},
            30.0,
        )
        call(controller_name(app.name), "ingress_heartbeat", "waiting")
        await asyncio.to_thread(app.until_idle, 10.0)
    finally:
        await asyncio.to_thread(app.stop)
