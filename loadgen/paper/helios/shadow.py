"""Answers read again at full depth, teacher-forced: which tokens would it have said, too?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.paper.helios.record import Request


@dataclass(slots=True)
class Shadow:
    """Counts of tokens after the first ones, apart by how they left.

    Attributes:
        sure, sure_same: Left early above their threshold; of these, full depth says the same.
        breached, breached_same: Left the deepest loaded exit below it.
    """

    sure: int = 0
    sure_same: int = 0
    breached: int = 0
    breached_same: int = 0

    @property
    def sure_share(self) -> float | None:
        return self.sure_same / self.sure if self.sure else None

    @property
    def breached_share(self) -> float | None:
        return self.breached_same / self.breached if self.breached else None

    def add(self, request: Request, said: Sequence[int], num_layers: int) -> None:
        """Compare a request's tokens with what full depth says in their places."""
        rows = zip(request.token_ids, request.exit_layers, request.breached, said, strict=True)
        for token_id, layers, breached, full in list(rows)[1:]:
            if layers >= num_layers:
                continue
            same = token_id == full
            if breached > 0.5:
                self.breached += 1
                self.breached_same += same
            else:
                self.sure += 1
                self.sure_same += same
