"""When tokens that came together are passed on: evenly, where a request asks for short gaps.

An exit that drafts gives a sequence several tokens at once, and then none for a while. Whoever
reads them one by one, evenly over the time until the next ones come, sees no gap.
"""

from __future__ import annotations

_DECAY = 0.95  # of the longest time between two bursts, with each of them


class TokenPacer:
    """The schedule of one sequence.

    Args:
        gap_s: The longest time between two tokens that the request asks for; none is held longer.

    Attributes:
        num_held: Tokens that came and may not go yet.
        due_s: When the next of them may.
    """

    def __init__(self, gap_s: float) -> None:
        self.num_held = 0
        self.due_s = 0.0
        self._gap_s = gap_s
        self._each_s = 0.0
        self._came_s: float | None = None
        self._longest_s = 0.0

    def came(self, count: int, now_s: float) -> None:
        """So many tokens came."""
        if self._came_s is not None:
            self._longest_s = max(_DECAY * self._longest_s, now_s - self._came_s)
        self._came_s = now_s
        if not self.num_held:
            self.due_s = now_s
        self.num_held += count
        each_s = min(self._gap_s, self._longest_s / self.num_held)
        self.due_s = min(self.due_s, now_s + each_s)
        self._each_s = each_s

    def take(self, now_s: float) -> int:
        """How many may go now; they are no longer held."""
        count = 0
        while self.num_held and self.due_s <= now_s:
            self.num_held -= 1
            self.due_s += self._each_s
            count += 1
        return count
