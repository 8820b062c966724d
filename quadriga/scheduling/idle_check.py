"""Consistency checks that an engine makes whenever it has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Collection

from quadriga.clock import Clock
from quadriga.errors import InvariantViolation
from quadriga.scheduling.prefixes.cache import PrefixCache

CHECK_EVERY_S = 5.0
"""Between two checks, at least: an engine that is idle between all requests must not pay for it."""
LEAK_AFTER_S = 30.0
"""A slot that no known sequence has claimed for this long is a leak."""


class IdleCheck:
    """Runs a check when the engine has become idle; nothing is checked twice.

    A violation is raised, and ends the engine: the controller replaces the replica. It holds
    nothing at this moment, so no stream is lost, and an engine whose tables contradict each
    other must not go on.

    Args:
        check: Raises InvariantViolation, or returns whether to look again without new work.
        prefixes: Gets memory ready in rounds without work.
    """

    def __init__(
        self,
        check: Callable[[], bool],
        clock: Clock,
        prefixes: PrefixCache | None = None,
        *,
        every_s: float = CHECK_EVERY_S,
    ) -> None:
        self._prefixes = prefixes
        self._check = check
        self._clock = clock
        self._every_s = every_s
        self._is_due = True
        self._last_s = -every_s

    def step(self, *, is_idle: bool) -> None:
        """Called after every round of the engine. Raises: InvariantViolation."""
        if not is_idle:
            self._is_due = True
            return
        if self._prefixes is not None:
            self._prefixes.prepare()
        if not self._is_due:
            return
        now_s = self._clock.now_s()
        if now_s - self._last_s >= self._every_s:
            self._last_s = now_s
            self._is_due = self._check()


class Leaks:
    """Finds slots that are held for unknown sequences.

    A slot changes hands between threads, so an unclaimed one is only a suspect at first.
    """

    def __init__(self) -> None:
        self._suspects: dict[str, float] = {}  # sequence → since when

    def check(self, held: Collection[str], claimed: Collection[str], *, now_s: float) -> bool:
        """Compare the owners of slots with the known sequences; returns whether any is suspect.

        Raises:
            InvariantViolation: One has been suspect for too long.
        """
        unclaimed = set(held).difference(claimed)
        self._suspects = {s: self._suspects.get(s, now_s) for s in sorted(unclaimed)}
        leaked = [s for s, since_s in self._suspects.items() if now_s - since_s >= LEAK_AFTER_S]
        if leaked:
            raise InvariantViolation(
                f"{len(leaked)} slots are held for unknown sequences: {leaked[:4]}"
            )
        return bool(self._suspects)
