"""The prefill replica's step: take prompts, compute a chunk of them, hand out what is ready."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from quadriga.clock import Clock
from quadriga.core.request import FinishReason, SampledToken, SequenceState, TokenLogprob
from quadriga.errors import (
    DeadlineExceeded,
    InvariantViolation,
    KVCacheExhausted,
    Overloaded,
    QuadrigaError,
)
from quadriga.interfaces import ModelRunner, PrefillChunk
from quadriga.scheduling.meters import Ewma, RateMeter, StepMeter
from quadriga.scheduling.prefill_queue import PrefillQueue
from quadriga.scheduling.rebuild import check_record, chunk_of, num_prefill_tokens
from quadriga.scheduling.sequence import append_token, finish_reason
from quadriga.scheduling.slots import Slot, SlotTable

RATE_WINDOW_S = 10.0
MAX_SHALLOW = 256
"""Sequences that wait for layers; more are refused."""


class PrefillEvents:
    """What a host of the loop acts on, on the loop's thread; what it leaves out does nothing."""

    def on_start(self, state: SequenceState, row: int) -> None:
        """The first chunk is about to be computed: time to find a decode replica."""

    def on_kv(
        self, state: SequenceState, chunk: PrefillChunk, first_layer: int, num_layers: int
    ) -> None:
        """KV of these layers is complete at the chunk's positions; deeper layers follow."""

    def on_first_token(
        self,
        state: SequenceState,
        logprobs: list[TokenLogprob] | None,
        prompt_logprobs: list[TokenLogprob] | None,
        finish: FinishReason | None,
    ) -> None:
        """The prompt is done. `state` holds the first token, except when none was asked for."""

    def on_rebuilt(self, state: SequenceState) -> None:
        """The KV of a sequence that spoke before is there again; it has nothing new to say."""

    def on_error(self, state: SequenceState, error: QuadrigaError) -> None:
        """The sequence ended here; its slot is free again. Raised where the host says nothing."""
        raise error


@dataclass(slots=True)
class _Job:
    state: SequenceState
    row: int
    done_tokens: int = 0


