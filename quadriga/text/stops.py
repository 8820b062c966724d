"""Stop strings, matched across token borders without ever showing a part of one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(slots=True)
class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton.

    Attributes:
        fallback: For each prefix length, the length of its longest proper border.
        matched: Characters of `text` that the stream's end matches now; fewer than it has.
    """

    text: str
    fallback: list[int]
    matched: int = 0

    def feed(self, char: str) -> bool:
        """Advance by one character; True when the whole string now ends the stream."""
        k = self.matched
        while k and self.text[k] != char:
            k = self.fallback[k - 1]
        if self.text[k] == char:
            k += 1
        is_met = k == len(self.text)
        self.matched = self.fallback[k - 1] if is_met else k
        return is_met


@lru_cache(1024)
def _borders(text: str) -> list[int]:
    table = [0] * len(text)
    k = 0
    for i in range(1, len(text)):
        while k and text[i] != text[k]:
            k = table[k - 1]
        if text[i] == text[k]:
            k += 1
        table[i] = k
    return table


class StopMatcher:
    """Finds the first of several stop strings in a text that arrives in pieces.

    Text that could still become a stop string is held back, and released as soon as it cannot.
    Where several strings end at the same character the longest one counts.

    Args:
        min_pieces: A stop string that ends within so many first pieces is text like any other.

    Attributes:
        met: The stop string that was met; empty before.
    """

    def __init__(self, stops: tuple[str, ...], min_pieces: int = 0) -> None:
        self._patterns = [_Pattern(stop, _borders(stop)) for stop in stops]
        self._held = ""
        self._num_early = min_pieces
        self.met = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take a piece; return (text that may be shown, whether a stop string was met).

        After a match the stop string and everything behind it is gone; push nothing more.
        """
        is_early = self._num_early > 0
        self._num_early -= 1
        if not self._patterns or not text:
            return text, False
        for i, char in enumerate(text):
            met = 0
            for pattern in self._patterns:
                if pattern.feed(char):
                    met = max(met, len(pattern.text))
            if met and not is_early:
                seen = self._held + text[: i + 1]
                self._held, self.met = "", seen[-met:]
                return seen[:-met], True
        seen = self._held + text
        hold = max(pattern.matched for pattern in self._patterns)
        if hold == 0:
            self._held = ""
            return seen, False
        self._held = seen[-hold:]
        return seen[:-hold], False

    def flush(self) -> str:
        """Return what was held back; the stream is over and no stop string came."""
        held, self._held = self._held, ""
        return held
