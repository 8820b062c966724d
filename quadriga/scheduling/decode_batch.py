"""The sequences of a decode replica in one table, and the rules that hold when a status changes.

    transferring ──▶ running ⇄ at an exit ──▶ finished
                        ⇅           ⇅
                 paused, or moving to another replica

Nothing is copied when a token waits at an exit: hidden state and KV stay in the sequence's row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from quadriga.checkpoint.exits import Criterion, ExitCounters, ExitParams
from quadriga.clock import Clock
from quadriga.core.kv import ResumePoint
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import InvariantViolation, MigrationFailed
from quadriga.interfaces import DraftingRunner, ModelRunner, ResizableRunner
from quadriga.policies.drafting import Drafter
from quadriga.policies.rebatching import Rebatcher, Waiting
from quadriga.scheduling.sequence import NO_ROW, RunningSequence, SequenceStatus
from quadriga.scheduling.slots import SlotTable

RUNNING, AT_EXIT = SequenceStatus.RUNNING, SequenceStatus.AT_EXIT
PAUSED, MOVING = SequenceStatus.PAUSED, SequenceStatus.MOVING
TRANSFERRING, FINISHED = SequenceStatus.TRANSFERRING, SequenceStatus.FINISHED


class DecodeBatch:
    """The table of a decode replica's sequences.

    A sequence is *decoding* while it is running or at an exit. Whenever it begins to decode or
    ceases to, it goes to the end of the table; so those of one status are in the order in which
    they came to it.

    Args:
        rebatcher: Which group runs next and which tokens leave.
        criterion: How a confidence is compared with its threshold.
        is_partial: The model has layers beyond those loaded, so that tokens which leave the deepest
            one below their threshold are breaches. Those of strict sequences do not leave there,
            and wait until layers are loaded or the sequence is taken away.

    Attributes:
        sequences: The table, by sequence id.
        ends: Layers run at each exit, ascending; the last is the depth that is loaded.
        resizable: The runner, where its depth can change.
        drafting: The runner, where it can draft tokens.
        drafter: Whether it does.
        first_deadline_unix_s: No sequence here expires before.
        num_decoding, num_paused: Sequences with these statuses.
        num_parked, num_limited, num_drafting, num_budgeted: Decoding sequences that no pass can
            run; that leave before the last exit; that may draft; that have a quality budget.
        num_depth_changes: Changes of the depth that is loaded, since the start.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        slots: SlotTable,
        clock: Clock,
        eos_token_ids: tuple[int, ...],
        rebatcher: Rebatcher,
        counters: ExitCounters,
        criterion: Criterion,
        is_partial: bool,
    ) -> None:
        self.sequences: dict[str, RunningSequence] = {}
        self.runner = runner
        self.resizable = runner if isinstance(runner, ResizableRunner) else None
        self.drafting = runner if isinstance(runner, DraftingRunner) else None
        self.drafter = Drafter(rebatcher.costs)
        self.slots = slots
        self.clock = clock
        self.rebatcher = rebatcher
        self.counters = counters
        self.is_partial = is_partial
        self.ends = tuple(runner.segment_ends)
        self.first_deadline_unix_s = math.inf
        self.num_decoding = self.num_paused = self.num_parked = self.num_limited = 0
        self.num_drafting = self.num_budgeted = 0
        self.num_depth_changes = 0
        self._eos_token_ids = eos_token_ids
        self._criterion = criterion

    def find(self, sequence_id: str, *statuses: SequenceStatus) -> RunningSequence | None:
        """The sequence, where it has one of these statuses."""
        sequence = self.sequences.get(sequence_id)
        return sequence if sequence is not None and sequence.status in statuses else None

    def having(self, status: SequenceStatus) -> list[RunningSequence]:
        """Sequences with a status, in the order in which they came to it."""
        return [s for s in self.sequences.values() if s.status is status]

    @property
    def decoding(self) -> list[RunningSequence]:
        """Sequences that are running or at an exit, in order of joining."""
        sequences = self.sequences.values()
        return [s for s in sequences if s.status is RUNNING or s.status is AT_EXIT]

    def groups(self) -> list[list[RunningSequence]]:
        """Per segment, the sequences whose token it may run next."""
        sequences = self.sequences.values()
        if len(self.ends) == 1:
            return [[s for s in sequences if s.status is RUNNING]]
        groups: list[list[RunningSequence]] = [[] for _ in self.ends]
        front = groups[0]
        for sequence in sequences:
            if sequence.status is RUNNING:
                front.append(sequence)
            elif sequence.status is AT_EXIT and not sequence.is_parked:
                groups[sequence.next_segment].append(sequence)
        return groups

    def expect(self, sequence_id: str, row: int, num_tokens: int) -> None:
        """Enter a sequence that is on its way here; its KV comes at the depth there is now."""
        # Its prompt and parameters come with the commit.
        state = SequenceState(
            sequence_id,
            sequence_id,
            "",
            [],
            SamplingParams(max_tokens=0),
            "",
            0.0,
            deadline_unix_s=math.inf,
        )
        self.sequences[sequence_id] = RunningSequence(
            state,
            TRANSFERRING,
            row,
            since_s=self.clock.now_s(),
            num_tokens=num_tokens,
            kv_depth=self.ends[-1],
        )

    def attach(self, sequence: RunningSequence, resume: ResumePoint | None, depth: int) -> None:
        """Give the runner a sequence whose row is filled with KV of `depth` layers.

        Raises:
            InvariantViolation: The runner cannot do with less than it has.
            MigrationFailed: Layers of its KV were let go while it came.
        """
        row, loaded = sequence.row, self.ends[-1]
        if resume is not None:
            sent = max((extent.stop_layer for extent in resume.extents), default=0)
            if depth < min(sent, loaded):
                raise MigrationFailed(
                    f"{sequence.state.sequence_id}: layers behind {depth} were let go while it "
                    "came",
                    code="depth_changed",
                )
            at = resume.waited_at
            # A token that waited beyond what is loaded here is run again.
            sequence.next_segment = 0 if at is None or at >= len(self.ends) else at + 1
            self.runner.resume(row, sequence.state, resume.rest, depth)
            return
        self.runner.attach(row, sequence.state)
        self.set_depth_of(row, depth)

    def set_depth_of(self, row: int, depth: int) -> None:
        """Note that an attached row has KV of `depth` layers. Raises: InvariantViolation."""
        if depth >= self.ends[-1]:
            return
        if self.resizable is None:
            raise InvariantViolation(
                f"KV of {depth} layers came for row {row}; {self.ends[-1]} are needed"
            )
        self.resizable.set_depth_of(row, depth)

    def enter(self, sequence: RunningSequence) -> None:
        """Let a sequence decode whose row is filled and known to the runner.

        It may come from another depth: back from host memory, or from another replica.
        """
        state, now_s = sequence.state, self.clock.now_s()
        exits = state.exits
        sequence.set_end(
            eos_token_ids=self._eos_token_ids, row_capacity_tokens=self.runner.row_capacity_tokens
        )
        sequence.threshold = exits.threshold
        sequence.min_confidence = sequence.leaves_from = self._min_confidence(exits)
        sequence.is_strict = exits.is_strict
        sequence.is_surveyed, sequence.sure_after = False, 0
        sequence.num_tokens = state.num_tokens
        sequence.gap_s = exits.sla_tbt_s
        sequence.since_s = now_s
        sequence.stays_until = 0
        sequence.last_segment, sequence.lacks_layers = self._limit_of(sequence)
        sequence.drafts = self._may_draft(sequence)
        sequence.needs_layers = sequence.is_parked = False
        if sequence.next_segment == len(self.ends):
            # The end here: a token that may leave is run again.
            sequence.is_parked = sequence.is_strict
            sequence.next_segment = sequence.next_segment if sequence.is_strict else 0
        elif sequence.lacks_layers and sequence.next_segment > sequence.last_segment:
            sequence.is_parked = sequence.needs_layers = True
        sequence.status = AT_EXIT if sequence.next_segment else RUNNING
        self.note_room(sequence)
        self._to_end(sequence)
        self.num_decoding += 1
        self.num_parked += sequence.is_parked
        self.num_limited += sequence.last_segment < len(self.ends) - 1
        self.num_drafting += sequence.drafts
        self.num_budgeted += exits.quality_budget > 0.0
        self.first_deadline_unix_s = min(self.first_deadline_unix_s, state.deadline_unix_s)
        gap_s = sequence.gap_s or self.rebatcher.target_gap_s(self.num_decoding)
        sequence.deadline_s = now_s + gap_s

    def wait(
        self, sequence: RunningSequence, next_segment: int, now_s: float, *, is_parked: bool = False
    ) -> None:
        """Let a sequence's token wait at the exit before a segment, not 0."""
        self.num_parked += is_parked - sequence.is_parked
        sequence.status = AT_EXIT
        sequence.next_segment = next_segment
        sequence.is_parked = is_parked
        sequence.since_s = now_s

    def lift(self, sequence: RunningSequence, status: SequenceStatus) -> None:
        """Take a decoding sequence out of the batch; it keeps its slot and row, and no draft."""
        if sequence.drafts:
            self.num_drafting -= 1
            self.drop_drafts([sequence])
        self.num_decoding -= 1
        self.num_parked -= sequence.is_parked
        self.num_limited -= sequence.last_segment < len(self.ends) - 1
        self.num_budgeted -= sequence.state.exits.quality_budget > 0.0
        sequence.since_s = self.clock.now_s()
        sequence.room_tokens = math.inf
        self.change(sequence, status)

    def free_row(self, sequence: RunningSequence) -> None:
        """Give a sequence's slot back. Raises: InvariantViolation: It does not hold its row."""
        row, sequence.row = sequence.row, NO_ROW
        slot = self.slots.release(sequence.state.sequence_id)
        if slot is None or slot.row != row:
            sequence_id = sequence.state.sequence_id
            raise InvariantViolation(f"{sequence_id} was in row {row} but holds {slot}")

    def remove(self, sequence: RunningSequence) -> None:
        """Let go of a sequence and of all it holds, whatever its status is."""
        row = sequence.row
        if sequence.status is RUNNING or sequence.status is AT_EXIT:
            self.lift(sequence, FINISHED)
        self.num_paused -= sequence.status is PAUSED
        sequence.status = FINISHED
        sequence.suspended = None
        del self.sequences[sequence.state.sequence_id]
        if row != NO_ROW:
            self.free_row(sequence)
            self.runner.detach(row)

    def note_room(self, sequence: RunningSequence) -> None:
        """Note with a decoding sequence what it is promised."""
        slot = self.slots.get(sequence.state.sequence_id)
        if slot is not None and self.slots.reservation == "used":
            sequence.room_tokens = slot.reserved_tokens

    def relimit(self, sequence: RunningSequence) -> None:
        """Find out anew behind which segment a decoding sequence leaves."""
        last = len(self.ends) - 1
        self.num_limited -= sequence.last_segment < last
        sequence.last_segment, sequence.lacks_layers = self._limit_of(sequence)
        self.num_limited += sequence.last_segment < last
        self.num_drafting -= sequence.drafts
        self.drop_drafts([sequence])
        sequence.drafts = self._may_draft(sequence)
        self.num_drafting += sequence.drafts
        sequence.needs_layers = sequence.needs_layers and sequence.lacks_layers

    def resize(self, full_depth: int) -> None:
        """Follow the runner's segments; the limits of decoding sequences are not yet theirs.

        Raises: InvariantViolation: A token waits for layers that went.
        """
        before, self.ends = self.ends, tuple(self.runner.segment_ends)
        self.is_partial = self.ends[-1] < full_depth
        self.rebatcher = self.rebatcher.resized(before, self.ends)
        self.drafter = self.drafter.resized(self.rebatcher.costs)
        count = len(self.ends)
        gone = [s.row for s in self.decoding if s.next_segment >= count + s.is_parked]
        if gone:
            raise InvariantViolation(f"rows {sorted(gone)} wait too deep")
        self.num_limited = sum(s.last_segment < count - 1 for s in self.decoding)

    def drop_drafts(self, sequences: Sequence[RunningSequence]) -> None:
        """Let sequences be as if they had drafted nothing."""
        rows = []
        for sequence in sequences:
            sequence.survival = 0.0
            if sequence.draft_marks:
                sequence.draft_marks, sequence.num_drafted = [], 0
                rows.append(sequence.row)
        if rows and self.drafting is not None:
            self.drafting.drop_drafts(rows)

    def _may_draft(self, sequence: RunningSequence) -> bool:
        """Whether the first exit may draft for a sequence: it runs all layers of the model."""
        return (
            self.drafting is not None
            and sequence.state.exits.policy == "lossless"
            and len(self.ends) > 1
            and not self.is_partial
            and sequence.last_segment == len(self.ends) - 1
        )

    def change(self, sequence: RunningSequence, status: SequenceStatus) -> None:
        """Give a sequence that does not decode another status."""
        sequence.status = status
        self._to_end(sequence)

    def _to_end(self, sequence: RunningSequence) -> None:
        self.sequences.pop(sequence.state.sequence_id, None)
        self.sequences[sequence.state.sequence_id] = sequence

    def _min_confidence(self, exits: ExitParams) -> float:
        """The confidence from which a token may leave early: c ≥ this."""
        threshold = exits.threshold
        if threshold >= 1.0:
            return math.inf
        return threshold if self._criterion == "top" else math.nextafter(threshold, math.inf)

    def _limit_of(self, sequence: RunningSequence) -> tuple[int, bool]:
        """The segment behind which a sequence leaves for now, and whether its KV is the reason."""
        max_depth, last = sequence.state.exits.max_depth, len(self.ends) - 1
        if max_depth > 0:  # the deepest segment within its own limit; at least the first
            last = max((i for i, end in enumerate(self.ends) if end <= max_depth), default=0)
        if self.resizable is None:
            return last, False
        depth = self.resizable.depth_of(sequence.row)
        return (self.ends.index(depth), True) if depth < self.ends[last] else (last, False)

    def check(self) -> None:
        """Verify the table against itself and the slots. Raises: InvariantViolation."""
        self.slots.check()
        decoding, last = self.decoding, len(self.ends) - 1
        counted = (
            len(decoding),
            len(self.having(PAUSED)),
            sum(s.is_parked for s in decoding),
            sum(s.last_segment < last for s in decoding),
            sum(s.drafts for s in decoding),
            sum(s.state.exits.quality_budget > 0.0 for s in decoding),
        )
        noted = (
            self.num_decoding,
            self.num_paused,
            self.num_parked,
            self.num_limited,
            self.num_drafting,
            self.num_budgeted,
        )
        if counted != noted:
            raise InvariantViolation(
                f"(decoding, paused, parked, limited, drafting, budgeted) sequences are {counted}, "
                f"noted are {noted}"
            )
        for sequence_id, sequence in self.sequences.items():
            slot = self.slots.get(sequence_id)
            is_decoding = sequence.status in (RUNNING, AT_EXIT)
            needs_row = is_decoding or sequence.status is TRANSFERRING
            is_right = (
                sequence.state.sequence_id == sequence_id
                and sequence.row == (slot.row if slot else NO_ROW)
                and (sequence.row != NO_ROW or not needs_row)
                and (not is_decoding or (sequence.status is AT_EXIT) == (sequence.next_segment > 0))
            )
            if not is_right:
                raise InvariantViolation(
                    f"{sequence_id} is {sequence.status} in row {sequence.row}, holds {slot}, and "
                    f"its token runs segment {sequence.next_segment} next"
                )


def summary(sequences: Iterable[RunningSequence]) -> Waiting:
    """What a rebatching policy sees of sequences that wait at one exit."""
    count, num_tokens, least_s = 0, 0, math.inf
    for sequence in sequences:
        count += 1
        num_tokens += sequence.num_tokens
        if sequence.deadline_s < least_s:
            least_s = sequence.deadline_s
    return Waiting(count, num_tokens, least_s)