class PrefillLoop:
    """Chunked prefill over a bounded queue.

    A sequence passes through: queued → active (has a row, chunks are computed) → computed (row
    kept until `release`, so that a failed hand-off can be repeated) → gone.

    Nothing tests a prompt's own token, so a strict sequence waits before it is queued until the
    layers are loaded that it may need.

    Args:
        full_depth: Layers of the whole model, where they may be loaded; 0: nobody waits for them.
        max_unplaced: No prompt is begun while so many sequences that hold a row have none at a
            decode replica, so that a full decode class is not met by ever more first tokens.
        num_placed: How many of those that hold a row have one at a decode replica as well.
        reserve: Promises a sequence its row in `slots`, where it goes on to decode in that row;
            None: for its prompt alone. Raises as `SlotTable.reserve`.

    Attributes:
        meter: What its steps cost.
        is_stalled: Who is first in line found no room, and waits until some is given back.

    Not thread-safe: one thread calls everything.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        slots: SlotTable,
        queue: PrefillQueue,
        events: PrefillEvents,
        eos_token_ids: tuple[int, ...],
        chunk_tokens: int,
        layer_groups: int,
        clock: Clock,
        full_depth: int = 0,
        max_unplaced: int = sys.maxsize,
        num_placed: Callable[[], int] = lambda: 0,
        reserve: Callable[[SequenceState], Slot] | None = None,
    ) -> None:
        self.slots = slots
        self._reserve = reserve or self._reserve_prompt
        self._max_unplaced = max_unplaced
        self._num_placed = num_placed
        self._full_depth = full_depth
        self._shallow: dict[str, SequenceState] = {}  # they wait for layers
        self._runner = runner
        self._queue = queue
        self._events = events
        self._eos_token_ids = eos_token_ids
        self._chunk_tokens = chunk_tokens
        self._layer_groups = layer_groups
        self._group_ends = _group_ends(runner.num_layers, layer_groups)
        self._is_held = False
        self._clock = clock
        self._active: list[_Job] = []
        self._computed: dict[str, SequenceState] = {}
        self.is_stalled = False
        self.meter = StepMeter()
        self._rate = RateMeter(window_s=RATE_WINDOW_S, now_s=clock.now_s())
        self._step_time = Ewma(0.1)

    def submit(self, state: SequenceState) -> None:
        """Queue a sequence, a new one or one that is to be rebuilt.

        Raises:
            Overloaded: The queue is full, or too many wait for layers.
            InvariantViolation: Its exit record does not cover its output.
        """
        check_record(state)
        if self._needs(state) > self._runner.num_layers:
            if len(self._shallow) >= MAX_SHALLOW:
                raise Overloaded(
                    f"{len(self._shallow)} strict sequences wait for layers to be loaded",
                    retry_after_s=1.0,
                )
            self._shallow[state.sequence_id] = state
            return
        now_s = self._clock.now_s()
        rate = self._rate.per_s(now_s=now_s)
        self._queue.push(state, now_s=now_s, drain_tokens_per_s=rate)

    def release(self, sequence_id: str) -> bool:
        """Let go of a sequence in whatever state it is: cancelled, or handed off for good."""
        if self._shallow.pop(sequence_id, None) is not None:
            return True
        if self._queue.remove(sequence_id) is not None:
            return True
        self._active = [j for j in self._active if j.state.sequence_id != sequence_id]
        self._computed.pop(sequence_id, None)
        slot = self.slots.release(sequence_id)
        if slot is None:
            return False
        self.is_stalled = False
        self._runner.detach(slot.row)
        return True

    def hand_over(self, sequence_id: str) -> None:
        """A computed sequence goes on to decode in its row: the slot is its new loop's."""
        del self._computed[sequence_id]

    def retry(self) -> None:
        """Others gave back what was reserved: who waits for it is tried again."""
        self.is_stalled = False

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        if self._active:
            return True
        if not (self._queue or self._shallow) or self.is_stalled or self._is_held:
            return False
        return not self._is_ahead and (len(self._queue) > 0 or self._is_deepened)

    def hold(self) -> None:
        """Start no more sequences, until `resume`: those under way go on, others wait in the queue.

        The KV of a prompt has the same layers from its first token to its last, so the depth
        changes between prompts, when the loop `is_quiet`.
        """
        self._is_held = True

    @property
    def is_quiet(self) -> bool:
        """Whether it is held, and no sequence has a row (any more)."""
        return self._is_held and not self.slots.num_held

    def resume(self, kv_capacity_tokens: int | None = None) -> None:
        """Start sequences again, at the depth that the runner has now.

        Args:
            kv_capacity_tokens: What fits now; None: as much as before.
        """
        self._is_held = False
        self.is_stalled = False
        self._group_ends = _group_ends(self._runner.num_layers, self._layer_groups)
        if kv_capacity_tokens is not None:
            self.slots.resize(kv_capacity_tokens)

    def step(self) -> None:
        """Compute one chunk: receive → schedule → run → hand out."""
        self.meter.begin(self._clock.now_s())
        self._step()
        if not self.has_work:
            self.meter.rest(self._clock.now_s())

    def _step(self) -> None:
        started_s = self._clock.now_s()
        self._expire()
        self._start_waiting(started_s)
        batch = self._schedule()
        if not batch:
            return
        chunks = [chunk for _, chunk in batch]
        jobs = [job for job, _ in batch]
        ends = self._group_ends
        group_start = 0

        def layers_done(first_layer: int, num_layers: int) -> None:
            nonlocal group_start
            done = first_layer + num_layers
            if done not in ends:
                return
            for job, chunk in batch:
                self._events.on_kv(job.state, chunk, group_start, done - group_start)
            group_start = done

        sampled = self._runner.prefill(chunks, layers_done)
        now_s = self._clock.now_s()
        num_tokens = sum(len(c.token_ids) for c in chunks)
        self.meter.ran(len(chunks), num_tokens)
        self._rate.add(num_tokens, now_s=now_s)
        self._step_time.add(now_s - started_s)
        for job, chunk, token in zip(jobs, chunks, sampled, strict=True):
            job.done_tokens += len(chunk.token_ids)
            if token is not None:
                self._finish_prompt(job, token)
            elif not _remaining(job):
                self._finish_rebuild(job)

    def _expire(self) -> None:
        now_unix_s = self._clock.unix_s()
        late = self._queue.expired(now_unix_s=now_unix_s)
        late += [s for s in self._shallow.values() if s.deadline_unix_s <= now_unix_s]
        late += [j.state for j in self._active if j.state.deadline_unix_s <= now_unix_s]
        for state in late:
            self.release(state.sequence_id)
            error = DeadlineExceeded("the deadline passed before the prompt was computed")
            self._events.on_error(state, error)

    def _start_waiting(self, now_s: float) -> None:
        """Give rows to waiting sequences, as many as this chunk has room for."""
        if self._is_held:
            return
        self._queue_deepened(now_s)
        budget = self._chunk_tokens - sum(_remaining(job) for job in self._active)
        self.is_stalled = False
        self._queue.take(self._try_start, token_budget=budget, now_s=now_s)

    def _queue_deepened(self, now_s: float) -> None:
        """Queue those who waited for layers that are there now, as far as the queue has room."""
        depth = self._runner.num_layers
        for state in [s for s in self._shallow.values() if self._needs(s) <= depth]:
            try:
                self._queue.push(state, now_s=now_s, drain_tokens_per_s=self.tokens_per_s)
            except Overloaded:
                return
            del self._shallow[state.sequence_id]

    def _needs(self, state: SequenceState) -> int:
        """Layers that a sequence's first token may need; 0 where any will do."""
        exits = state.exits
        if exits.policy != "strict" or state.output_ids or not state.sampling.max_tokens:
            return 0
        return min(exits.max_depth or self._full_depth, self._full_depth)

    @property
    def _is_ahead(self) -> bool:
        """Whether enough sequences wait for a place at a decode replica."""
        return self.slots.num_held - self._num_placed() >= self._max_unplaced

    def _try_start(self, state: SequenceState) -> bool:
        """Start one sequence; False when it must wait for the hand-offs of others."""
        if self._is_ahead:
            return False
        try:
            slot = self._reserve(state)
        except KVCacheExhausted:
            self.is_stalled = True
            return False
        except QuadrigaError as exc:
            self._events.on_error(state, exc)
            return True
        self._runner.attach(slot.row, state)
        self._active.append(_Job(state, slot.row))
        self._events.on_start(state, slot.row)
        return True

    def _reserve_prompt(self, state: SequenceState) -> Slot:
        return self.slots.reserve(state.sequence_id, num_prefill_tokens(state))

    def _schedule(self) -> list[tuple[_Job, PrefillChunk]]:
        """Fill the token budget from the active jobs, oldest first."""
        batch: list[tuple[_Job, PrefillChunk]] = []
        budget = self._chunk_tokens
        for job in self._active:
            if budget <= 0:
                break
            num_tokens = min(budget, _remaining(job))
            chunk = chunk_of(
                job.state,
                row=job.row,
                start=job.done_tokens,
                stop=job.done_tokens + num_tokens,
                num_layers=self._runner.num_layers,
            )
            batch.append((job, chunk))
            budget -= num_tokens
        return batch

    def _finish_prompt(self, job: _Job, token: SampledToken) -> None:
        state = job.state
        self._active.remove(job)
        self._computed[state.sequence_id] = state
        logprobs: list[TokenLogprob] | None = None
        if state.sampling.max_tokens > 0:
            append_token(state, token)
            logprobs = [token.logprob] if token.logprob is not None else None
        finish = finish_reason(
            state,
            eos_token_ids=self._eos_token_ids,
            row_capacity_tokens=self._runner.row_capacity_tokens,
        )
        if finish is not None:
            self.release(state.sequence_id)
        self._events.on_first_token(state, logprobs, token.prompt_logprobs, finish)

    def _finish_rebuild(self, job: _Job) -> None:
        self._active.remove(job)
        self._computed[job.state.sequence_id] = job.state
        self._events.on_rebuilt(job.state)

    def check(self) -> None:
        """Verify who holds a slot against who is being computed or handed off.

        Raises: InvariantViolation.
        """
        self.slots.check()
        if sorted(self.slots.holders) != sorted(self.holders):
            raise InvariantViolation(
                f"slots are held for {sorted(self.slots.holders)}; {sorted(self.holders)} are "
                "being computed or handed off"
            )

    @property
    def holders(self) -> list[str]:
        """Sequences that are being computed or handed off."""
        return [*(job.state.sequence_id for job in self._active), *self._computed]

    @property
    def needs_depth(self) -> int:
        """Layers that sequences wait for; 0 where none do."""
        return max((self._needs(s) for s in self._shallow.values()), default=0)

    @property
    def _is_deepened(self) -> bool:
        depth = self._runner.num_layers
        return any(self._needs(s) <= depth for s in self._shallow.values())

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._shallow)

    @property
    def waiting_tokens(self) -> int:
        """Tokens not yet computed, queued and active."""
        tokens = sum(num_prefill_tokens(s) for s in self._shallow.values())
        return tokens + self._queue.num_tokens + sum(_remaining(job) for job in self._active)

    @property
    def num_held(self) -> int:
        """Sequences that hold a row: being computed or being handed off."""
        return self.slots.num_held

    @property
    def used_tokens(self) -> int:
        active = sum(job.done_tokens for job in self._active)
        return active + sum(num_prefill_tokens(s) for s in self._computed.values())

    @property
    def tokens_per_s(self) -> float:
        return self._rate.per_s(now_s=self._clock.now_s())

    @property
    def step_time_s(self) -> float:
        return self._step_time.value


def _remaining(job: _Job) -> int:
    return num_prefill_tokens(job.state) - job.done_tokens


def _group_ends(num_layers: int, layer_groups: int) -> list[int]:
    """Layer counts after which a group is complete: as even as can be, the last is all layers."""
    groups = min(layer_groups, num_layers)
    return [round(num_layers * (g + 1) / groups) for g in range(groups)]
