"""Who is silent is ended once; a controller that stood still blames nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.controller import watchdogs
from actors.controller.watchdogs import SILENCE_S, IngressWatch
from quadriga.policies.liveness import STALL_PATIENCE


def test_a_silent_ingress_is_found_once() -> None:
    watch = IngressWatch()
    found = []
    for second in range(30):
        watch.hear("lives", float(second))
        if second < 5:
            watch.hear("hangs", float(second))
        found += [(second, actor) for actor in watch.hung(float(second))]
    assert found == [(4 + int(SILENCE_S) + 1, "hangs")]


def test_where_half_are_silent_at_once_the_machine_is_stalled() -> None:
    watch = IngressWatch()
    for actor in ("a", "b", "lives"):
        watch.hear(actor, 0.0)
    found = []
    for second in range(1, 60):
        watch.hear("lives", float(second))
        found += [(second, actor) for actor in watch.hung(float(second))]
    late_s = int(SILENCE_S * STALL_PATIENCE) + 1
    assert found == [(late_s, "a"), (late_s, "b")], "later, but for certain"


def test_a_replaced_ingress_does_not_count_as_silent() -> None:
    watch = IngressWatch()
    for actor in ("replaced", "hangs", "lives"):
        watch.hear(actor, 0.0)
    found = []
    for second in range(1, 60):
        watch.hear("lives", float(second))
        if second == 7:
            assert watch.silent(7.0) == ["replaced", "hangs"]
            watch.forget("replaced")
        found += [(second, actor) for actor in watch.hung(float(second))]
    assert found == [(int(SILENCE_S) + 1, "hangs")]


def test_an_ingress_that_wakes_is_watched_again() -> None:
    watch = IngressWatch()
    watch.hear("a", 0.0)
    for second in range(12):
        watch.hung(float(second))
    watch.hear("a", 12.0)
    assert watch.hung(13.0) == []


def test_a_watch_that_stalled_marks_no_ingress_hung() -> None:
    watch = IngressWatch()
    watch.hear("a", 0.0)
    assert watch.hung(1.0) == []
    assert watch.hung(60.0) == []
    watch.hear("a", 60.5)
    assert watch.hung(61.0) == []


def test_an_ingress_without_a_name_is_not_watched() -> None:
    watch = IngressWatch()
    watch.hear("", 0.0)
    assert [watch.hung(float(s)) for s in range(0, 40)] == [[]] * 40


async def test_an_ingress_that_ray_did_not_end_is_ended_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says nothing any more, so nobody else would put it back."""
    watch, ended = IngressWatch(), []
    answers: list[Callable[[], Any]] = [_away, object]
    monkeypatch.setattr(watchdogs.ray, "get_actor", lambda *_, **__: answers.pop(0)())
    monkeypatch.setattr(watchdogs.ray, "kill", lambda *_, **__: ended.append(second))
    watch.hear("hangs", 0.0)
    for second in range(30):
        for actor in watch.hung(float(second)):
            await watch.end(actor, float(second))
    assert ended == [11 + int(SILENCE_S / 2) + 1]


async def test_ray_is_asked_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, asked, gate = IngressWatch(), [], asyncio.Event()

    async def find(actor: str) -> object:
        asked.append(actor)
        await gate.wait()
        return object()

    monkeypatch.setattr(watchdogs, "_find_ingress", find)
    watch.hear("silent", 0.0)
    looks = [asyncio.create_task(watch.forget_gone(6.0 + at)) for at in range(3)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*looks)
    assert asked == ["silent"]
    await watch.forget_gone(9.0)
    assert asked == ["silent"] * 2


def _away() -> Any:
    raise RayError("the control store is away")
