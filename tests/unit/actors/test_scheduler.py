"""What the scheduler answers while it does not know all, and how long it lives."""

from __future__ import annotations

import time
from typing import Any

import pytest

from actors.scheduler import Scheduler
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
