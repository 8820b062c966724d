"""Answers that are read again: what full depth would have said, by exit."""

from __future__ import annotations

from typing import Any

import pytest

import actors.controller.full_depth_rescorer
from actors.controller.full_depth_rescorer import FullDepthRescorer, compared
from quadriga.clock import SystemClock
from quadriga.core.output import EngineOutput, PollReply
from quadriga.core.request import FinishReason, TokenLogprob
from quadriga.core.routing import AutoReport
from quadriga.errors import Overloaded

REPORT = AutoReport("finished", "d", prompt_ids=(1, 2), output_ids=(3, 4, 5), exit_layers=(8, 2, 2))
SAID = [TokenLogprob(1, None)] + [
    TokenLogprob(said, -1.0, ((best, -0.1),)) for said, best in ((2, 9), (3, 3), (4, 4), (5, 6))
]


def test_tokens_are_compared_by_the_exit_they_left_at() -> None:
    assert compared(REPORT, SAID) == {8: (1, 1), 2: (1, 2)}


async def test_a_scout_is_asked_once_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def call(name: str, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "submit":
            asked.append(args[0])
            return None
        emission = EngineOutput(
            asked[-1].sequence_id, 0, finish=FinishReason.LENGTH, prompt_logprobs=SAID
        )
        return PollReply("one", len(asked), [emission])

    monkeypatch.setattr(actors.controller.full_depth_rescorer, "call", call)
    teacher = FullDepthRescorer("app", SystemClock())
    sample = await teacher.read(REPORT, "scout", "m")
    assert sample is not None and sample.exits == {8: (1, 1), 2: (1, 2)}
    assert asked[0].prompt_ids == [1, 2, 3, 4, 5] and asked[0].sampling.max_tokens == 0


async def test_a_scout_that_refuses_costs_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(*_: Any, **__: Any) -> Any:
        raise Overloaded("full")

    monkeypatch.setattr(actors.controller.full_depth_rescorer, "call", call)
    teacher = FullDepthRescorer("app", SystemClock())
    assert await teacher.read(REPORT, "scout", "m") is None
    assert not teacher.is_reading
