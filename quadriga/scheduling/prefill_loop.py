"""The prefill replica's step: take prompts, compute a chunk of them, return what is ready."""

from __future__ import annotations

import sys
from collections.abc import Callable

from quadriga.clock import Clock
from quadriga.core.output import EngineOutput
from quadriga.core.request import SampledToken, SequenceState, TokenLogprob
from quadriga.errors import (
    DeadlineExceeded,
    DeviceMemoryExhausted,
    InvariantViolation,
    KVCacheExhausted,
    QuadrigaError,
    Unavailable,
)
from quadriga.interfaces import ModelRunner, PrefillChunk
from quadriga.scheduling.meters import Ewma, RateMeter, StepMeter
from quadriga.scheduling.prefill_queue import PrefillQueue, find_starving
from quadriga.scheduling.prefixes.cache import PrefixCache
from quadriga.scheduling.sequence import NO_ROW, RunningSequence, SequenceStatus, append_token
from quadriga.scheduling.slots import Slot, SlotTable
from quadriga.scheduling.transfer.rebuild import Replays, check_record, chunk_of, num_prefill_tokens

HELD_AFTER_S = 1.0  # without a decode replica; before, a sequence is just on its way to one
RATE_WINDOW_S = 10.0
PrefillOutput = tuple[RunningSequence, EngineOutput | None]
"""A sequence whose prompt is done, or that ended; and its output. None: its KV was rebuilt, and it
has nothing new to emit."""


