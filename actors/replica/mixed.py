"""The mixed replica: computes prompts and decodes them in the same rows, on one device.

To admission it is a prefill replica, with a queue; to placement a decode replica, with slots. What
is submitted here stays here: no KV is handed over. Afterwards it is a decode replica's sequence,
and moves, pauses, drains and is adopted as one.
"""

from __future__ import annotations

from typing import ClassVar

from actors.replica.decode import DecodeReplica
from actors.replica.decode_engine import DecodeEngine
from actors.replica.mixed_engine import MixedEngine
from quadriga.core.replica import ResizeReport
from quadriga.core.request import SequenceState


class MixedReplica(DecodeReplica):
    """Ray actor; see `Replica` for the calls that all roles answer."""

    engine_type: ClassVar[type[DecodeEngine]] = MixedEngine
    BATCHED = DecodeReplica.BATCHED | {"submit"}

    async def submit(self, state: SequenceState) -> None:
        """Queue a sequence, which is computed and decoded here; raises as `PrefillReplica`'s."""
        await self.prepare(state)

        def submit(core: DecodeEngine) -> None:
            assert isinstance(core, MixedEngine)
            core.submit(state)

        await self.enqueue(state, submit)

    async def resize(self, depth: int, deadline_s: float) -> ResizeReport:
        """Always refused: HELIOS, which changes depths, has no mixed replicas."""
        return ResizeReport("refused", "not_resizable: a mixed replica keeps its depth")
