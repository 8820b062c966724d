"""A decode batch whose model gains or loses layers between two steps.

Down: who waits for layers that go is run to its end first, with the layers there still are; so no
token is let out early by a shrinking replica. Strict sequences need what they may go down to, and
block the change until they have moved or ended.

Up: who was parked for want of depth goes on from where it stopped. KV of positions from before
lacks the new layers. Until a sequence wants them it stays at its old depth, and costs nothing; then
its positions are run again, a few of them a step, and after that it may go deep.

    parked at the deepest exit ──layers come──▶ parked there, owing ──repaid──▶ waiting ─▶ deeper
                                        └───────────owing nothing──────────────────┘

Source: HELIOS, loading more layers or fewer while requests are in flight; debts, and who may pass
while they last, are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quadriga.checkpoint.exits import ExitParams
from quadriga.clock import Clock
from quadriga.core.kv import ResumePoint
from quadriga.core.output import EngineOutput
from quadriga.core.request import SequenceState
from quadriga.errors import ConfigError, InvariantViolation, MigrationFailed
from quadriga.interfaces import ModelRunner, ResizableRunner
from quadriga.policies.rebatching import Range
from quadriga.scheduling.batch_state import BatchState, RunningRow
from quadriga.scheduling.exit_gate import ExitGate
from quadriga.scheduling.preemption import Preemption
from quadriga.scheduling.sequence_export import SequenceExport
from quadriga.scheduling.slots import SlotTable

REPAY_TOKENS = 64
"""Positions run again in a step, at most: about what a step over a full batch takes."""

Emissions = list[tuple[str, EngineOutput]]


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What came of dropping layers.

    Attributes:
        blocked_by: Sequences that need the layers; if there are any, nothing has changed.
        emissions: Tokens of sequences that waited for layers that went.
        excess_tokens: KV promised beyond what fits.
    """

    blocked_by: list[str] = field(default_factory=list)
    emissions: Emissions = field(default_factory=list)
    excess_tokens: int = 0