class PrefillLoop:
    """Chunked prefill over a bounded queue.

    A sequence passes through: queued → prefilling (has a row, chunks are computed) → computed (row
    kept until `release`, so that a failed hand-off can be repeated) → finished.

    A prompt begins with what the cache of prefixes has of it, and waits where another one computes
    the very block that it needs next. So equal prompts that come together are computed once.

    Nothing tests a prompt's own token, so a strict sequence stays queued until the layers are
    loaded that it may need.

    Args:
        full_depth: Layers of the whole model; 0: those that are loaded are all.
        replays: Which skipped positions of a sequence that is rebuilt run the layers after all.
        may_deepen: More of them may be loaded while it serves: strict sequences wait for them.
        max_unplaced: No prompt is begun while so many sequences that hold a row have none at a
            decode replica, so that a full decode class is not met by ever more first tokens. Those
            that are less important than the prompt do not count: it may take a place from others.
            Those that end with their first token need none: they do not count, and are begun.
        reserve: Promises a sequence its row in `slots`, where it goes on to decode in that row;
            None: for its prompt alone. Raises as `SlotTable.reserve`.
        prefixes: Keeps what was computed for prompts that begin alike; None: every prompt is
            computed whole.
        on_start: Called in a step before the first chunk of a sequence is computed.
        on_kv: Called with (sequence, chunk, first layer, number of layers) in a step, when KV of
            these layers is complete at the chunk's positions; deeper layers follow.

    Attributes:
        max_unplaced: As given; may be changed at any time.
        running: Sequences that hold a row: being computed, or computed.
        meter: What its steps cost.
        is_stalled: A sequence whose turn it is found no room. Nobody else begins before it until
            some is given back: small ones would take it for ever.

    Not thread-safe: one thread calls everything.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        slots: SlotTable,
        queue: PrefillQueue,
        eos_token_ids: tuple[int, ...],
        chunk_tokens: int,
        layer_groups: int,
        clock: Clock,
        full_depth: int = 0,
        may_deepen: bool = True,
        replays: Replays | None = None,
        max_unplaced: int = sys.maxsize,
        reserve: Callable[[SequenceState], Slot] | None = None,
        prefixes: PrefixCache | None = None,
        on_start: Callable[[RunningSequence], None] | None = None,
        on_kv: Callable[[RunningSequence, PrefillChunk, int, int], None] | None = None,
    ) -> None:
        self.slots = slots
        self.running: list[RunningSequence] = []
        self.prefixes = prefixes
        self._reserve = reserve or self._reserve_prompt
        self._on_start = on_start
        self._on_kv = on_kv
        self.max_unplaced = max_unplaced
        self._full_depth = full_depth
        self._may_deepen = may_deepen
        self._replays = replays
        self._runner = runner
        self._queue = queue
        queue.num_layers = runner.num_layers
        self._eos_token_ids = eos_token_ids
        self._chunk_tokens = self._fitting_tokens = chunk_tokens
        self._layer_groups = layer_groups
        self._group_ends = _group_ends(runner.num_layers, layer_groups)
        self._is_held = False
        self._is_turn_of_starving = False
        self._clock = clock
        self.is_stalled = False
        self.meter = StepMeter()
        self._rate = RateMeter(window_s=RATE_WINDOW_S, now_s=clock.now_s())
        self._step_time = Ewma(0.1)

    def submit(self, sequence: RunningSequence) -> None:
        """Queue a sequence, a new one or one that is to be rebuilt.

        Raises:
            Overloaded: The queue is full, or too many wait for layers.
            Unavailable: It is strict, and layers that it may need are not loaded, nor will be.
            InvariantViolation: Its exit record does not cover its output.
        """
        check_record(sequence.state)
        sequence.min_layers = self._min_layers(sequence.state)
        here = self._runner.num_layers
        if sequence.min_layers > here and not self._may_deepen:
            policy = f"exit_policy: {sequence.state.exits.policy!r} may need"
            what = policy if sequence.state.sampling.pooling is None else "embeddings need"
            raise Unavailable(
                f"{what} {sequence.min_layers} layers, and this replica has {here}; retry shortly, "
                "it goes to one that has them",
                retry_after_s=1.0,
            )
        now_s = self._clock.now_s()
        rate = self._rate.per_s(now_s=now_s)
        self._queue.push(sequence, now_s=now_s, drain_tokens_per_s=rate)
        if self._queue.first is sequence:  # who found no room is not next any more
            self.is_stalled = False

    def release(self, sequence_id: str) -> bool:
        """Let go of a sequence in whatever state it is: cancelled, or handed off for good."""
        sequence = self._queue.find(sequence_id)
        if sequence is not None:
            self._queue.remove(sequence)
        else:
            sequence = self._find(sequence_id)
            if sequence is None:
                return False
            self.running.remove(sequence)
            self.slots.release(sequence_id)
            self._runner.detach(sequence.row)
        self.is_stalled = False
        sequence.row = NO_ROW
        sequence.status = SequenceStatus.FINISHED
        return True

    def hand_over(self, sequence_id: str) -> None:
        """A computed sequence goes on to decode in its row: the slot is its new loop's."""
        sequence = self._find(sequence_id)
        assert sequence is not None, "its prompt is computed"
        self.running.remove(sequence)

    def find(self, sequence_id: str) -> RunningSequence | None:
        """A sequence that is queued, computed, or handed on."""
        return self._queue.find(sequence_id) or self._find(sequence_id)

    def _find(self, sequence_id: str) -> RunningSequence | None:
        return next((s for s in self.running if s.state.sequence_id == sequence_id), None)

    def retry(self) -> None:
        """Others gave back what was reserved: who waits for it is tried again."""
        self.is_stalled = False

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        if _prefilling(self.running):
            return True
        if not len(self._queue) or self.is_stalled or self._is_held:
            return False
        first = self._queue.first
        if first is not None and not self._may_wait(first):
            first = self._queue.first_ending
        return first is not None and self._may_begin(first)

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
        self._queue.num_layers = self._runner.num_layers
        self._group_ends = _group_ends(self._runner.num_layers, self._layer_groups)
        if kv_capacity_tokens is not None:
            self.slots.resize(kv_capacity_tokens)

    def step(self) -> list[PrefillOutput]:
        """Compute one chunk: receive → schedule → run. Returns what is new, in its order."""
        self.meter.begin(self._clock.now_s())
        outputs = self._expire()
        self._step(outputs)
        if not self.has_work:
            self.meter.rest(self._clock.now_s())
        return outputs

    def _step(self, outputs: list[PrefillOutput]) -> None:
        started_s = self._clock.now_s()
        self._start_waiting(started_s, outputs)
        batch = self._schedule(started_s)
        if not batch:
            return
        chunks = [chunk for _, chunk in batch]
        ends = self._group_ends
        group_start = 0

        def layers_done(first_layer: int, num_layers: int) -> None:
            nonlocal group_start
            done = first_layer + num_layers
            if done not in ends:
                return
            if self._on_kv is not None:
                for sequence, chunk in batch:
                    self._on_kv(sequence, chunk, group_start, done - group_start)
            group_start = done

        try:
            sampled = self._runner.prefill(chunks, layers_done)
        except DeviceMemoryExhausted:
            if self._fitting_tokens == 1:
                raise
            self._fitting_tokens //= 2  # the next step's pass needs less
            return
        self._fitting_tokens = min(2 * self._fitting_tokens, self._chunk_tokens)
        now_s = self._clock.now_s()
        num_tokens = sum(len(c.token_ids) for c in chunks)
        self.meter.ran(len(chunks), num_tokens)
        self._rate.add(num_tokens, now_s=now_s)
        self._step_time.add(now_s - started_s)
        for (sequence, chunk), token in zip(batch, sampled, strict=True):
            sequence.num_computed += len(chunk.token_ids)
            if self.prefixes is not None:
                self.prefixes.store(sequence, chunk.start, chunk.stop)
            if token is not None:
                outputs.append((sequence, self._finish_prompt(sequence, token)))
            elif not _remaining(sequence):
                sequence.status = SequenceStatus.WAITING_FOR_PLACEMENT
                sequence.since_s = now_s
                outputs.append((sequence, None))

    def _expire(self) -> list[PrefillOutput]:
        """End the sequences whose deadline passed before their prompt was computed."""
        now_unix_s = self._clock.unix_s()
        late = self._queue.expired(now_unix_s=now_unix_s)
        late += [s for s in _prefilling(self.running) if s.state.deadline_unix_s <= now_unix_s]
        outputs: list[PrefillOutput] = []
        for sequence in late:
            self.release(sequence.state.sequence_id)
            error = DeadlineExceeded("the deadline passed before the prompt was computed")
            outputs.append((sequence, _failure(sequence.state, error)))
        return outputs

    def _start_waiting(self, now_s: float, outputs: list[PrefillOutput]) -> None:
        """Give rows to waiting sequences, as many as this chunk has room for."""
        if self._is_held:
            return

        self.is_stalled = False

        def start(sequence: RunningSequence) -> bool:
            """Start one sequence; False when it must wait for others."""
            if self.is_stalled or not self._may_begin(sequence):
                return False
            if self.prefixes is not None:
                self.prefixes.look(sequence)
            try:
                slot = self._reserve(sequence.state)
            except KVCacheExhausted:
                self.is_stalled = True
                return False
            except QuadrigaError as exc:
                sequence.status = SequenceStatus.FINISHED
                outputs.append((sequence, _failure(sequence.state, exc)))
                return True
            try:
                self._runner.attach(slot.row, sequence.state)
            except BaseException:
                self.slots.release(sequence.state.sequence_id)
                raise
            sequence.row, sequence.status = slot.row, SequenceStatus.PREFILLING
            self.running.append(sequence)
            if self._on_start is not None:
                self._on_start(sequence)
            if self.prefixes is not None:
                self.prefixes.totals.queries += len(sequence.state.prompt_ids)
                self._share(sequence, self.prefixes)
            return True

        first = self._queue.first
        is_full = first is not None and not self._may_wait(first)
        self._queue.take(start, now_s=now_s, only_ending=is_full)

    def _min_layers(self, state: SequenceState) -> int:
        """Layers that a sequence's first token may need; 0 where any will do."""
        if state.sampling.pooling is not None:
            return self._full_depth
        exits = state.exits
        if not exits.is_strict or state.output_ids or not state.sampling.max_tokens:
            return 0
        return min(exits.max_depth or self._full_depth, self._full_depth)

    def _may_begin(self, sequence: RunningSequence) -> bool:
        """Whether a chunk has tokens left for a sequence, and it may wait for a decode replica.

        Those that are less important come after it in both, so they do not count.
        """
        ahead = [s for s in self.running if s.state.priority <= sequence.state.priority]
        num_left = sum(_remaining(s) for s in _prefilling(ahead))
        return num_left < self._chunk_tokens and self._may_wait(sequence)

    def _may_wait(self, sequence: RunningSequence) -> bool:
        """Whether a sequence needs no decode replica, or few before it have none."""
        priority = sequence.state.priority
        ahead = [s for s in self.running if s.state.priority <= priority and s.goes_on]
        return not sequence.goes_on or sum(not s.is_placed for s in ahead) < self.max_unplaced

    @property
    def num_unplaced(self) -> int:
        """Sequences that have had no decode replica for `HELD_AFTER_S` since their prompts."""
        waiting, until_s = SequenceStatus.WAITING_FOR_PLACEMENT, self._clock.now_s() - HELD_AFTER_S
        held = [s for s in self.running if s.status is waiting and s.since_s <= until_s]
        return sum(not s.is_placed for s in held)

    def _reserve_prompt(self, state: SequenceState) -> Slot:
        return self.slots.reserve(state.sequence_id, num_prefill_tokens(state))

    def _schedule(self, now_s: float) -> list[tuple[RunningSequence, PrefillChunk]]:
        """Fill the token budget from the prompts under way, the most important first.

        Equals go on in the order in which they began. In every other pass one that is starving
        comes first, so that none is stopped for ever.
        """
        batch: list[tuple[RunningSequence, PrefillChunk]] = []
        budget = self._fitting_tokens
        under_way: set[bytes] = set()
        line = sorted(_prefilling(self.running), key=lambda s: s.state.priority)
        self._is_turn_of_starving = not self._is_turn_of_starving
        starving = find_starving(line, now_s) if self._is_turn_of_starving else None
        for sequence in sorted(line, key=lambda s: s is not starving):
            if budget <= 0:
                break
            if self.prefixes is not None and sequence.block_keys:
                self._share(sequence, self.prefixes)
                coming = sequence.block_keys[sequence.num_computed // self.prefixes.block_tokens :]
                if coming and coming[0] in under_way:
                    continue
                under_way.update(coming)
            num_tokens = min(budget, _remaining(sequence))
            chunk = chunk_of(
                sequence.state,
                row=sequence.row,
                start=sequence.num_computed,
                stop=sequence.num_computed + num_tokens,
                num_layers=self._runner.num_layers,
                replays=self._replays,
            )
            batch.append((sequence, chunk))
            budget -= num_tokens
        return batch

    def _share(self, sequence: RunningSequence, prefixes: PrefixCache) -> None:
        """Take over what is there of the sequence's prompt, and pass it on as if it was computed.

        It counts as computed in the rate, which says how soon the queue is empty.
        """
        first, num_tokens = sequence.num_computed, prefixes.load(sequence)
        if not num_tokens:
            return
        sequence.num_computed += num_tokens
        sequence.num_cached += num_tokens
        self._rate.add(num_tokens, now_s=self._clock.now_s())
        if self._on_kv is None:
            return
        for start in range(first, first + num_tokens, self._chunk_tokens):
            stop = min(start + self._chunk_tokens, first + num_tokens)
            chunk = PrefillChunk(
                sequence.row, sequence.state.prompt_ids[start:stop], start, is_last=False
            )
            begin = 0
            for end in self._group_ends:
                self._on_kv(sequence, chunk, begin, end - begin)
                begin = end

    def _finish_prompt(self, sequence: RunningSequence, token: SampledToken) -> EngineOutput:
        state = sequence.state
        if token.error is not None:
            self.release(state.sequence_id)
            return _failure(state, token.error)
        sequence.status = SequenceStatus.WAITING_FOR_PLACEMENT
        sequence.since_s = self._clock.now_s()
        logprobs: list[TokenLogprob] | None = None
        if state.sampling.max_tokens > 0:
            append_token(state, token)
            logprobs = [token.logprob] if token.logprob is not None else None
            state.logprobs += logprobs or ()
            state.prompt_logprobs = token.prompt_logprobs
        sequence.set_end(
            eos_token_ids=self._eos_token_ids, row_capacity_tokens=self._runner.row_capacity_tokens
        )
        finish = sequence.finish_reason()
        if finish is not None:
            self.release(state.sequence_id)
        return EngineOutput(
            state.sequence_id,
            state.epoch,
            token_ids=list(state.output_ids),
            exit_layers=list(state.exit_layers),
            logprobs=logprobs,
            prompt_logprobs=token.prompt_logprobs,
            finish=finish,
            cached_tokens=sequence.num_cached,
            embedding=token.embedding,
        )

    def check(self) -> None:
        """Verify which sequences hold a slot. Raises: InvariantViolation."""
        self.slots.check()
        running = sorted(s.state.sequence_id for s in self.running)
        if sorted(self.slots.owners) != running:
            raise InvariantViolation(
                f"slots are held for {sorted(self.slots.owners)}; {running} are "
                "being computed or handed off"
            )

    @property
    def states(self) -> list[SequenceState]:
        """Of all sequences that are queued, computed, or handed on."""
        return self._queue.states + [s.state for s in self.running]

    @property
    def ending(self) -> tuple[int, int]:
        """Sequences here that end with their first token, and the tokens of their prompts."""
        states = [state for state in self.states if state.sampling.max_tokens <= 1]
        return len(states), sum(map(num_prefill_tokens, states))

    @property
    def queued_tokens(self) -> int:
        """Tokens of sequences that have no row yet."""
        return self._queue.num_tokens

    @property
    def needs_depth(self) -> int:
        """Layers that sequences wait for; 0 where none do."""
        return self._queue.needs_layers

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Tokens not yet computed, of sequences that are queued or under way."""
        return self._queue.num_tokens + sum(_remaining(s) for s in _prefilling(self.running))

    @property
    def waiting_by_priority(self) -> tuple[tuple[int, int], ...]:
        """`waiting_tokens` of each priority that has some."""
        tokens = self._queue.tokens_by_priority
        for sequence in _prefilling(self.running):
            tokens[sequence.state.priority] += _remaining(sequence)
        return tuple(sorted(tokens.items()))

    @property
    def num_held(self) -> int:
        """Sequences that hold a row: being computed or being handed off."""
        return self.slots.num_held

    @property
    def used_tokens(self) -> int:
        return sum(s.num_computed for s in self.running)

    @property
    def tokens_per_s(self) -> float:
        return self._rate.per_s(now_s=self._clock.now_s())

    @property
    def step_time_s(self) -> float:
        return self._step_time.value


def _prefilling(running: list[RunningSequence]) -> list[RunningSequence]:
    return [s for s in running if s.status is SequenceStatus.PREFILLING]


def _remaining(sequence: RunningSequence) -> int:
    return num_prefill_tokens(sequence.state) - sequence.num_computed


def _failure(state: SequenceState, error: QuadrigaError) -> EngineOutput:
    return EngineOutput(state.sequence_id, state.epoch, len(state.output_ids), error=error)


def _group_ends(num_layers: int, layer_groups: int) -> list[int]:
    """Layer counts after which a group is complete: as even as can be, the last is all layers."""
    groups = min(layer_groups, num_layers)
    return [round(num_layers * (g + 1) / groups) for g in range(groups)]
