"""A decode replica's side of a hand-over: what fails leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.replica.decode import DecodeReplica
from quadriga.clock import ManualClock
from quadriga.errors import MigrationFailed
from quadriga.replica.spans import SequenceSpans
from tests.unit.actors.test_sequence_handoff import a_state


async def test_the_span_of_a_sequence_that_cannot_join_ends() -> None:
    async def fail(_: object) -> None:
        raise MigrationFailed("others run here", code="depth_changed")

    async def prepare(_: object) -> None:
        """Nothing is to be compiled."""

    replica: Any = SimpleNamespace(
        spans=SequenceSpans("d", ManualClock()),
        engine=SimpleNamespace(call=fail),
        departed=SimpleNamespace(come_back=lambda name: None),
        compile_grammar=prepare,
        _require_wanted=lambda name: None,
    )
    state = a_state(deadline_s=9.0)
    state.traceparent = "00-a-b-01"
    with pytest.raises(MigrationFailed):
        await DecodeReplica.join(replica, state, None, 4)
    assert not replica.spans.open
