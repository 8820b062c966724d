"""The number of decode replicas follows the load, on a real cluster; nobody fails for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.rpc.lookup import controller_name, forget_actor, scheduler_name
from quadriga.checkpoint.exits import ExitParams
from quadriga.core.replica import DepthClass, ReplicaSnapshot
from quadriga.errors import QuadrigaError
from tests.ray.apps import App
from tests.ray.choosing import (
    breaches,
    history,
    is_another,
    is_served,
    kill_controller,
    until,
    write_history,
)
from tests.ray.ingress import Ingress, Stream, call
from tests.ray.moves import set_pace

S4, S8 = DepthClass("quadriga-s", 4), DepthClass("quadriga-s", 8)
EXITS = ExitParams(0.0, "bounded", 0)
"""Every token leaves at the first exit, so that nothing but the load changes the fleet: a token
below its threshold would have layers loaded."""

SLOTS = 4
PACE = "steady-60ms"
LONG = 700
"""Tokens; most of a minute at the pace, which ends with what needs it."""


@pytest.fixture(scope="module")
def scaled(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """One to three decode replicas of four slots, at four of eight layers."""
    path: Path = tmp_path_factory.mktemp("history") / "history.json"
    write_history(path, (S8, 0.05), (S4, 0.001))
    app = App.start(
        "scaled",
        **{
            "decode_replicas": 1,
            "decode.max_slots": SLOTS,
            "decode.pace": PACE,
            "decode.rebatching": "drex",
            "deterministic": True,
            "engine.max_model_len": 2048,
            "engine.threads": 1,
            "prefill.max_rows": 16,
            "helios.enabled": True,
            "helios.models": ["quadriga-s"],
            "helios.scout": False,
            "helios.max_changed_share": 1.0,
            "helios.history_path": str(path),
            "helios.reassess_requests": 100_000,
            "helios.scaling.enabled": True,
            "helios.scaling.max_replicas": 3,
            "helios.scaling.down_after_s": 4.0,
            "helios.scaling.pending_timeout_s": 20.0,
            "lifecycle.orphan_timeout_s": 300.0,
        },
    )
    until(app, is_served)
    yield app
    app.stop()


def submit(ingress: Ingress, seed: int, num_output: int) -> Stream:
    prompt = [20 + (seed * 7 + i * 3) % 300 for i in range(8 + seed % 20)]
    return ingress.submit(prompt, num_output, exits=EXITS, deadline_s=280.0)


def decodes(app: App, phase: str = "ready") -> list[str]:
    """Decode replicas in a phase."""
    replicas = app.status()["replicas"]
    return [r["name"] for r in replicas if r["role"] == "decode" and r["phase"] == phase]


def when(ingress: Ingress, is_so: Callable[[], bool], timeout_s: float) -> None:
    """Poll until something about the fleet is the case; it is asked five times a second."""
    give_up_s, asked_s = time.monotonic() + timeout_s, 0.0
    while True:
        ingress.poll(0.02)
        if time.monotonic() - asked_s >= 0.2:
            if is_so():
                return
            asked_s = time.monotonic()
        assert time.monotonic() < give_up_s, f"not in {timeout_s} s"


@pytest.mark.timeout(400)
def test_up_under_load_and_down_by_moving_the_rest(scaled: App) -> None:
    app = scaled
    alone = app.ingress()
    wanted = [submit(alone, seed, 60) for seed in range(3)]
    alone.finish(*wanted)

    ingress = app.ingress()
    streams = [submit(ingress, seed, LONG) for seed in range(8)]
    when(ingress, lambda: len(decodes(app)) == 3, 90.0)
    assert all(s.error is None for s in streams)

    # A controller that starts anew finds three, and keeps them.
    names = decodes(app)
    old = kill_controller(app)
    when(ingress, lambda: is_another(app, old), 30.0)
    when(ingress, lambda: _is_up(app) and len(decodes(app)) == 3, 30.0)
    assert set(decodes(app)) == set(names)

    # Most of the load ends, and each replica keeps something.
    streams += [submit(ingress, seed, LONG) for seed in range(20, 22)]
    ingress.until(lambda: all(len(s.tokens) > 2 for s in streams), 60.0)
    kept = [
        next(s for s in reversed(streams) if not s.is_over and s.replica == name) for name in names
    ]
    kept.append(streams[0])
    ingress.cancel(*(s for s in streams if s not in kept))
    when(ingress, lambda: bool(decodes(app, "retiring")), 60.0)
    (leaving,) = decodes(app, "retiring")
    loads: list[ReplicaSnapshot] = call(scheduler_name(app.name), "loads")
    assert all(s.forecast and s.forecast.has_predictions for s in loads if s.num_running > 1)
    decision = history(app)["scaling"]["decisions"][-1]
    work = decision["work_tokens"]
    assert (decision["what"], decision["replica"]) == ("RetireReplica", leaving)
    assert set(work) == set(names) and work[leaving] == min(work.values())

    for name in set(names) - {leaving}:
        set_pace(name, None)
    ingress.finish(*kept, timeout_s=120.0)
    assert [s.error for s in kept] == [None] * len(kept)
    assert [len(s.token_ids) for s in kept] == [LONG] * len(kept)
    assert streams[0].token_ids[:60] == wanted[0].token_ids, "deterministic, wherever it ran"
    moves = sum(len(s.moved_to) - 1 for s in kept)  # the first one is from the prefill replica
    assert moves >= 1, "what the leaving one held was moved"
    when(ingress, lambda: len(decodes(app)) == 1 and not decodes(app, "retiring"), 60.0)
    for name in decodes(app):
        set_pace(name, PACE)
    app.until_idle(5.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replica_that_never_comes_freezes_nothing(scaled: App) -> None:
    app = scaled
    app.until_ready()
    (only,) = decodes(app)
    before = breaches(app)
    hog = Hog()
    ingress = app.ingress()
    try:
        streams = [submit(ingress, seed, LONG) for seed in range(8)]
        when(ingress, lambda: bool(decodes(app, "pending")), 30.0)
        (first, *_) = decodes(app, "pending")
        # The loop goes on: layers that a strict prompt waits for are ordered meanwhile. (They come
        # once the prompts that wait for a place at a full replica are handed on.)
        strict = ExitParams(0.99, "strict", 0)
        late = ingress.submit([30, 40, 50], 20, exits=strict, deadline_s=250.0)
        when(ingress, lambda: ordered(app, "prefill:0") == str(S8), 40.0)
        # It is given up at its time, and another one is asked for.
        when(ingress, lambda: first not in decodes(app, "pending"), 45.0)
        when(ingress, lambda: bool(decodes(app, "pending")), 30.0)
        assert decodes(app) == [only]
    finally:
        hog.release()
    when(ingress, lambda: len(decodes(app)) >= 2, 60.0)
    ingress.finish(*streams, late, timeout_s=150.0)
    assert [s.error for s in [*streams, late]] == [None] * 9
    assert breaches(app) == before, "the strict one got its layers, though they are gone by now"
    assert history(app)["counters"]["failures"] == 0
    when(ingress, lambda: len(decodes(app)) == 1, 60.0)
    app.until_idle(5.0)


def ordered(app: App, place: str) -> str:
    """What a place was last told to hold."""
    orders = [d for d in history(app)["decisions"] if d.get("replica") == place]
    found: str = orders[-1]["depth_class"] if orders else ""
    return found


def _is_up(app: App) -> bool:
    try:
        return bool(app.status()["replicas"])
    except QuadrigaError:  # it is just starting anew
        forget_actor(controller_name(app.name))
        return False


class Hog:
    """An actor that leaves the cluster without room for a replica."""

    def __init__(self) -> None:
        free = ray.available_resources().get("CPU", 0.0)

        @ray.remote(max_restarts=0)
        class Sitter:
            def sits(self) -> bool:
                return True

        # A replica wants a tenth.
        self._actor: Any = Sitter.options(num_cpus=free - 0.05).remote()
        assert ray.get(self._actor.sits.remote(), timeout=30)

    def release(self) -> None:
        ray.kill(self._actor)
