"""The decode replica's step: one range of layers for one group of sequences.

A sequence is received (its row is being filled by a transfer), then runs: its token goes through
the segments of the model and may wait at the exit behind each of them. Only where memory fills, a
sequence is paused: its row moves to host memory and comes back later. See `DecodeBatch` for the
table that holds all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

from quadriga.checkpoint.exits import Criterion, ExitCounters, ExitUse
from quadriga.clock import Clock
from quadriga.core.forecast import LengthPrediction
from quadriga.core.kv import ResumePoint
from quadriga.core.output import EngineOutput
from quadriga.core.request import SampledToken, SequenceState
from quadriga.errors import DeadlineExceeded, DeviceMemoryExhausted, InvariantViolation
from quadriga.interfaces import ModelRunner
from quadriga.policies.baselines.exits import NoExits
from quadriga.policies.drex.costs import SegmentCosts
from quadriga.policies.rebatching import Range, Rebatcher, Waiting
from quadriga.policies.slot_reservation import AnswerLengths
from quadriga.scheduling.decode_batch import (
    AT_EXIT,
    MOVING,
    PAUSED,
    RUNNING,
    TRANSFERRING,
    DecodeBatch,
    summary,
)
from quadriga.scheduling.depth import DepthChanges, Emissions, Shrunk
from quadriga.scheduling.exits.draft_rounds import DraftRounds
from quadriga.scheduling.exits.judging import Group, judge
from quadriga.scheduling.exits.pressure import lower_thresholds
from quadriga.scheduling.meters import Ewma, RateMeter, StepMeter
from quadriga.scheduling.preemption import Preemption
from quadriga.scheduling.prefixes.cache import PrefixCache
from quadriga.scheduling.sequence import NO_ROW, RunningSequence
from quadriga.scheduling.slots import Slot, SlotTable
from quadriga.scheduling.transfer.sequence_export import SequenceExport

RATE_WINDOW_S = 10.0


class DecodeLoop:
    """Continuous batch over KV rows, left by each token at an exit of its own.

    A sequence joins between two steps, at no cost to the others, and leaves the moment it is
    finished, cancelled, late, or taken away.

    Args:
        rebatcher: Which group runs next and which tokens leave; None runs every token to the end.
        criterion, is_partial: See `DecodeBatch`.
        prefixes: Keeps what sequences had at their ends, for those that go on from there; None:
            nothing is kept.

    Attributes:
        batch: The table of its sequences.
        answers: Lengths of those that ended here; newcomers are promised memory by them.
        is_overloaded: There is overload: the scheduler sends by forecast, and nothing is promised
            to newcomers beyond what they come with.
        preemption: Moves to host memory and back.
        export: Ways out to another replica.
        depth: What follows from changes of the depth that is loaded.
        meter: What its steps cost.
        on_leave: Called when a sequence has left, and given its room back.

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
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.slots = slots
        self.prefixes = prefixes
        self.counters = counters or ExitCounters()
        self.answers = AnswerLengths()
        self.is_overloaded = False
        self.meter = StepMeter()
        self.on_leave: Callable[[], None] = lambda: None
        self._runner = runner
        self._clock = clock
        costs = SegmentCosts(len(runner.segment_ends), slots.num_rows)
        self.batch = DecodeBatch(
            runner=runner,
            slots=slots,
            clock=clock,
            eos_token_ids=eos_token_ids,
            rebatcher=rebatcher or NoExits(costs),
            counters=self.counters,
            criterion=criterion,
            is_partial=is_partial,
        )
        self.preemption = Preemption(self.batch)
        self.export = SequenceExport(self.batch)
        self.depth = DepthChanges(self.batch)
        self._rate = RateMeter(window_s=RATE_WINDOW_S, now_s=clock.now_s())
        self._step_time, self._pass_time = Ewma(0.1), Ewma(0.1)
        self._tokens_at_s = 0.0  # when the last tokens came, of the time in which there was work
        self._in_passes_s = 0.0  # since then
        self._drafts = DraftRounds(self.batch)

    def promise(
        self,
        sequence_id: str,
        max_total_tokens: int,
        num_tokens: int | None = None,
        priority: int = 0,
        prediction: LengthPrediction | None = None,
    ) -> Slot:
        """Promise a row to a sequence; less important ones may be paused for it.

        Raises:
            KVCacheExhausted: No room now, or the paused come before new ones.
            ContextTooLong: It can never fit.
        """
        is_foreseen = self.is_overloaded and prediction is not None
        upper_tokens = 1 if is_foreseen else self.answers.upper_tokens
        self.preemption.make_room(
            max_total_tokens, num_tokens, priority, upper_tokens=upper_tokens, prediction=prediction
        )
        return self.slots.reserve(
            sequence_id,
            max_total_tokens,
            num_tokens,
            upper_tokens=upper_tokens,
            prediction=prediction,
        )

    def reserve(
        self,
        sequence_id: str,
        max_total_tokens: int,
        num_tokens: int | None = None,
        priority: int = 0,
        prediction: LengthPrediction | None = None,
        block_keys: Sequence[bytes] = (),
    ) -> Slot:
        """Promise a row to a sequence that is on its way here.

        Args:
            block_keys: Of its prompt: what is kept of them is the last to go for the promise.

        Raises:
            InvariantViolation: It is here already.
            KVCacheExhausted, ContextTooLong: As `promise`.
        """
        here = self.batch.sequences.get(sequence_id)
        if here is not None:
            raise InvariantViolation(f"sequence {sequence_id} is here already, {here.status}")
        if self.prefixes is not None:
            self.prefixes.touch(block_keys)
        slot = self.promise(sequence_id, max_total_tokens, num_tokens, priority, prediction)
        self.batch.expect(sequence_id, slot.row, num_tokens or 0)
        return slot

    def fill(self, sequence_id: str, row: int, block_keys: Sequence[bytes]) -> int:
        """Let a row that was just promised begin with what is kept; returns its tokens.

        The promise does not outlive a failure.
        """
        try:
            return 0 if self.prefixes is None else self.prefixes.fill(row, block_keys)
        except Exception:
            self.leave(sequence_id)
            raise

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
        batch, loaded = self.batch, self.batch.ends[-1]
        slot = self.slots.get(state.sequence_id)
        sequence = batch.sequences.get(state.sequence_id)
        if slot is None or (sequence is not None and sequence.status is not TRANSFERRING):
            raise InvariantViolation(f"sequence {state.sequence_id} cannot join: no free slot")
        if not state.output_ids:
            raise InvariantViolation(f"sequence {state.sequence_id} joins without a first token")
        if sequence is None:
            sequence = RunningSequence(state, TRANSFERRING, slot.row, kv_depth=loaded)
        sequence.state = state
        depth = min(depth or loaded, sequence.kv_depth)
        if is_attached:
            batch.set_depth_of(slot.row, depth)
        else:
            batch.attach(sequence, resume, depth)
        if depth == loaded and resume is None:
            sequence.num_full = len(state.prompt_ids)
        batch.enter(sequence)

    def leave(self, sequence_id: str) -> SequenceState | None:
        """Take a sequence out and free its slot, whatever its status is.

        A token that waits at an exit is dropped; the next owner of the sequence computes it again.

        Returns:
            Its state, unless it was still on its way here, or is not here.
        """
        sequence = self.batch.sequences.get(sequence_id)
        if sequence is None:
            return None
        before = sequence.status
        self.batch.remove(sequence)
        self.on_leave()
        if before is TRANSFERRING:
            return None
        if before is not MOVING:
            self.answers.ended(len(sequence.state.output_ids))
        if not self.has_work:
            self.meter.rest(self._clock.now_s())
        return sequence.state

    def take_depth(self, prepared: Any) -> None:
        """Go on with the deeper model that the runner prepared; between two steps.

        Raises:
            ConfigError: The layers do not fit this runner as it is now; nothing has changed.
        """
        self.depth.runner().take_depth(prepared)
        self._forget_blocks()
        self.depth.changed()

    def drop_to(self, depth: int) -> Shrunk:
        """Let the layers behind the first `depth` go; between two steps.

        Raises:
            ConfigError: The runner cannot go there; nothing has changed.
        """
        runner, ends = self.depth.runner(), self.batch.ends
        blockers = self.depth.blockers(depth)
        if blockers:
            return Shrunk(blocked_by=blockers)
        runner.check_drop(depth)  # before a token is taken from any sequence
        emissions: Emissions = []
        if depth in ends:
            first = ends.index(depth)
            self.meter.begin(self._clock.now_s())
            self.depth.repay_parked(first)
            for segment in range(first + 1, len(ends)):
                groups = self.batch.groups()  # those that stop on the way wait further down
                if groups[segment]:
                    ran = Range(segment, len(ends), tests=False)
                    self._run(ran, groups[segment], groups, emissions)
        runner.drop_to(depth)
        self._forget_blocks()
        self.depth.changed()
        return Shrunk(emissions=emissions)

    def _forget_blocks(self) -> None:
        """Blocks have as many layers as there were."""
        if self.prefixes is not None:
            self.prefixes.clear()

    def step(self) -> Emissions:
        """Schedule → run → judge → commit. Returns (ingress id, emission) pairs."""
        self.meter.begin(self._clock.now_s())
        emissions = self._expire()
        self.preemption.balance()
        if self.batch.num_limited:
            self.depth.repay()
        if self.batch.num_budgeted:
            lower_thresholds(self.batch, self.step_time_s)
        while num_able := self.batch.num_decoding - self.batch.num_parked:
            try:
                self._run_next(emissions)
                break
            except DeviceMemoryExhausted:
                if num_able < 2:
                    raise
                self.preemption.lighten(num_able // 2)  # a smaller pass needs less
        if not self.has_work:
            self.meter.rest(self._clock.now_s())
        return emissions

    def _run_next(self, emissions: Emissions) -> None:
        """Run what the policies choose.

        Raises: DeviceMemoryExhausted: The device lacks the memory; no sequence has moved.
        """
        groups = self.batch.groups()
        ran, group = self._choose(groups)
        self._run(ran, group, groups, emissions)

    def _choose(self, groups: list[Group]) -> tuple[Range, Group]:
        """Let the policies choose the next range, and who runs it."""
        if self.batch.num_drafting:
            return self._drafts.choose(groups)
        front = Waiting(len(groups[0]), sum([s.num_tokens for s in groups[0]]))
        waiting = [summary(group) for group in groups[1:]]
        ran = self.batch.rebatcher.choose(front, waiting, self._clock.now_s())
        return ran, groups[ran.first]

    def _run(self, ran: Range, group: Group, groups: list[Group], emissions: Emissions) -> None:
        """Run a range, as far as all of its group may go → judge → commit."""
        clock, runner, batch = self._clock, self._runner, self.batch
        if not group:
            raise InvariantViolation(f"no token waits before segment {ran.first}")
        if batch.num_limited:
            stop = min(ran.stop, 1 + min(s.last_segment for s in group))
            if stop < ran.stop:
                ran = Range(ran.first, stop)
        drafting = self._drafts.taking_part(ran, group)
        if drafting:
            self._run_drafts(ran, group, drafting, groups, emissions)
            return
        started_s = clock.now_s()
        if ran.first:
            self._count_flush(group, started_s)
        num_tokens = sum([s.num_tokens for s in group])
        self.meter.ran(len(group), num_tokens)
        if ran.first == 0 and batch.rebatcher.is_surveying:
            for sequence in group:
                sequence.is_surveyed, sequence.sure_after = True, 0
        rows = [s.row for s in group]
        started_s, filled = clock.now_s(), runner.num_filled
        if ran.first == 0 and ran.stop == len(batch.ends) and not batch.is_partial:
            tokens = runner.decode(rows)
            leavers, passed, judged_s = group, None, 0.0
        else:
            confidences = runner.advance(rows, ran.first, ran.stop)
            before_s = clock.now_s()
            leavers, passed = judge(batch, ran, group, groups, confidences, num_tokens, before_s)
            judged_s = clock.now_s() - before_s
            tokens = runner.emit([s.row for s in leavers]) if leavers else []
        now_s = clock.now_s()
        seconds = now_s - started_s - judged_s  # the runner's own
        filled = runner.num_filled - filled
        batch.rebatcher.observe(ran, len(group), num_tokens, seconds, passed, filled)
        self._drafts.ran_full(ran, group, seconds)
        self._count_time(len(leavers), now_s - started_s, now_s)
        self._commit(leavers, [[token] for token in tokens], now_s, emissions)

    def _run_drafts(
        self, ran: Range, group: Group, drafting: Group, groups: list[Group], emissions: Emissions
    ) -> None:
        """Run the first segment, or all behind it, for some that draft and maybe for others."""
        clock, batch, runner, drafts = self._clock, self.batch, self._drafts.runner, self._drafts
        started_s = clock.now_s()
        others = [s for s in group if not s.drafts] if len(drafting) < len(group) else []
        if ran.first and others:
            self._count_flush(others, started_s)
        positions, num_tokens = drafts.size(ran, group)
        self.meter.ran(len(group), num_tokens)
        rows = [s.row for s in group]
        started_s, filled = clock.now_s(), runner.num_filled
        if ran.first:
            leavers, tokens = group, runner.verify(rows)
            now_s = clock.now_s()
            seconds, filled = now_s - started_s, runner.num_filled - filled
            batch.drafter.observe(ran, positions, num_tokens, seconds, filled)
            drafts.verified(drafting, group, tokens)
        else:
            confidences = runner.advance(rows, 0, 1)
            sure = compress(confidences, [s.drafts for s in group])
            counts, drafting_s = drafts.draft(drafting, sure)
            now_s = clock.now_s()
            seconds, leavers, tokens = now_s - started_s - drafting_s, [], []
            if others:
                of_them = list(compress(confidences, [not s.drafts for s in group]))
                num_theirs = sum([s.num_tokens for s in others])
                leavers, passed = judge(batch, ran, others, groups, of_them, num_theirs, now_s)
                left = runner.emit([s.row for s in leavers]) if leavers else []
                tokens = [[token] for token in left]
                share = (passed or 0) / len(others)
                passed = round(share * len(group))  # as if all of the group had been asked
                batch.rebatcher.observe(ran, positions, num_tokens, seconds, passed)
            else:
                batch.drafter.observe(ran, positions, num_tokens, seconds)
                batch.drafter.drafted_on(counts, drafting_s)
        self._count_time(sum(map(len, tokens)), now_s - started_s, now_s)
        self._commit(leavers, tokens, now_s, emissions)

    def _count_flush(self, group: Group, now_s: float) -> None:
        self.counters.flushes += 1
        self.counters.buffer_age_s += sum([now_s - s.since_s for s in group])

    def _count_time(self, num_tokens: int, seconds: float, now_s: float) -> None:
        """Note what a pass took, and how many tokens came of it, while all are there that ran."""
        self._in_passes_s += seconds
        if not num_tokens:
            return
        turns = (self.batch.num_decoding - self.batch.num_parked) / num_tokens  # until all had one
        busy_s = self.meter.busy_s(now_s)
        self._step_time.add((busy_s - self._tokens_at_s) * turns)
        self._pass_time.add(self._in_passes_s * turns)
        self._tokens_at_s, self._in_passes_s = busy_s, 0.0
        self._rate.add(num_tokens, now_s=now_s)

    def _commit(
        self, leavers: Group, tokens: list[list[SampledToken]], now_s: float, emissions: Emissions
    ) -> None:
        """Append the tokens, send their sequences back to the front, and finish those that end."""
        if not leavers:
            return
        gap_s = self.batch.rebatcher.target_gap_s(self.batch.num_decoding)
        depth = tokens[0][0].exit_layer  # they all left at one exit
        at_depth = self.counters.tokens.get(depth, 0)
        for sequence, news in zip(leavers, tokens, strict=True):
            state = sequence.state
            output_ids = state.output_ids
            first, finish, error = len(output_ids), None, None
            for token in news:
                error = token.error
                if error is not None:
                    break
                output_ids.append(token.token_id)
                finish = sequence.finish_reason()
                if finish is not None:
                    break
            token_ids = output_ids[first:]
            depths = [depth] * len(token_ids)
            state.exit_layers += depths
            sequence.num_tokens += len(token_ids)
            at_depth += len(token_ids)
            logprobs = [t.logprob for t in news[: len(token_ids)] if t.logprob is not None]
            if logprobs:
                state.logprobs += logprobs
            if token_ids:
                emission = EngineOutput(
                    state.sequence_id,
                    state.epoch,
                    first,
                    token_ids,
                    depths,
                    logprobs or None,
                    None,
                    finish,
                )
                has_news = state.prediction is not None and state.predicted_at != sequence.told_at
                has_news = has_news or state.num_lowered != sequence.told_lowered
                if has_news or finish is not None:
                    sequence.told_at = state.predicted_at
                    sequence.told_lowered = state.num_lowered
                    emission.progress = state.progress()
                if sequence.is_surveyed:
                    emission.sure_layers = [sequence.sure_after or depth]
                    sequence.is_surveyed = False
                emissions.append((state.ingress_id, emission))
            if error is not None:
                self.leave(state.sequence_id)
                emission = EngineOutput(
                    state.sequence_id, state.epoch, len(output_ids), error=error
                )
                emissions.append((state.ingress_id, emission))
                continue
            if finish is not None:
                if self.prefixes is not None:
                    self.prefixes.store_answer(sequence)
                self.leave(state.sequence_id)
                continue
            if sequence.next_segment:
                sequence.status = RUNNING
                sequence.next_segment = 0
                sequence.since_s = now_s
            # Those that draft have their tokens passed on one by one: see `TokenPacer`.
            ahead = len(token_ids) if sequence.drafts else 1
            sequence.deadline_s = now_s + (sequence.gap_s * ahead or gap_s)
        self.counters.tokens[depth] = at_depth

    def _expire(self) -> Emissions:
        """End the sequences whose deadline has passed; one that is moving does not expire here."""
        batch, now_unix_s = self.batch, self._clock.unix_s()
        if now_unix_s < batch.first_deadline_unix_s:
            return []
        states = [s.state for s in batch.decoding + batch.having(PAUSED)]
        late = [s for s in states if s.deadline_unix_s <= now_unix_s]
        batch.first_deadline_unix_s = min(
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
        """Verify the table against itself and the slots. Raises: InvariantViolation."""
        self.batch.check()

    @property
    def has_work(self) -> bool:
        batch = self.batch
        if batch.num_decoding > batch.num_parked or (batch.num_limited and self.depth.has_work):
            return True
        # Where sequences on their way here have the room, a paused one can only wait for them.
        return not batch.num_decoding and batch.num_paused > 0 and self.preemption.may_return

    @property
    def running(self) -> list[SequenceState]:
        """States of the decoding sequences, in order of joining, the paused, and the moving."""
        batch = self.batch
        return [s.state for s in batch.decoding + batch.having(PAUSED) + batch.having(MOVING)]

    def find(self, sequence_id: str) -> RunningSequence | None:
        """A sequence that runs, is paused, or is on its way from here."""
        return self.batch.find(sequence_id, RUNNING, AT_EXIT, PAUSED, MOVING)

    def is_paused(self, sequence_id: str) -> bool:
        """Whether a sequence is in host memory."""
        return self.batch.find(sequence_id, PAUSED) is not None

    @property
    def num_paused(self) -> int:
        return self.batch.num_paused

    @property
    def suspended(self) -> list[RunningSequence]:
        """Sequences in host memory: the paused, and those of them that are moving."""
        return [s for s in self.batch.sequences.values() if s.row == NO_ROW]

    @property
    def num_running(self) -> int:
        return self.batch.num_decoding

    @property
    def num_waiting_at_exits(self) -> list[int]:
        """Per exit but the last, sequences whose token waits there."""
        return [len(group) for group in self.batch.groups()[1:]]

    def exit_uses(self, layers: Iterable[int]) -> dict[int, ExitUse]:
        """Whether tokens may leave at each of a model's exits now, and if not, why."""
        return {layer: self._exit_use(layer) for layer in layers}

    def _exit_use(self, layer: int) -> ExitUse:
        ends = self.batch.ends
        if layer >= ends[-1]:
            return "not_loaded"
        if layer not in ends:
            return "off"
        decoding = self.batch.decoding
        if not decoding:
            return "idle"
        if all(s.min_confidence == math.inf for s in decoding):
            if not self.batch.num_drafting or layer != ends[0]:
                return "full_depth_asked"
            pays = self.batch.drafter.pays(self.batch.num_drafting)
            return "drafts" if pays else "drafts_not_worth_it"
        return "tested" if self.batch.rebatcher.tests(ends.index(layer)) else "not_worth_it"

    @property
    def front_share(self) -> float:
        """Of the layers, those up to the first exit in use: what every token runs."""
        ends, tests = self.batch.ends, self.batch.rebatcher.tests
        return next((end for i, end in enumerate(ends[:-1]) if tests(i)), ends[-1]) / ends[-1]

    @property
    def num_reserved(self) -> int:
        """Sequences on their way here: a row is promised, nothing runs yet."""
        return self.slots.num_held - self.num_running

    @property
    def used_tokens(self) -> int:
        """Tokens whose KV is held by decoding sequences."""
        return sum(s.num_tokens for s in self.batch.decoding)

    @property
    def prompt_tokens(self) -> int:
        """Of all that is held; of those on their way here, the tokens that they come with."""
        return sum(
            s.num_tokens if s.status is TRANSFERRING else len(s.state.prompt_ids)
            for s in self.batch.sequences.values()
        )

    @property
    def generated_tokens(self) -> int:
        """The rest of the tokens of all that is held."""
        held = [s for s in self.batch.sequences.values() if s.status is not TRANSFERRING]
        return sum([s.num_tokens - len(s.state.prompt_ids) for s in held])

    @property
    def tokens_per_s(self) -> float:
        return self._rate.per_s(now_s=self._clock.now_s())

    @property
    def step_time_s(self) -> float:
        """Recent time from one token of a sequence to its next, with all that it waits for."""
        return self._step_time.value

    @property
    def pass_time_s(self) -> float:
        """The part of `step_time_s` in passes of this batch: what they cost."""
        return self._pass_time.value