class DepthChanges:
    """Keeps a decode loop's books right while its runner's depth changes.

    Args:
        run: Runs a range over the rows that wait before it, and commits what leaves.
        follow: Called with the old segment ends once the runner has others.

    Attributes:
        num_changes: Since the start.
        num_repayments: Passes in which positions were run again for layers that came later.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        slots: SlotTable,
        places: BatchState,
        gate: ExitGate,
        preemption: Preemption,
        departures: SequenceExport,
        clock: Clock,
        run: Callable[[Range, Emissions], None],
        follow: Callable[[tuple[int, ...]], None],
        repay_tokens: int = REPAY_TOKENS,
    ) -> None:
        self.num_changes = 0
        self.num_repayments = 0
        self._runner = runner if isinstance(runner, ResizableRunner) else None
        self._slots = slots
        self._places = places
        self._gate = gate
        self._preemption = preemption
        self._departures = departures
        self._clock = clock
        self._run = run
        self._follow = follow
        self._repay_tokens = repay_tokens
        self._came_with: dict[str, int] = {}  # reserved before a change → layers of its KV

    def take(self, prepared: Any) -> int:
        """Go on with the deeper model that the runner prepared; between two steps.

        Returns:
            KV tokens promised beyond what fits now: they are given back as sequences end.

        Raises:
            ConfigError: The layers do not fit this runner as it is now; nothing has changed.
        """
        runner = self._resizable()
        before = tuple(runner.segment_ends)
        runner.take_depth(prepared)
        return self._changed(runner, before)

    def drop_to(self, depth: int) -> Shrunk:
        """Let the layers behind the first `depth` go; between two steps.

        Raises:
            ConfigError: The runner cannot go there; nothing has changed.
        """
        runner = self._resizable()
        before = tuple(runner.segment_ends)
        blockers = self.blockers(depth)
        if blockers:
            return Shrunk(blocked_by=blockers)
        runner.check_drop(depth)  # before a token is taken from anybody
        emissions: Emissions = []
        if depth in before:
            self._flush(before.index(depth), emissions)
        runner.drop_to(depth)
        return Shrunk(emissions=emissions, excess_tokens=self._changed(runner, before))

    def blockers(self, depth: int) -> list[str]:
        """Sequences that a drop to `depth` would break a promise to, or that are on their way out.

        Strict ones which may have to go deeper, and those at rest, whose new owner was told what
        they hold.
        """
        here = [r.state for r in self._places.running.values()]
        paused = [p.state for p in self._preemption.paused.values()]
        strict = [s.sequence_id for s in here + paused if _needs_more_than(depth, s.exits)]
        return strict + [i for i in self._departures.at_rest if i not in strict]

    @property
    def needs_deeper(self) -> list[SequenceState]:
        """Strict sequences whose token no layer that is loaded makes sure enough, oldest first."""
        return [running.state for running in self._places.parked[-1].values()]

    @property
    def has_work(self) -> bool:
        """Whether somebody waits for what it owes to be paid."""
        places = self._places
        return bool(places.num_limited) and any(r.wants for r in places.running.values())

    def repay(self) -> None:
        """Pay a piece of what one sequence owes; who is parked for it comes first."""
        runner, places = self._runner, self._places
        if runner is None or not places.num_limited:
            return
        wanting = [r for r in places.running.values() if r.wants]
        if not wanting:
            return
        running = min(wanting, key=lambda r: places.parked[r.last_segment].get(r.row) is not r)
        before = runner.depth_of(running.row)
        left = runner.repay(running.row, self._repay_tokens)
        self.num_repayments += 1
        if left == 0 and runner.depth_of(running.row) > before:
            self._settle(running)
        elif left == 0:
            raise InvariantViolation(f"row {running.row} owes nothing and may not go deeper")

    def reserved(self, sequence_id: str) -> None:
        """A row was promised: what comes into it comes at the depth there is now."""
        self._came_with.pop(sequence_id, None)

    def came_with(self, sequence_id: str, depth: int | None) -> int:
        """Layers of a reserved sequence's KV that are here; asked once.

        Args:
            depth: Layers that were sent, where those are fewer than are loaded.
        """
        loaded = self._gate.depth
        return min(depth or loaded, self._came_with.pop(sequence_id, loaded))

    def check_arrival(self, sequence_id: str, resume: ResumePoint, came_with: int) -> None:
        """Raises: MigrationFailed: KV that was sent is not here any more, and should be."""
        sent = max((extent.stop_layer for extent in resume.extents), default=0)
        if came_with < min(sent, self._gate.depth):
            raise MigrationFailed(
                f"{sequence_id}: layers behind {came_with} were let go while it came",
                code="depth_changed",
            )

    @property
    def full_depth(self) -> int:
        """Layers of the whole model."""
        return self._resizable().full_depth

    def limit(self, row: int, exits: ExitParams) -> tuple[int, bool]:
        """The segment behind which a row leaves for now, and whether that is for what it owes."""
        own = self._gate.last_segment(exits)
        if self._runner is None:
            return own, False
        ends = self._runner.segment_ends
        depth = self._runner.depth_of(row)
        return (ends.index(depth), True) if depth < ends[own] else (own, False)

    def attached(self, row: int, depth: int) -> None:
        """A sequence came into a row with KV of `depth` layers.

        Raises: InvariantViolation: The runner cannot do with less than it has.
        """
        if depth >= self._gate.depth:
            return
        if self._runner is None:
            raise InvariantViolation(
                f"KV of {depth} layers came for row {row}; {self._gate.depth} are needed"
            )
        self._runner.set_depth_of(row, depth)

    def _resizable(self) -> ResizableRunner:
        if self._runner is None:
            raise ConfigError(
                "depth: this engine runs its model as it is; only the native engine changes its "
                "depth while it serves",
                param="depth",
            )
        return self._runner

    def _flush(self, exit_index: int, emissions: Emissions) -> None:
        """Run everybody who waits at this exit or behind it to the end."""
        places = self._places
        waiting = places.waiting
        for parked in [r for place in places.parked[exit_index:-1] for r in place.values()]:
            self._repay_all(parked)
        for at in range(exit_index, len(waiting)):  # who stops on the way waits further down
            if waiting[at]:
                self._run(Range(at + 1, len(waiting) + 1, tests=False), emissions)

    def _changed(self, runner: ResizableRunner, before: tuple[int, ...]) -> int:
        self.num_changes += 1
        self._departures.num_depths += 1
        shallower = min(before[-1], runner.num_layers)
        known = self._came_with
        running = self._places.rows.keys() | self._departures.at_rest.keys()
        self._came_with = {
            sequence_id: min(shallower, known.get(sequence_id, shallower))
            for sequence_id in self._slots.holders
            if sequence_id not in running
        }
        self._follow(before)
        places, old_last = self._places, len(before) - 1
        places.resize(len(runner.segment_ends))
        last = len(runner.segment_ends) - 1
        for paused in self._preemption.paused.values():
            # Its token is run again: the layers it has done with are gone.
            if paused.waited_at is not None and paused.waited_at > last:
                paused.waited_at = None
        for here in list(places.running.values()):
            self._relimit(here)
        if last > old_last:
            for parked in list(places.parked[old_last].values()):
                self._go_on(parked, old_last)
        return self._slots.resize(runner.kv_capacity_tokens)

    def settle_in(self, running: RunningRow) -> None:
        """Say how deep a sequence may go for now, and where it waits, before it takes its place.

        It may come from another depth: back from host memory, from rest, or from another replica.
        """
        running.last_segment, running.owes = self.limit(running.row, running.state.exits)
        places = self._places
        exit_index = places.exit_of(running.place)
        if exit_index is None:
            return
        if exit_index == len(places.waiting):  # the end here: a token that may leave is run again
            running.place = places.parked[-1] if running.is_strict else places.front
        elif running.owes and exit_index >= running.last_segment:
            running.place, running.wants = places.parked[exit_index], True
        else:
            running.place = places.waiting[exit_index]

    def _relimit(self, running: RunningRow) -> None:
        last_segment, running.owes = self.limit(running.row, running.state.exits)
        running.wants = running.wants and running.owes
        self._places.limit(running, last_segment)

    def _repay_all(self, running: RunningRow) -> None:
        runner = self._resizable()
        while runner.repay(running.row, self._repay_tokens):
            self.num_repayments += 1
        self.num_repayments += 1
        self._settle(running)

    def _settle(self, running: RunningRow) -> None:
        """What the sequence owed is paid."""
        exit_index = running.last_segment
        self._relimit(running)
        if self._places.parked[exit_index].get(running.row) is running:
            self._go_on(running, exit_index)

    def _go_on(self, running: RunningRow, exit_index: int) -> None:
        """There are layers for a token that was parked: run them, or first pay what is owed."""
        if running.owes and running.last_segment == exit_index:
            running.wants = True
        elif exit_index < len(self._places.waiting):
            self._places.move(running, self._places.waiting[exit_index], self._clock.now_s())


def _needs_more_than(depth: int, exits: ExitParams) -> bool:
    return exits.policy == "strict" and not 0 < exits.max_depth <= depth
