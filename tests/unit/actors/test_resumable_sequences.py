"""The scheduler finds who runs a sequence whose ingress is gone, by asking those who could."""

from __future__ import annotations

import time
from typing import Any

import pytest

import actors.scheduler.scheduler
from actors.scheduler.scheduler import Scheduler
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.request import ResumableSequence
from quadriga.errors import QuadrigaError, ReplicaDied, ReplicaError

CLASS = DepthClass("quadriga-s", 8)
HERE = ResumableSequence("claim:0", "app:decode:1", "s-1", 3, "quadriga-s")


def snapshot(name: str, role: Role) -> ReplicaSnapshot:
    return ReplicaSnapshot(ReplicaInfo(name, role, CLASS, "n", name, 8, 4096), time.time())


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[ResumableSequence] | QuadrigaError]:
    """What each replica says; whoever else is asked fails the test."""
    found: dict[str, list[ResumableSequence] | QuadrigaError] = {}

    async def call(name: str, method: str, *args: Any, timeout_s: float) -> Any:
        assert method == "call_many" and args[0] == "claimed"
        answer = found[name]
        if isinstance(answer, QuadrigaError):
            raise answer
        return [(True, [o for o in answer if o.claim in c]) for (c,) in args[1]]

    monkeypatch.setattr(actors.scheduler.scheduler, "call", call)
    return found


async def test_one_call_finds_a_resumable_sequence(
    answers: dict[str, list[ResumableSequence] | QuadrigaError],
) -> None:
    scheduler = Scheduler(QuadrigaConfig().model_dump(mode="json", exclude={"auth"}))
    for name in ("app:decode:0", "app:decode:1", "app:decode:2", "app:decode:3"):
        await scheduler.report(snapshot(name, Role.DECODE))
    await scheduler.report(snapshot("app:prefill:0", Role.PREFILL))
    answers["app:decode:0"] = []
    answers["app:decode:1"] = [
        HERE,
        ResumableSequence("another:0", "app:decode:1", "s-2", 1, "quadriga-s"),
    ]
    answers["app:decode:2"] = ReplicaDied("it has died")
    answers["app:decode:3"] = ReplicaError("it hangs", code="timeout")
    assert await scheduler.find_resumable(["claim:0", "claim:1"]) == [HERE]
    assert await scheduler.find_resumable(["nobody:0"]) == []
