"""A decode batch whose model gains or loses layers between two steps.

Down: tokens that wait for layers that go are run to their end first, with the layers there still
are; so a shrinking replica lets no token out early. Strict sequences need what they may go down to,
and block the change until they have moved or ended.

Up: a token that was parked for want of depth goes on from where it stopped. KV of positions from
before lacks the new layers. Until a sequence needs them it stays at its old depth, and costs
nothing; then its positions are run again, a few of them a step, and after that it may go deep.

    parked at the deepest exit ──layers come──▶ parked there, KV incomplete ──▶ at the exit ──▶ on
                                        └───────────KV complete──────────────────┘

Source: HELIOS, loading more layers or fewer while requests are in flight; how KV is completed, and
which tokens may pass meanwhile, are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.checkpoint.exits import ExitParams
from quadriga.core.output import EngineOutput
from quadriga.core.request import SequenceState
from quadriga.errors import ConfigError, InvariantViolation
from quadriga.interfaces import ResizableRunner
from quadriga.scheduling.decode_batch import MOVING, PAUSED, TRANSFERRING, DecodeBatch
from quadriga.scheduling.sequence import RunningSequence

REPAY_TOKENS = 64
"""Positions run again in a step, at most: about what a step over a full batch takes."""

Emissions = list[tuple[str, EngineOutput]]


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What came of dropping layers.

    Attributes:
        blocked_by: Sequences that need the layers; if there are any, nothing has changed.
        emissions: Tokens of sequences that waited for layers that went.
    """

    blocked_by: list[str] = field(default_factory=list)
    emissions: Emissions = field(default_factory=list)


class DepthChanges:
    """Keeps a decode batch right while its runner's depth changes.

    Attributes:
        num_repayments: Passes in which positions were run again for layers that came later.
    """

    def __init__(self, batch: DecodeBatch) -> None:
        self.num_repayments = 0
        self._batch = batch

    def runner(self) -> ResizableRunner:
        """The runner. Raises: ConfigError: Its depth cannot change."""
        if self._batch.resizable is None:
            raise ConfigError(
                "depth: this engine runs its model as it is; only the native engine changes its "
                "depth while it serves",
                param="depth",
            )
        return self._batch.resizable

    def blockers(self, depth: int) -> list[str]:
        """Sequences that a drop to `depth` would break a promise to, or that are moving away.

        The former are strict ones which may have to go deeper; of the latter the new owner knows
        the layers that they had.
        """
        here = self._batch.decoding + self._batch.having(PAUSED)
        strict = [s.state.sequence_id for s in here if _needs_more_than(depth, s.state.exits)]
        return strict + [s.state.sequence_id for s in self._batch.having(MOVING)]

    @property
    def needs_deeper(self) -> list[SequenceState]:
        """Strict sequences whose token no loaded layer is confident enough of, oldest first."""
        batch = self._batch
        parked = [s for s in batch.decoding if s.is_parked and s.next_segment == len(batch.ends)]
        return [s.state for s in sorted(parked, key=lambda s: s.since_s)]

    @property
    def has_work(self) -> bool:
        """Whether a sequence needs its KV to be completed."""
        return any(s.needs_layers for s in self._batch.decoding)

    def repay(self) -> None:
        """Complete a piece of one sequence's KV; one that is parked for it comes first."""
        batch, runner = self._batch, self._batch.resizable
        waiting = [s for s in batch.decoding if s.needs_layers]
        if runner is None or not waiting:
            return
        sequence = min(waiting, key=lambda s: not _waits_for_kv(s))
        before = runner.depth_of(sequence.row)
        left = runner.repay(sequence.row, REPAY_TOKENS)
        self.num_repayments += 1
        if left == 0 and runner.depth_of(sequence.row) > before:
            self._settle(sequence)
        elif left == 0:
            raise InvariantViolation(f"row {sequence.row} owes nothing and may not go deeper")

    def repay_parked(self, exit_index: int) -> None:
        """Complete the KV of all that are parked for it at an exit, or behind it."""
        batch, runner = self._batch, self.runner()
        for sequence in batch.decoding:
            if sequence.is_parked and exit_index < sequence.next_segment < len(batch.ends):
                while runner.repay(sequence.row, REPAY_TOKENS):
                    self.num_repayments += 1
                self.num_repayments += 1
                self._settle(sequence)

    def changed(self) -> None:
        """Follow a change of the runner's depth."""
        batch, runner = self._batch, self.runner()
        before = batch.ends
        batch.num_depth_changes += 1
        for sequence in batch.sequences.values():
            sequence.num_full = 0  # layers that come later are filled in otherwise
        shallower = min(before[-1], runner.num_layers)
        for coming in batch.having(TRANSFERRING):
            coming.kv_depth = min(shallower, coming.kv_depth)
        batch.resize(runner.full_depth)
        for paused in batch.having(PAUSED):
            if paused.next_segment > len(batch.ends):
                paused.next_segment = 0  # its token is run again: layers it has done with are gone
        for sequence in batch.decoding:
            batch.relimit(sequence)
        if len(batch.ends) > len(before):
            for sequence in batch.decoding:
                if sequence.is_parked and sequence.next_segment == len(before):
                    self._go_on(sequence)
        batch.slots.resize(runner.kv_capacity_tokens)

    def _settle(self, sequence: RunningSequence) -> None:
        """The KV of a sequence is complete as far as it was to be."""
        was_parked = _waits_for_kv(sequence)
        self._batch.relimit(sequence)
        if was_parked:
            self._go_on(sequence)

    def _go_on(self, sequence: RunningSequence) -> None:
        """There are layers for a token that was parked: run them, or first complete the KV."""
        batch = self._batch
        if sequence.lacks_layers and sequence.last_segment == sequence.next_segment - 1:
            sequence.needs_layers = True
        elif sequence.next_segment < len(batch.ends):
            batch.wait(sequence, sequence.next_segment, batch.clock.now_s())


def _waits_for_kv(sequence: RunningSequence) -> bool:
    return sequence.is_parked and sequence.next_segment == sequence.last_segment + 1


def _needs_more_than(depth: int, exits: ExitParams) -> bool:
    return exits.is_strict and not 0 < exits.max_depth <= depth
