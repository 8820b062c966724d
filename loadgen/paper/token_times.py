"""When a reader of one sequence sees its tokens, as the service would pass them on."""

from __future__ import annotations

from quadriga.policies.token_pacing import TokenPacer


class TokenTimes:
    """The gaps that a reader sees.

    Args:
        began_s: When it saw the first token.
        gap_s: That its request asks for; 0: tokens that come together are seen together.
    """

    def __init__(self, began_s: float, gap_s: float) -> None:
        self._last_s = began_s
        self._pacer = TokenPacer(gap_s) if gap_s else None
        if self._pacer is not None:
            self._pacer.came(1, began_s)
            self._pacer.take(began_s)

    def came(self, count: int, now_s: float, *, ends: bool) -> list[float]:
        """So many tokens came; returns the gaps that ended since the last came, and now."""
        gaps, pacer = [], self._pacer
        while pacer is not None and pacer.num_held and pacer.due_s < now_s:
            seen_s = max(pacer.due_s, self._last_s)
            pacer.take(seen_s)
            gaps.append(seen_s - self._last_s)
            self._last_s = seen_s
        is_seen = True
        if pacer is not None:
            pacer.came(count, now_s)
            is_seen = pacer.take(now_s) > 0 or ends
        if is_seen:
            gaps.append(now_s - self._last_s)
            self._last_s = now_s
        return gaps
