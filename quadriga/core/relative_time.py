"""Instants that travel between machines as distances from now."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar


class RelativeTimeMixin:
    """Names instants, which travel as distances from now: machines' clocks need not agree.

    What the way takes is not counted.
    """

    __slots__ = ()
    __match_args__: tuple[str, ...]
    INSTANTS: ClassVar[tuple[str, ...]]
    """Fields that are Unix times by the clock of the machine that the object is on; 0 is none."""

    def __reduce__(self) -> tuple[Any, ...]:
        names = self.__match_args__
        said, now_unix_s = [getattr(self, name) for name in names], time.time()
        places = [at for name in self.INSTANTS if said[at := names.index(name)]]
        for at in places:
            said[at] -= now_unix_s
        return _arrived, (type(self), places, said)


def _arrived(
    kind: Callable[..., RelativeTimeMixin], places: list[int], said: list[Any]
) -> RelativeTimeMixin:
    now_unix_s = time.time()
    for at in places:
        said[at] += now_unix_s
    return kind(*said)
