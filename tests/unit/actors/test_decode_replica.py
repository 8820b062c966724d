"""A decode replica's side of a hand-over: what fails leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.replica.decode import DecodeReplica
from quadriga.errors import MigrationFailed, ReplicaError


class Replica:
    """What the methods of a `DecodeReplica` touch; every command of its engine fails.

    Attributes:
        left: Sequences whose rows were given back.
        ended: Errors of the spans that were ended.
    """

    def __init__(self, error: Exception) -> None:
        self.left: list[str] = []
        self.ended: list[object] = []
        self._error = error
        self.departed = SimpleNamespace(come_back=lambda name: None)
        end = lambda name, error: self.ended.append(error)  # noqa: E731
        self.spans = SimpleNamespace(begin=lambda *_: None, end=end)
        self.engine = self
        self.arrived = self._require_wanted = lambda name: None
        slot = SimpleNamespace(row=3)
        self.loop = SimpleNamespace(
            reserve=lambda *_: slot, fill=self._fail, leave=self.left.append, join=self._fail
        )

    def _fail(self, *_: object) -> None:
        raise self._error

    async def compile_grammar(self, state: object) -> None:
        """Nothing is to be compiled."""

    async def call(self, command: Any) -> Any:
        return command(self)


async def test_a_row_whose_prefix_cannot_be_filled_is_given_back() -> None:
    names = ("sequence_id", "max_total_tokens", "num_tokens", "priority", "prediction")
    offer = SimpleNamespace(**dict.fromkeys(names, "s"), block_keys=())
    replica: Any = Replica(ReplicaError("no memory"))
    with pytest.raises(ReplicaError):
        await DecodeReplica.reserve_row(replica, offer)  # type: ignore[arg-type]
    assert replica.left == ["s"]


async def test_the_span_of_a_sequence_that_cannot_join_ends() -> None:
    replica: Any = Replica(MigrationFailed("others run here", code="depth_changed"))
    with pytest.raises(MigrationFailed):
        await DecodeReplica.join(replica, SimpleNamespace(sequence_id="s"), None, 4)  # type: ignore[arg-type]
    assert replica.ended == ["depth_changed"]
