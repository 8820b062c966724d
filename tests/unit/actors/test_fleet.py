"""What the controller's book decides about a replica that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from actors.fleet import Fleet, Member, Phase
from quadriga.clock import ManualClock
from quadriga.policies.liveness import STALL_PATIENCE
from quadriga.types import Role

LIMIT_S = 8.0


def verdicts(silences_s: Sequence[float]) -> list[str | None]:
    """What the fleet decides of replicas that were last heard of so long ago."""
    clock = ManualClock(1000.0)
    fleet = Fleet("app", clock, lambda: None, lambda: 0.0)
    handle: Any = None
    members = [
        Member(
            (Role.DECODE, i), f"d{i}", handle, 0.0, "same", Phase.READY, clock.now_s() - silence_s
        )
        for i, silence_s in enumerate(silences_s)
    ]
    fleet.members = {m.name: m for m in members}
    return [asyncio.run(fleet._verdict(m, LIMIT_S)) for m in members]


def test_the_fleet_replaces_a_hung_replica_and_outwaits_a_stall() -> None:
    healthy, hung = verdicts([0.5, LIMIT_S + 1])
    assert healthy is None
    assert hung is not None
    assert "hung" in hung
    assert verdicts([LIMIT_S + 1, LIMIT_S + 1]) == [None, None]
    beyond = LIMIT_S * STALL_PATIENCE + 1
    assert None not in verdicts([beyond, beyond]), "a stall is not waited for for ever"
