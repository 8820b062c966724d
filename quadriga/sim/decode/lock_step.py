"""Decode replicas that step together: each step takes as long as the slowest one's.

So do the ranks of data-parallel attention, whose layers of experts are divided among all of them: a
rank that is done waits at the next exchange for the one that is not, and one without sequences
steps along with nothing. Then a rank that holds too much slows down every sequence of the group,
and not its own alone.

Between two events each rank's own step grows by a constant, so who is the slowest changes when a
rank that holds more sequences catches up with one that holds more tokens. That is an event as well,
and between events the slowest one's sum in closed form holds for all.

Source: vLLM and SGLang, data-parallel attention (ranks that have no requests run dummy batches);
the exchange itself takes no time here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.records import Gaps, Happened


class LockStep:
    """The pace of a group of ranks; they have one anchor.

    Attributes:
        first_step_s, slope_s: The slowest rank's; see `SimulatedDecodeReplica`.
        num_steps: Steps from the anchor until another rank is the slowest.
    """

    def __init__(self, ranks: Many[LockStepReplica]) -> None:
        self.ranks = ranks
        self.first_step_s, self.slope_s = ranks[0].own_pace
        self.num_steps: float = math.inf
        for rank in ranks:
            rank.group = self

    @property
    def is_running(self) -> bool:
        """Whether any rank has sequences: then all step."""
        return any(rank.running for rank in self.ranks)

    def advance(self, num_steps: int) -> None:
        """Make steps on all ranks."""
        if not self.is_running:
            return
        end_s = next(r for r in self.ranks if r.running).after_s(num_steps)
        for rank in self.ranks:
            rank.make_steps(num_steps)
            rank.anchor_s = end_s

    def settle(self, changed: LockStepReplica) -> None:
        """One rank let something happen at the anchor: the others wait for it, and go on."""
        for rank in self.ranks:
            rank.wait_until(changed.anchor_s)
        paces = [rank.own_pace for rank in self.ranks if rank.running]
        if not paces:
            return
        self.first_step_s, self.slope_s = slowest = max(paces)
        self.num_steps = min(
            (
                math.floor((slowest[0] - first_s) / (slope_s - slowest[1])) + 1
                for first_s, slope_s in paces
                if slope_s > slowest[1]
            ),
            default=math.inf,
        )


class LockStepReplica(SimulatedDecodeReplica):
    """One rank; see the module.

    Attributes:
        group: Set by `LockStep`.
    """

    group: LockStep

    @property
    def first_step_s(self) -> float:
        """Of the group."""
        return self.group.first_step_s

    @property
    def slope_s(self) -> float:
        """Of the group."""
        return self.group.slope_s

    @property
    def own_pace(self) -> tuple[float, float]:
        """First step and slope of this rank's own work, in seconds."""
        return super().first_step_s, super().slope_s

    def after_s(self, num_steps: int) -> float:
        """When so many steps from the anchor are made."""
        return self.anchor_s + self._duration_s(num_steps)

    def make_steps(self, num_steps: int) -> None:
        """See `LockStep.advance`."""
        self._advance(num_steps)

    def wait_until(self, at_s: float) -> None:
        """Stand still until another rank goes on."""
        if self.running and at_s > self.anchor_s:
            waited_s = at_s - self.anchor_s
            self._on_gaps(Gaps(waited_s, waited_s, len(self.running), at_s))
        self.anchor_s = max(self.anchor_s, at_s)

    def next_event_s(self) -> float:
        """See `SimulatedDecodeReplica.next_event_s`: of a rank without sequences, too, a boundary
        of the group."""
        if not self.group.is_running:
            return super().next_event_s()
        if not (self.running or self._joining or self._halted):
            return math.inf
        return self.after_s(self._event_steps())

    def run_to_event(self, now_s: float) -> Happened:
        """See `SimulatedDecodeReplica.run_to_event`."""
        self.group.advance(self._event_steps() if self.group.is_running else 0)
        happened = self._let_happen(now_s)
        self.group.settle(self)
        return happened

    def _event_steps(self) -> int:
        if self.running:
            return int(min(super()._event_steps(), self.group.num_steps))
        return self._boundary(self._joining[0][0]) if self._joining else 0
