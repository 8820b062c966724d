"""Where the running sequences of a decode replica are: at the front, or waiting at an exit.

Nothing moves when a sequence changes its place: hidden state and KV stay in its row, and a place is
a set of row numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quadriga.core.request import SequenceState
from quadriga.errors import InvariantViolation
from quadriga.policies.rebatching import Waiting
from quadriga.scheduling.sequence import FinishRule
from quadriga.scheduling.slots import SlotTable


@dataclass(slots=True, eq=False)
class RunningRow:
    """A running sequence.

    Attributes:
        place: The set of rows it is in: the front, or those waiting at an exit.
        threshold: What its request asks of a token that leaves early.
        bar: Confidence from which its token may leave early; infinite for never.
        last_segment: The segment behind which it leaves whatever its confidence.
        is_strict: It leaves at the end of its depth with a sufficient confidence only.
        owes: Its KV lacks layers that were loaded later, and ends at `last_segment`.
        wants: A token of it was not sure enough there: what it owes is to be paid.
        gap_s: Longest time between two tokens to plan for; 0 is the policy's default.
        since_s: When it came to its place.
        deadline_s: When its next token should be out.
        room_tokens: Tokens it may become before it must ask for more room; infinite where all it
            may become is reserved.
        num_pauses: How often it was moved to host memory here.
        stays_until: Tokens that it may become before a more important newcomer may displace it.
    """

    row: int
    state: SequenceState
    place: dict[int, RunningRow]
    finish: FinishRule
    threshold: float
    bar: float
    last_segment: int
    gap_s: float
    num_tokens: int
    since_s: float
    deadline_s: float = math.inf
    is_strict: bool = False
    room_tokens: float = math.inf
    num_pauses: int = 0
    stays_until: int = 0
    owes: bool = False
    wants: bool = False


Place = dict[int, RunningRow]
"""Rows in one place, in the order they came."""


class BatchState:
    """Running sequences by row, by name and by place; the owner of all three.

    Attributes:
        front: Rows ready for their next token.
        waiting: Per exit but the last, rows whose token waits there.
        parked: Per exit, rows whose token may neither leave there nor go on: at the last, for want
            of deeper layers; at others, until the row's KV has the layers behind.
        running: All of them, in order of joining.
        rows: Sequence id → row.
        num_limited: Running sequences with a depth limit of their own.
    """

    def __init__(self, num_segments: int, slots: SlotTable) -> None:
        self._slots = slots
        self._last = num_segments - 1
        self.front: Place = {}
        self.waiting: list[Place] = [{} for _ in range(self._last)]
        self.parked: list[Place] = [{} for _ in range(num_segments)]
        self.running: Place = {}
        self.rows: dict[str, int] = {}
        self.num_limited = 0

    def add(self, running: RunningRow) -> None:
        """Take a sequence into its place."""
        self.running[running.row] = running.place[running.row] = running
        self.rows[running.state.sequence_id] = running.row
        self.num_limited += running.last_segment < self._last

    def remove(self, row: int) -> RunningRow:
        """Take a sequence out of its place and give its slot back."""
        running = self.lift(row)
        sequence_id = running.state.sequence_id
        slot = self._slots.release(sequence_id)
        if slot is None or slot.row != row:
            raise InvariantViolation(f"{sequence_id} ran in row {row} but holds {slot}")
        return running

    def lift(self, row: int) -> RunningRow:
        """Take a sequence out of its place; it keeps its slot."""
        running = self.running.pop(row)
        del self.rows[running.state.sequence_id]
        del running.place[row]
        self.num_limited -= running.last_segment < self._last
        return running

    def move(self, running: RunningRow, place: Place, now_s: float) -> None:
        """Change a sequence's place."""
        del running.place[running.row]
        place[running.row] = running
        running.place = place
        running.since_s = now_s

    def before(self, segment: int) -> Place:
        """Rows that a pass from this segment on runs."""
        return self.waiting[segment - 1] if segment else self.front

    def exit_of(self, place: Place) -> int | None:
        """The exit a place is at; None for the front."""
        for places in (self.waiting, self.parked):
            for i, known in enumerate(places):
                if known is place:
                    return i
        return None

    def at(self, exit_index: int | None) -> Place:
        """Where a row's token waits; None is the front.

        Raises: InvariantViolation: There is no such exit.
        """
        if exit_index is None:
            return self.front
        if not 0 <= exit_index <= self._last:
            raise InvariantViolation(f"there are {self._last + 1} exits, not one at {exit_index}")
        return self.parked[exit_index] if exit_index == self._last else self.waiting[exit_index]

    @property
    def num_runnable(self) -> int:
        """Running sequences for which a pass can do something."""
        return len(self.running) - sum([len(place) for place in self.parked])

    def limit(self, running: RunningRow, last_segment: int) -> None:
        """Change the segment behind which a sequence that is here leaves."""
        self.num_limited -= running.last_segment < self._last
        running.last_segment = last_segment
        self.num_limited += running.last_segment < self._last

    def resize(self, num_segments: int) -> None:
        """Follow the number of segments; nobody may wait behind the last that is left.

        `limit` everybody afterwards.

        Raises: InvariantViolation: Somebody waits there.
        """
        last = num_segments - 1
        gone = [*self.waiting[last:], *self.parked[last + 1 :]]
        if any(gone):
            raise InvariantViolation(f"rows {sorted(r for p in gone for r in p)} wait too deep")
        del self.waiting[last:], self.parked[last + 1 :]
        self.waiting += [{} for _ in range(last - len(self.waiting))]
        self.parked += [{} for _ in range(num_segments - len(self.parked))]
        self._last = last
        self.num_limited = sum(r.last_segment < last for r in self.running.values())

    def check(self) -> None:
        """Verify the places against each other and the slots. Raises: InvariantViolation."""
        self._slots.check()
        places = [self.front, *self.waiting, *self.parked]
        placed = sorted(row for place in places for row in place)
        if placed != sorted(self.running) or sorted(self.rows.values()) != placed:
            raise InvariantViolation(
                f"rows {sorted(self.running)} run, rows {placed} have a place, and "
                f"{sorted(self.rows.values())} have a sequence"
            )
        for place in places:
            for row, running in place.items():
                slot = self._slots.get(running.state.sequence_id)
                if running.place is not place or slot is None or slot.row != row:
                    raise InvariantViolation(f"row {row} is not where its sequence thinks it is")


def summary(rows: Iterable[RunningRow]) -> Waiting:
    """What a policy is told of rows in one place."""
    count, num_tokens, least_s = 0, 0, math.inf
    for running in rows:
        count += 1
        num_tokens += running.num_tokens
        if running.deadline_s < least_s:
            least_s = running.deadline_s
    return Waiting(count, num_tokens, least_s)
