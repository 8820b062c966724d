"""The Confidence Breach Counter: how many of the last tokens were below their threshold.

Source: HELIOS §3.3.3 (window 100, at most 50); differs: with B sequences in a batch the window is
max(100, 4·B) tokens and the limit its half, so that a large batch's one bad step does not trip it.
"""

from __future__ import annotations

from collections import deque


class BreachWindow:
    """Counts breaches among the last tokens.

    Reports of several tokens say how many were breaches, not which: as they leave the window they
    are taken to be spread evenly.

    Args:
        min_tokens: Size of the window for small batches.
        tokens_per_sequence: The window holds at least this many tokens a running sequence.
        share: More breaches than this share of the window trip it.
    """

    def __init__(self, min_tokens: int, tokens_per_sequence: int, share: float) -> None:
        self._min_tokens, self._per_sequence, self._share = min_tokens, tokens_per_sequence, share
        self._size = min_tokens
        self._reports: deque[tuple[float, float]] = deque()
        self._tokens = 0.0
        self._breaches = 0.0

    @property
    def size(self) -> int:
        """Tokens that the window holds, for the batch last seen."""
        return self._size

    @property
    def breaches(self) -> float:
        return self._breaches

    @property
    def is_tripped(self) -> bool:
        """Whether there are more breaches than allowed; the window need not be full for that."""
        return self._breaches > self._share * self._size + 1e-9

    def add(self, tokens: int, breaches: int, batch: int) -> None:
        """Note served tokens and how many of them were breaches."""
        self._size = max(self._min_tokens, self._per_sequence * batch)
        if tokens:
            self._reports.append((float(tokens), float(breaches)))
            self._tokens += tokens
            self._breaches += breaches
        while self._tokens > self._size:
            first_tokens, first_breaches = self._reports.popleft()
            excess = self._tokens - self._size
            gone = min(excess, first_tokens)
            gone_breaches = first_breaches * gone / first_tokens
            if gone < first_tokens:
                self._reports.appendleft((first_tokens - gone, first_breaches - gone_breaches))
            self._tokens -= gone
            self._breaches -= gone_breaches

    def clear(self) -> None:
        """Start anew, after a change."""
        self._reports.clear()
        self._tokens = self._breaches = 0.0
