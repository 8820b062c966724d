"""The decode replica's step: one range of layers for one group of sequences.

A sequence passes through: reserved (its row is being filled by a transfer) → front (ready for its
next token) ⇄ waiting at an exit (its token did not leave there and its next layers have not begun)
→ gone. Only where memory fills, a sequence is paused: its row moves to host memory and comes back
later, wherever it was. One that moves to another replica is at rest for a moment in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from quadriga.checkpoint.exits import Criterion, ExitCounters, ExitUse
from quadriga.clock import Clock
from quadriga.core.forecast import LengthPrediction
from quadriga.core.kv import ResumePoint
from quadriga.core.output import EngineOutput
from quadriga.core.request import SampledToken, SequenceState
from quadriga.errors import DeadlineExceeded, InvariantViolation
from quadriga.interfaces import ModelRunner
from quadriga.policies.baselines.exits import NoExits
from quadriga.policies.drex.costs import SegmentCosts
from quadriga.policies.rebatching import Range, Rebatcher, Waiting
from quadriga.policies.slot_reservation import AnswerLengths
from quadriga.scheduling.batch_state import BatchState, Place, RunningRow, summary
from quadriga.scheduling.depth import DepthChanges
from quadriga.scheduling.exit_gate import ExitGate
from quadriga.scheduling.meters import Ewma, RateMeter, StepMeter
from quadriga.scheduling.preemption import Preemption
from quadriga.scheduling.sequence import FinishRule
from quadriga.scheduling.sequence_export import SequenceExport
from quadriga.scheduling.slots import Slot, SlotTable

RATE_WINDOW_S = 10.0

Emissions = list[tuple[str, EngineOutput]]


class DecodeLoop:
    """Continuous batch over KV rows, left by each token at an exit of its own.

    A sequence joins between two steps, at no cost to the others, and leaves the moment it is
    finished, cancelled, late, or taken away.

    Args:
        rebatcher: Which group runs next and who leaves; None runs every token to the end.
        criterion: How a confidence is compared with its threshold.
        is_partial: The model has layers beyond those loaded, so that tokens which leave the deepest
            one below their threshold are breaches.
        parks_strict: Those of strict sequences do not leave there, and wait until layers are loaded
            or the sequence is taken away; `depth.needs_deeper` names them.

    Attributes:
        answers: Lengths of those that ended here; newcomers are promised memory by them.
        depth: Changes of the depth that is loaded.
        meter: What its steps cost.

    Not thread-safe: one thread calls everything. (KV may be written from other threads into rows
    that are reserved and not yet running.)
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        slots: SlotTable,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
        rebatcher: Rebatcher | None = None,
        counters: ExitCounters | None = None,
        criterion: Criterion = "top",
        is_partial: bool = False,
        parks_strict: bool = False,
    ) -> None:
        self.slots = slots
        self.counters = counters or ExitCounters()
        self.answers = AnswerLengths()
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._num_segments = len(runner.segment_ends)
        self._rebatcher = rebatcher or NoExits(SegmentCosts(self._num_segments, slots.num_rows))
        self._is_partial = is_partial
        self._places = BatchState(self._num_segments, slots)
        self._gate = ExitGate(
            ends=runner.segment_ends,
            places=self._places,
            rebatcher=self._rebatcher,
            counters=self.counters,
            criterion=criterion,
            is_partial=is_partial,
            parks_strict=parks_strict,
        )
        self._preemption = Preemption(
            runner=runner, slots=slots, places=self._places, clock=clock, enter=self._enter
        )
        self.departures = SequenceExport(
            runner=runner,
            slots=slots,
            places=self._places,
            preemption=self._preemption,
            enter=self._enter,
        )
        self.depth = DepthChanges(
            runner=runner,
            slots=slots,
            places=self._places,
            gate=self._gate,
            preemption=self._preemption,
            departures=self.departures,
            clock=clock,
            run=self._run_range,
            follow=self._follow_depth,
        )
        self._first_deadline_unix_s = math.inf  # of all who are here; may be of one who is gone
        self.meter = StepMeter()
        self._rate = RateMeter(window_s=RATE_WINDOW_S, now_s=clock.now_s())
        self._token_time = Ewma(0.1)

    def reserve(
        self,
        sequence_id: str,
        max_total_tokens: int,
        num_tokens: int | None = None,
        priority: int = 0,
        prediction: LengthPrediction | None = None,
    ) -> Slot:
        """Promise a row to a sequence on its way; the less important may be paused for it.

        Args:
            num_tokens: What it has now.
            prediction: Of its tokens still to come, where that is known.

        Raises:
            KVCacheExhausted: No room now; paused sequences come before new ones.
            ContextTooLong: It can never fit.
        """
        upper_tokens = self.answers.upper_tokens
        self._preemption.make_room(
            max_total_tokens,
            num_tokens,
            priority,
            upper_tokens=upper_tokens,
            prediction=prediction,
        )
        slot = self.slots.reserve(
            sequence_id,
            max_total_tokens,
            num_tokens,
            upper_tokens=upper_tokens,
            prediction=prediction,
        )
        self.depth.reserved(sequence_id)
        return slot

    def join(
        self,
        state: SequenceState,
        resume: ResumePoint | None = None,
        depth: int | None = None,
        *,
        is_attached: bool = False,
    ) -> None:
        """Let a sequence, whose row is reserved and filled, take part from the next step on.

        Args:
            resume: Where it stood, for one that was decoding elsewhere.
            depth: Layers of its KV, where it was prefilled shallower than this replica is.
            is_attached: Its prompt was computed in this row, by this runner.

        Raises:
            InvariantViolation: It has no reservation, or nothing to continue from.
            MigrationFailed: Layers of its KV were let go while it came.
        """
        slot = self.slots.get(state.sequence_id)
        if slot is None or self._holds(state.sequence_id):
            raise InvariantViolation(f"sequence {state.sequence_id} cannot join: no free slot")
        if not state.output_ids:
            raise InvariantViolation(f"sequence {state.sequence_id} joins without a first token")
        came_with = self.depth.came_with(state.sequence_id, depth)
        if resume is None:
            if not is_attached:
                self._runner.attach(slot.row, state)
            self.depth.attached(slot.row, came_with)
            self._enter(slot.row, state, self._places.front)
            return
        self.depth.check_arrival(state.sequence_id, resume, came_with)
        at = resume.waited_at
        if at is not None and at > len(self._places.waiting):
            at = None  # beyond what is loaded here: the token is run again
        place = self._places.at(at)
        self._runner.resume(slot.row, state, resume.rest, came_with)
        self._enter(slot.row, state, place)

    def _holds(self, sequence_id: str) -> bool:
        return sequence_id in self._places.rows or sequence_id in self.departures.at_rest

    def _enter(self, row: int, state: SequenceState, place: Place) -> None:
        now_s = self._clock.now_s()
        running = RunningRow(
            row=row,
            state=state,
            place=place,
            finish=FinishRule.of(
                state,
                eos_token_ids=self._eos_token_ids,
                row_capacity_tokens=self._runner.row_capacity_tokens,
            ),
            threshold=state.exits.threshold,
            bar=self._gate.bar(state.exits),
            last_segment=0,
            gap_s=state.exits.sla_tbt_s,
            num_tokens=state.num_tokens,
            since_s=now_s,
            is_strict=state.exits.policy == "strict",
        )
        self.depth.settle_in(running)
        self._preemption.note_room(running)
        self._places.add(running)
        self._first_deadline_unix_s = min(self._first_deadline_unix_s, state.deadline_unix_s)
        gap_s = running.gap_s or self._rebatcher.target_gap_s(self.num_running)
        running.deadline_s = now_s + gap_s

    def leave(self, sequence_id: str) -> SequenceState | None:
        """Take a sequence out and free its slot, reserved, running or at rest.

        A token that waits at an exit is dropped; whoever goes on with the sequence computes it
        again.

        Returns:
            Its state when it was running, else None.
        """
        resting = self.departures.release(sequence_id)
        if resting is not None:
            return resting
        paused = self._preemption.paused.pop(sequence_id, None)
        if paused is not None:
            self.answers.ended(len(paused.state.output_ids))
            return paused.state
        row = self._places.rows.get(sequence_id)
        if row is None:
            reserved = self.slots.release(sequence_id)
            if reserved is not None:
                self._runner.detach(reserved.row)  # some of its KV may have come
            return None
        running = self._places.remove(row)
        self._runner.detach(row)
        self.answers.ended(len(running.state.output_ids))
        return running.state

    def pause(self, sequence_id: str) -> bool:
        """Move a running sequence to host memory; it comes back by itself. False if not running."""
        return self._preemption.pause(sequence_id)

    def step(self) -> Emissions:
        """Schedule → run → judge → commit. Returns (ingress id, emission) pairs."""
        self.meter.begin(self._clock.now_s())
        emissions = self._expire()
        self._preemption.balance()
        self.depth.repay()
        if self._places.num_runnable:
            self._run(*self._schedule(self._clock.now_s()), emissions)
        if not self.has_work:
            self.meter.rest(self._clock.now_s())
        return emissions

    def _run(self, ran: Range, group: list[RunningRow], emissions: Emissions) -> None:
        """Run → judge → commit."""
        clock, runner = self._clock, self._runner
        num_tokens = sum([r.num_tokens for r in group])
        self.meter.ran(len(group), num_tokens)
        rows = [r.row for r in group]
        started_s, filled = clock.now_s(), runner.num_filled
        if ran.first == 0 and ran.stop == self._num_segments and not self._is_partial:
            tokens = runner.decode(rows)
            leavers, passed, judged_s = group, None, 0.0
        else:
            confidences = runner.advance(rows, ran.first, ran.stop)
            before_s = clock.now_s()
            leavers, passed = self._gate.judge(ran, group, confidences, num_tokens, before_s)
            judged_s = clock.now_s() - before_s
            tokens = runner.emit([r.row for r in leavers]) if leavers else []
        now_s = clock.now_s()
        seconds = now_s - started_s - judged_s  # the runner's own
        filled = runner.num_filled - filled
        self._rebatcher.observe(ran, len(group), num_tokens, seconds, passed, filled)
        if leavers:
            self._commit(leavers, tokens, now_s, emissions)
        self._token_time.add((now_s - started_s) / max(1, len(leavers)) * self.num_running)
        self._rate.add(len(leavers), now_s=now_s)

    def _run_range(self, ran: Range, emissions: Emissions) -> None:
        """Run a range that is nobody's choice, as far as its rows may go."""
        self._run(*self._group_of(ran, self._clock.now_s()), emissions)

    def _follow_depth(self, before: tuple[int, ...]) -> None:
        """The runner's segments are others now."""
        ends = self._runner.segment_ends
        self._num_segments = len(ends)
        self._is_partial = ends[-1] < self.depth.full_depth
        self._rebatcher = self._rebatcher.resized(before, ends)
        self._gate.follow(ends, self._rebatcher, is_partial=self._is_partial)

    def _schedule(self, now_s: float) -> tuple[Range, list[RunningRow]]:
        """Choose the next range, and the group that runs it."""
        places = self._places
        front = Waiting(len(places.front), sum([r.num_tokens for r in places.front.values()]))
        waiting = [summary(place.values()) for place in places.waiting]
        return self._group_of(self._rebatcher.choose(front, waiting, now_s), now_s)

    def _group_of(self, ran: Range, now_s: float) -> tuple[Range, list[RunningRow]]:
        """The group that waits before a range, and the range as far as all of it may go."""
        places = self._places
        group = list(places.before(ran.first).values())
        if not group:
            raise InvariantViolation(f"nobody waits before segment {ran.first}")
        if ran.first:
            self.counters.flushes += 1
            self.counters.buffer_age_s += sum([now_s - r.since_s for r in group])
        if places.num_limited:
            stop = min(ran.stop, 1 + min(r.last_segment for r in group))
            if stop < ran.stop:
                ran = Range(ran.first, stop)
        return ran, group

    def _commit(
        self,
        leavers: list[RunningRow],
        tokens: list[SampledToken],
        now_s: float,
        emissions: Emissions,
    ) -> None:
        """Append the tokens, send their sequences back to the front, and finish those that end."""
        places = self._places
        front = places.front
        gap_s = self._rebatcher.target_gap_s(self.num_running)
        depth = tokens[0].exit_layer  # they all left at one exit
        self.counters.tokens[depth] = self.counters.tokens.get(depth, 0) + len(tokens)
        for running, token in zip(leavers, tokens, strict=True):
            state, token_id = running.state, token.token_id
            output_ids = state.output_ids
            output_ids.append(token_id)
            state.exit_layers.append(depth)
            running.num_tokens += 1
            finish = running.finish.reason(output_ids)
            emission = EngineOutput(
                state.sequence_id,
                state.epoch,
                len(output_ids) - 1,
                [token_id],
                [depth],
                None if token.logprob is None else [token.logprob],
                None,
                finish,
            )
            emissions.append((state.ingress_id, emission))
            if finish is not None:
                self.leave(state.sequence_id)
                continue
            if running.place is not front:
                places.move(running, front, now_s)
            running.deadline_s = now_s + (running.gap_s or gap_s)

    def _expire(self) -> Emissions:
        now_unix_s = self._clock.unix_s()
        if now_unix_s < self._first_deadline_unix_s:
            return []
        states = self._expiring
        late = [s for s in states if s.deadline_unix_s <= now_unix_s]
        self._first_deadline_unix_s = min(
            (s.deadline_unix_s for s in states if s.deadline_unix_s > now_unix_s), default=math.inf
        )
        emissions = []
        for state in late:
            self.leave(state.sequence_id)
            error = DeadlineExceeded(
                f"the deadline passed after {len(state.output_ids)} tokens", param="deadline_ms"
            )
            emission = EngineOutput(
                state.sequence_id, state.epoch, len(state.output_ids), error=error
            )
            emissions.append((state.ingress_id, emission))
        return emissions

    def check(self) -> None:
        """Verify the places against each other and the slots. Raises: InvariantViolation."""
        self._places.check()

    @property
    def has_work(self) -> bool:
        places = self._places
        if places.num_runnable or self.depth.has_work:
            return True
        # Where others on their way have the room, who is paused can only wait for them.
        return not places.running and self._preemption.may_return

    @property
    def running(self) -> list[SequenceState]:
        """States of the running sequences, in order of joining, of the paused, of those at rest."""
        return self._expiring + [r.state for r in self.departures.at_rest.values()]

    @property
    def _expiring(self) -> list[SequenceState]:
        paused = [p.state for p in self._preemption.paused.values()]
        return [r.state for r in self._places.running.values()] + paused

    @property
    def rows(self) -> list[int]:
        """Rows of the running sequences, in order of joining."""
        return list(self._places.running)

    def rows_waiting_at(self, exit_index: int) -> list[int]:
        """Rows whose token waits at a non-final exit."""
        return list(self._places.waiting[exit_index])

    @property
    def num_pauses(self) -> int:
        """Sequences moved to host memory since the start."""
        return self._preemption.num_pauses

    @property
    def num_resumes(self) -> int:
        """Sequences moved back since the start."""
        return self._preemption.num_resumes

    def is_paused(self, sequence_id: str) -> bool:
        """Whether a sequence is in host memory."""
        return sequence_id in self._preemption.paused

    @property
    def num_paused(self) -> int:
        return len(self._preemption.paused)

    @property
    def paused_tokens(self) -> int:
        """Tokens whose KV is in host memory."""
        return sum(p.state.num_tokens for p in self._preemption.paused.values())

    @property
    def least_priority(self) -> int | None:
        """Of the running sequences, where one may be paused for a more important newcomer."""
        return self._preemption.least_priority

    @property
    def num_running(self) -> int:
        return len(self._places.running)

    @property
    def num_waiting_at_exits(self) -> list[int]:
        """Per exit but the last, sequences whose token waits there."""
        return [len(place) for place in self._places.waiting]

    def exit_uses(self, layers: Iterable[int]) -> dict[int, ExitUse]:
        """Whether tokens may leave at each of a model's exits now, and if not, why."""
        return {layer: self._exit_use(layer) for layer in layers}

    def _exit_use(self, layer: int) -> ExitUse:
        ends = self._runner.segment_ends
        if layer >= ends[-1]:
            return "not_loaded"
        if layer not in ends:
            return "off"
        running = self._places.running.values()
        if not running:
            return "idle"
        if all(r.bar == math.inf for r in running):
            return "full_depth_asked"
        return "tested" if self._rebatcher.tests(ends.index(layer)) else "not_worth_it"

    @property
    def num_reserved(self) -> int:
        """Sequences on their way here: a row is promised, nothing runs yet."""
        return self.slots.num_held - self.num_running

    @property
    def used_tokens(self) -> int:
        """Tokens whose KV is held by running sequences."""
        return sum(r.num_tokens for r in self._places.running.values())

    @property
    def prompt_tokens(self) -> int:
        """Of all that is held; of who is on its way here, the tokens it comes with."""
        states = self.running
        here = {state.sequence_id for state in states}
        coming = self.slots.came_with(except_for=here)
        return sum(len(state.prompt_ids) for state in states) + coming

    @property
    def tokens_per_s(self) -> float:
        return self._rate.per_s(now_s=self._clock.now_s())

    @property
    def step_time_s(self) -> float:
        """Recent time from one token of a sequence to its next."""
        return self._token_time.value
