"""What the scheduler answers while it does not know all, and how long it lives."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

import actors.scheduler
from actors.scheduler import Scheduler
from quadriga.clock import ManualClock
from quadriga.config import load_config
from quadriga.errors import Unavailable, UnknownModel
from quadriga.types import AUTO_MODEL, AdmitRequest


def plain(**settings: Any) -> dict[str, Any]:
    return load_config(settings).model_dump(mode="json", exclude={"auth"})


CHOOSES = plain(**{"helios.enabled": True})


def request(name: str = "a", model: str = AUTO_MODEL) -> AdmitRequest:
    return AdmitRequest(name, model, 8, 32, 0, time.time() + 60.0)


async def test_before_its_first_route_a_fresh_one_says_come_again() -> None:
    scheduler = Scheduler(CHOOSES)
    with pytest.raises(Unavailable):
        await scheduler.admit(request())
    await scheduler.configure(CHOOSES, ["quadriga-s"], 0.0)
    with pytest.raises(Unavailable, match="no model is chosen yet"):
        await scheduler.admit(request())
    with pytest.raises(UnknownModel):
        await scheduler.admit(request(model="other"))


async def test_where_nobody_chooses_no_model_is_called_so() -> None:
    scheduler = Scheduler(plain())
    await scheduler.configure(plain(), ["quadriga-s"], 0.0)
    with pytest.raises(UnknownModel):
        await scheduler.admit(request())


@pytest.mark.parametrize(
    ("turns_s", "lives"), [([1.0] * 60, True), ([1.0] * 62, False), ([1.0, 300.0, 1.0], True)]
)
async def test_one_that_stood_still_does_not_take_it_for_silence(
    turns_s: list[float], lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ended = ManualClock(1000.0), asyncio.Event()
    left = list(turns_s)

    async def sleep(_: float) -> None:
        if not left:
            await asyncio.Event().wait()
        clock.advance(left.pop(0))

    async def end(*_: Any) -> None:
        ended.set()

    monkeypatch.setattr(
        actors.scheduler, "asyncio", SimpleNamespace(Event=asyncio.Event, sleep=sleep)
    )
    monkeypatch.setattr(actors.scheduler, "SystemClock", lambda: clock)
    monkeypatch.setattr(Scheduler, "_end", end)
    Scheduler(plain())
    while left and not ended.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ended.is_set() is not lives
