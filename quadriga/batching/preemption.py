"""Who makes room when memory fills, and who comes back first.

Memory is watched at two marks. Above the high one running sequences are paused: their KV moves to
host memory, row and blocks are free. They come back while the batch stays below the low one, so
that nobody is moved to and fro. Nothing is recomputed and nothing fails.

Source: BATON, "pause, resume and scale"; the watermarks, and who is chosen, are ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quadriga.types import SequenceState

HIGH_WATERMARK = 0.90
LOW_WATERMARK = 0.75


@dataclass(slots=True, eq=False)
class PausedSequence:
    """A sequence in host memory.

    Attributes:
        suspended: What the runner gave, and takes back.
        waited_at: The exit its token waits at, or None for the front.
        paused_at_s: Since when.
    """

    state: SequenceState
    suspended: Any
    waited_at: int | None
    paused_at_s: float


def remaining_tokens(state: SequenceState) -> int:
    """Longest that a sequence may still run."""
    return state.sampling.max_tokens - len(state.output_ids)


def choose_victim(running: Iterable[SequenceState]) -> SequenceState | None:
    """Least important first, then the longest remaining, then the newest."""
    return max(
        running,
        key=lambda s: (s.priority, remaining_tokens(s), s.arrival_unix_s),
        default=None,
    )


def choose_return(paused: Iterable[PausedSequence]) -> PausedSequence | None:
    """Most important first, then the longest paused: whoever waits is served in the end."""
    return min(paused, key=lambda p: (p.state.priority, p.paused_at_s), default=None)
