"""The decode replica's step: one range of layers for one group of sequences.

A sequence passes through: reserved (its row is being filled by a transfer) → front (ready for its
next token) ⇄ waiting at an exit (its token did not leave there and its next layers have not begun)
→ gone. Nothing moves when it changes place: hidden state and KV stay in its row, and the places
are sets of row numbers. Only where memory fills, a sequence is paused: its row moves to host
memory and comes back later, wherever it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quadriga.batching.finish import append_token, finish_reason
from quadriga.batching.preemption import (
    HIGH_WATERMARK,
    LOW_WATERMARK,
    PausedSequence,
    choose_return,
    choose_victim,
)
from quadriga.batching.rates import Ewma, RateMeter
from quadriga.batching.slots import Slot, SlotTable
from quadriga.clock import Clock
from quadriga.errors import DeadlineExceeded, InvariantViolation, KVCacheExhausted
from quadriga.exits import Criterion, ExitCounters
from quadriga.interfaces import ModelRunner
from quadriga.policies.baselines.exits import NoExits
from quadriga.policies.drex.costs import SegmentCosts
from quadriga.policies.rebatching import AtExit, Range, Rebatcher, Verdict, Waiting
from quadriga.types import Emission, SampledToken, SequenceState

RATE_WINDOW_S = 10.0

Emissions = list[tuple[str, Emission]]


@dataclass(slots=True, eq=False)
class _Running:
    """A running sequence.

    Attributes:
        place: The set of rows it is in: the front, or those waiting at an exit.
        bar: Confidence from which its token may leave early; infinite for never.
        last_segment: The segment behind which it leaves whatever its confidence.
        gap_s: Longest time between two tokens to plan for; 0 is the policy's default.
        since_s: When it came to its place.
        deadline_s: When its next token should be out.
    """

    row: int
    state: SequenceState
    place: dict[int, _Running]
    bar: float
    last_segment: int
    gap_s: float
    num_tokens: int
    since_s: float
    deadline_s: float


class DecodeLoop:
    """Continuous batch over KV rows, left by each token at an exit of its own.

    A sequence joins between two steps, at no cost to the others, and leaves the moment it is
    finished, cancelled, late, or taken away.

    Args:
        rebatcher: Which group runs next and who leaves; None runs every token to the end.
        criterion: How a confidence is compared with its threshold.
        is_partial: The model has layers beyond those loaded, so that tokens which leave the deepest
            one below their threshold are breaches.

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
    ) -> None:
        self.slots = slots
        self.counters = counters or ExitCounters()
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._ends = runner.segment_ends
        self._rebatcher = rebatcher or NoExits(SegmentCosts(len(self._ends), slots.num_rows))
        self._criterion = criterion
        self._is_partial = is_partial
        self._running: dict[int, _Running] = {}  # by row, in order of joining
        self._rows: dict[str, int] = {}  # sequence id → row, running sequences only
        self._front: dict[int, _Running] = {}
        self._waiting: list[dict[int, _Running]] = [{} for _ in self._ends[:-1]]
        self._paused: dict[str, PausedSequence] = {}
        self.num_pauses = 0
        self._num_limited = 0  # running sequences with a depth limit of their own
        self._rate = RateMeter(window_s=RATE_WINDOW_S, now_s=clock.now_s())
        self._token_time = Ewma(0.1)

    def reserve(
        self, sequence_id: str, max_total_tokens: int, num_tokens: int | None = None
    ) -> Slot:
        """Promise a row to a sequence on its way.

        Raises:
            KVCacheExhausted: No room now; paused sequences come before new ones.
            ContextTooLong: It can never fit.
        """
        if self._paused:
            raise KVCacheExhausted(
                f"{len(self._paused)} paused sequences wait for memory here; try another replica"
            )
        return self.slots.reserve(sequence_id, max_total_tokens, num_tokens)

    def join(self, state: SequenceState) -> None:
        """Let a sequence, whose row is reserved and filled, take part from the next step on.

        Raises:
            InvariantViolation: It has no reservation, or nothing to continue from.
        """
        slot = self.slots.get(state.sequence_id)
        if slot is None or state.sequence_id in self._rows:
            raise InvariantViolation(f"sequence {state.sequence_id} cannot join: no free slot")
        if not state.output_ids:
            raise InvariantViolation(f"sequence {state.sequence_id} joins without a first token")
        self._runner.attach(slot.row, state)
        self._enter(slot.row, state, self._front)

    def _enter(self, row: int, state: SequenceState, place: dict[int, _Running]) -> None:
        now_s = self._clock.now_s()
        running = _Running(
            row=row,
            state=state,
            place=place,
            bar=self._bar(state.exits.threshold),
            last_segment=self._last_segment(state.exits.max_depth),
            gap_s=state.exits.sla_tbt_s,
            num_tokens=state.num_tokens,
            since_s=now_s,
            deadline_s=math.inf,
        )
        self._running[row] = place[row] = running
        self._rows[state.sequence_id] = row
        self._num_limited += running.last_segment < len(self._ends) - 1
        self._set_deadline(running, now_s, self._rebatcher.target_gap_s(len(self._running)))

    def leave(self, sequence_id: str) -> SequenceState | None:
        """Take a sequence out and free its slot, reserved or running.

        A token that waits at an exit is dropped; whoever goes on with the sequence computes it
        again.

        Returns:
            Its state when it was running, else None.
        """
        paused = self._paused.pop(sequence_id, None)
        if paused is not None:
            return paused.state
        row = self._rows.get(sequence_id)
        if row is None:
            self.slots.release(sequence_id)
            return None
        running = self._remove(self._running[row])
        self._runner.detach(row)
        return running.state

    def _remove(self, running: _Running) -> _Running:
        """Take a running sequence out of its place and give its slot back."""
        sequence_id = running.state.sequence_id
        del self._rows[sequence_id]
        slot = self.slots.release(sequence_id)
        if slot is None or slot.row != running.row:
            raise InvariantViolation(f"{sequence_id} ran in row {running.row} but holds {slot}")
        del self._running[running.row]
        del running.place[running.row]
        self._num_limited -= running.last_segment < len(self._ends) - 1
        return running

    def pause(self, sequence_id: str) -> bool:
        """Move a running sequence to host memory; it comes back by itself. False if not running."""
        row = self._rows.get(sequence_id)
        if row is None:
            return False
        running = self._remove(self._running[row])
        at_front = running.place is self._front
        self._paused[sequence_id] = PausedSequence(
            state=running.state,
            suspended=self._runner.suspend(row),
            waited_at=None if at_front else self._exit_of(running.place),
            paused_at_s=self._clock.now_s(),
        )
        self.num_pauses += 1
        return True

    def _exit_of(self, place: dict[int, _Running]) -> int:
        return next(i for i, waiting in enumerate(self._waiting) if waiting is place)

    def _balance_memory(self) -> None:
        """Let every running sequence grow, pausing some where they cannot; take paused ones in."""
        slots = self.slots
        if slots.reservation == "used":
            for running in list(self._running.values()):
                sequence_id = running.state.sequence_id
                while sequence_id in self._rows and not slots.grow(
                    sequence_id, running.num_tokens + 1
                ):
                    self._pause_one()
            while slots.reserved_tokens > HIGH_WATERMARK * slots.kv_capacity_tokens:
                if len(self._running) <= 1:
                    break
                self._pause_one()
        while self._paused and self._resume_one():
            pass

    def _pause_one(self) -> None:
        victim = choose_victim(r.state for r in self._running.values())
        if victim is None:
            raise InvariantViolation("memory is full and nobody runs")
        self.pause(victim.sequence_id)

    def _resume_one(self) -> bool:
        """Take the first paused sequence back; False when there is no room for it yet."""
        paused = choose_return(self._paused.values())
        slots = self.slots
        if paused is None or not slots.num_free_rows:
            return False
        state = paused.state
        after = slots.reserved_tokens + state.num_tokens + 1
        if self._running and after > LOW_WATERMARK * slots.kv_capacity_tokens:
            return False
        try:
            slot = slots.reserve(state.sequence_id, state.max_total_tokens, state.num_tokens)
        except KVCacheExhausted:
            return False
        del self._paused[state.sequence_id]
        self._runner.restore(slot.row, state, paused.suspended)
        at = paused.waited_at
        self._enter(slot.row, state, self._front if at is None else self._waiting[at])
        return True

    def step(self) -> Emissions:
        """Schedule → run → judge → commit. Returns (ingress id, emission) pairs."""
        emissions = self._expire()
        self._balance_memory()
        if not self._running:
            return emissions
        started_s = self._clock.now_s()
        ran, group = self._schedule(started_s)
        num_tokens = sum(r.num_tokens for r in group)
        rows = [r.row for r in group]
        if ran.first == 0 and ran.stop == len(self._ends) and not self._is_partial:
            tokens = self._runner.decode(rows)
            leavers, passed = group, None
        else:
            confidences = self._runner.advance(rows, ran.first, ran.stop)
            leavers, passed = self._judge(ran, group, confidences, num_tokens)
            tokens = self._runner.emit([r.row for r in leavers]) if leavers else []
        now_s = self._clock.now_s()
        self._rebatcher.observe(ran, len(group), num_tokens, now_s - started_s, passed)
        self._commit(leavers, tokens, now_s, emissions)
        self._token_time.add((now_s - started_s) / max(1, len(leavers)) * len(self._running))
        self._rate.add(len(leavers), now_s=now_s)
        return emissions

    def _schedule(self, now_s: float) -> tuple[Range, list[_Running]]:
        """Choose the next range, and the group that runs it."""
        front = Waiting(len(self._front), sum(r.num_tokens for r in self._front.values()))
        waiting = [_summary(place.values()) for place in self._waiting]
        ran = self._rebatcher.choose(front, waiting, now_s)
        place = self._place_before(ran.first)
        group = list(place.values())
        if not group:
            raise InvariantViolation(f"nobody waits before segment {ran.first}")
        if ran.first:
            self.counters.flushes += 1
            self.counters.buffer_age_s += sum(now_s - r.since_s for r in group)
        if self._num_limited:
            stop = min(ran.stop, 1 + min(r.last_segment for r in group))
            if stop < ran.stop:
                ran = Range(ran.first, stop)
        return ran, group

    def _judge(
        self, ran: Range, group: list[_Running], confidences: list[float], num_tokens: int
    ) -> tuple[list[_Running], int | None]:
        """Who leaves at the exit behind `ran`, and how many may; the others wait there from now."""
        if ran.stop == len(self._ends):
            if self._is_partial:
                self._count_breaches(group, confidences)
            return group, None
        exit_index = ran.stop - 1
        passed = [c >= r.bar for c, r in zip(confidences, group, strict=True)]
        now_s = self._clock.now_s()
        remaining = _summary(r for r, p in zip(group, passed, strict=True) if not p)
        verdict = self._rebatcher.judge(
            AtExit(
                ran=ran,
                confidences=confidences,
                thresholds=[r.state.exits.threshold for r in group],
                passed=passed,
                num_tokens=num_tokens,
                waiting=_summary(self._waiting[exit_index].values()),
                remaining=remaining,
            ),
            now_s,
        )
        count = len(group) - remaining.count
        if verdict is Verdict.LEAVE:
            limited = [i for i, r in enumerate(group) if r.last_segment == exit_index]
            self._count_breaches([group[i] for i in limited], [confidences[i] for i in limited])
            self.counters.involuntary_exits += remaining.count - sum(not passed[i] for i in limited)
            return group, count
        leavers = []
        for running, confidence, may_leave in zip(group, confidences, passed, strict=True):
            if running.last_segment == exit_index:
                self._count_breaches([running], [confidence])
                leavers.append(running)
            elif may_leave and verdict is Verdict.SPLIT:
                leavers.append(running)
            else:
                self.counters.involuntary_stays += may_leave
                self._move(running, self._waiting[exit_index], now_s)
        self.counters.buffered += len(group) - len(leavers)
        return leavers, count

    def _commit(
        self,
        leavers: list[_Running],
        tokens: list[SampledToken],
        now_s: float,
        emissions: Emissions,
    ) -> None:
        """Append the tokens, send their sequences back to the front, and finish those that end."""
        gap_s = self._rebatcher.target_gap_s(len(self._running))
        at_exit = self.counters.tokens
        for running, token in zip(leavers, tokens, strict=True):
            state = running.state
            append_token(state, token)
            running.num_tokens += 1
            at_exit[token.exit_layer] = at_exit.get(token.exit_layer, 0) + 1
            finish = finish_reason(
                state,
                eos_token_ids=self._eos_token_ids,
                row_capacity_tokens=self._runner.row_capacity_tokens,
            )
            emission = Emission(
                sequence_id=state.sequence_id,
                epoch=state.epoch,
                first_index=len(state.output_ids) - 1,
                token_ids=[token.token_id],
                exit_layers=[token.exit_layer],
                logprobs=None if token.logprob is None else [token.logprob],
                finish=finish,
            )
            emissions.append((state.ingress_id, emission))
            if finish is not None:
                self.leave(state.sequence_id)
                continue
            if running.place is not self._front:
                self._move(running, self._front, now_s)
            self._set_deadline(running, now_s, gap_s)

    def _move(self, running: _Running, place: dict[int, _Running], now_s: float) -> None:
        del running.place[running.row]
        place[running.row] = running
        running.place = place
        running.since_s = now_s

    def _set_deadline(self, running: _Running, now_s: float, default_gap_s: float) -> None:
        running.deadline_s = now_s + (running.gap_s or default_gap_s)

    def _place_before(self, segment: int) -> dict[int, _Running]:
        return self._waiting[segment - 1] if segment else self._front

    def _bar(self, threshold: float) -> float:
        """The confidence from which a token passes: c ≥ bar."""
        if threshold >= 1.0:
            return math.inf
        return threshold if self._criterion == "top" else math.nextafter(threshold, math.inf)

    def _last_segment(self, max_depth: int) -> int:
        """The deepest segment that stays within a request's depth limit; at least the first."""
        last = len(self._ends) - 1
        if max_depth <= 0:
            return last
        within = [i for i, end in enumerate(self._ends) if end <= max_depth]
        return within[-1] if within else 0

    def _count_breaches(self, group: list[_Running], confidences: list[float]) -> None:
        self.counters.breaches += sum(
            c < r.bar for c, r in zip(confidences, group, strict=True) if r.bar < math.inf
        )

    def _expire(self) -> Emissions:
        now_unix_s = self._clock.unix_s()
        late = [r.state for r in self._running.values() if r.state.deadline_unix_s <= now_unix_s]
        if self._paused:
            late += [
                p.state for p in self._paused.values() if p.state.deadline_unix_s <= now_unix_s
            ]
        emissions = []
        for state in late:
            self.leave(state.sequence_id)
            error = DeadlineExceeded(
                f"the deadline passed after {len(state.output_ids)} tokens", param="deadline_ms"
            )
            emission = Emission(state.sequence_id, state.epoch, len(state.output_ids), error=error)
            emissions.append((state.ingress_id, emission))
        return emissions

    def check(self) -> None:
        """Verify the places against each other and the slots. Raises: InvariantViolation."""
        self.slots.check()
        places = [self._front, *self._waiting]
        placed = sorted(row for place in places for row in place)
        if placed != sorted(self._running) or sorted(self._rows.values()) != placed:
            raise InvariantViolation(
                f"rows {sorted(self._running)} run, rows {placed} have a place, and "
                f"{sorted(self._rows.values())} have a sequence"
            )
        for place in places:
            for row, running in place.items():
                slot = self.slots.get(running.state.sequence_id)
                if running.place is not place or slot is None or slot.row != row:
                    raise InvariantViolation(f"row {row} is not where its sequence thinks it is")

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._paused)

    @property
    def running(self) -> list[SequenceState]:
        """States of the running sequences, in order of joining, then of the paused ones."""
        paused = [p.state for p in self._paused.values()]
        return [r.state for r in self._running.values()] + paused

    @property
    def rows(self) -> list[int]:
        """Rows of the running sequences, in order of joining."""
        return list(self._running)

    def rows_waiting_at(self, exit_index: int) -> list[int]:
        """Rows whose token waits at a non-final exit."""
        return list(self._waiting[exit_index])

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting_at_exits(self) -> list[int]:
        """Per exit but the last, sequences whose token waits there."""
        return [len(place) for place in self._waiting]

    @property
    def num_reserved(self) -> int:
        """Sequences on their way here: a row is promised, nothing runs yet."""
        return self.slots.num_held - len(self._running)

    @property
    def used_tokens(self) -> int:
        """Tokens whose KV is held by running sequences."""
        return sum(r.num_tokens for r in self._running.values())

    @property
    def tokens_per_s(self) -> float:
        return self._rate.per_s(now_s=self._clock.now_s())

    @property
    def step_time_s(self) -> float:
        """Recent time from one token of a sequence to its next."""
        return self._token_time.value


def _summary(rows: Iterable[_Running]) -> Waiting:
    count, num_tokens, least_s = 0, 0, math.inf
    for r in rows:
        count += 1
        num_tokens += r.num_tokens
        least_s = min(least_s, r.deadline_s)
    return Waiting(count, num_tokens, least_s)
