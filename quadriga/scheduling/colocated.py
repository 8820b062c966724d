"""Prefill and decode in one process, over one runner: a prompt is decoded in the row it came into.

The two loops are the replicas' own. They share one table of slots, so the hand-off is a change of
owner: a sequence reserves its row and its tokens as on a decode replica when its prompt begins, and
no KV is copied.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

from quadriga.checkpoint.exits import ExitCounters
from quadriga.clock import Clock
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.output import EngineOutput
from quadriga.core.replica import Reservation
from quadriga.core.request import SequenceState
from quadriga.errors import InvariantViolation
from quadriga.interfaces import ModelRunner, PrefillChunk
from quadriga.interrupts import held_back
from quadriga.policies.rebatching import Rebatcher
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.prefill_loop import PrefillLoop, PrefillOutput
from quadriga.scheduling.prefill_queue import PrefillQueue
from quadriga.scheduling.prefixes.cache import find_prefix_cache
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.slots import Slot, SlotTable
from quadriga.scheduling.transfer.rebuild import Replays

AHEAD = 2
"""Of a run, this many sequences for each slot are running or queued: prompts of similar length are
found among them."""


@dataclass(slots=True)
class _Run:
    """The sequences of one call of `run`.

    Attributes:
        names: Those that have not ended.
        outputs: Outputs that the caller has not taken yet.
    """

    names: set[str] = field(default_factory=set)
    outputs: list[EngineOutput] = field(default_factory=list)


class ColocatedLoop:
    """A `PrefillLoop` and a `DecodeLoop` over the same rows.

    Args:
        spec: What the runner was loaded from.
        chunk_tokens: Most prompt tokens in one forward pass.
        max_age_s, max_queued_sequences, max_queued_tokens: See `PrefillQueue`. At an age of 0 the
            first to come is the first to be computed; there are no limits where the caller holds
            the prompts.
        max_slots: Sequences at once, at most; None: as many as the runner has rows.
        kv_capacity_tokens: Tokens of KV over all rows; None: as many as `spec` says.
        rebatcher, counters, is_partial: See `DecodeLoop`.
        prefix_caching: Prompts that begin alike share KV, and those that go on from an answer; see
            `PrefixCache`.
        full_depth, may_deepen, replays: See `PrefillLoop`.

    Attributes:
        prefill, decode: The loops.

    Not thread-safe: one thread calls everything.
    """

    def __init__(
        self,
        runner: ModelRunner,
        spec: EngineSpec,
        *,
        clock: Clock,
        chunk_tokens: int = 512,
        max_age_s: float = 0.0,
        max_queued_sequences: int = sys.maxsize,
        max_queued_tokens: int = sys.maxsize,
        max_slots: int | None = None,
        kv_capacity_tokens: int | None = None,
        reservation: Reservation = "longest",
        rebatcher: Rebatcher | None = None,
        counters: ExitCounters | None = None,
        is_partial: bool = False,
        prefix_caching: bool = False,
        full_depth: int = 0,
        may_deepen: bool = True,
        replays: Replays | None = None,
    ) -> None:
        eos_token_ids = spec.checkpoint.eos_token_ids
        slots = SlotTable(
            num_rows=min(max_slots or runner.num_rows, runner.num_rows),
            row_capacity_tokens=runner.row_capacity_tokens,
            kv_capacity_tokens=kv_capacity_tokens or spec.kv_capacity_tokens,
            reservation=reservation,
        )
        prefixes = find_prefix_cache(runner, slots, spec, prefix_caching)
        self.decode = DecodeLoop(
            runner=runner,
            slots=slots,
            eos_token_ids=eos_token_ids,
            clock=clock,
            rebatcher=rebatcher,
            counters=counters,
            criterion=spec.exits.criterion,
            is_partial=is_partial,
            prefixes=prefixes,
        )
        self.prefill = PrefillLoop(
            runner=runner,
            slots=slots,
            queue=PrefillQueue(
                max_sequences=max_queued_sequences,
                max_tokens=max_queued_tokens,
                max_age_s=max_age_s,
            ),
            eos_token_ids=eos_token_ids,
            chunk_tokens=chunk_tokens,
            layer_groups=1,
            clock=clock,
            full_depth=full_depth,
            may_deepen=may_deepen,
            replays=replays,
            reserve=self._reserve,
            prefixes=prefixes,
            on_kv=self.on_kv,
        )
        self.decode.on_leave = self.prefill.retry
        self._runs: dict[str, _Run] = {}

    def run(self, states: Iterable[SequenceState]) -> Generator[list[EngineOutput]]:
        """Run sequences to their ends, and yield their outputs, pass by pass.

        Several runs may be read in turn: the one that is read runs the passes, for all. Closing
        the generator lets go of the sequences that have not ended. Ctrl-C waits for a pass's end.
        """
        waiting, run = deque(states), _Run()
        most = AHEAD * self.decode.slots.num_rows
        try:
            while waiting or run.names or run.outputs:
                with held_back():
                    while waiting and len(self._runs) < most:
                        state = waiting.popleft()
                        self._runs[state.sequence_id] = run
                        run.names.add(state.sequence_id)
                        self.submit(state)
                    if not run.outputs:
                        self._deliver()
                if run.outputs:
                    outputs, run.outputs = run.outputs, []
                    yield outputs
        finally:
            with held_back():
                for name in list(run.names):
                    self.release(name)

    def _deliver(self) -> None:
        """Run one pass, and hand its outputs to their runs. Raises: InvariantViolation."""
        outputs = self.step()
        for emission in outputs:
            self._runs[emission.sequence_id].outputs.append(emission)
            if emission.finish is not None or emission.error is not None:
                self._forget(emission.sequence_id)
        if not outputs and not self.has_work:
            raise InvariantViolation(f"{len(self._runs)} sequences wait, and nothing can run")

    def _forget(self, sequence_id: str) -> None:
        run = self._runs.pop(sequence_id, None)
        if run is not None:
            run.names.discard(sequence_id)

    def submit(self, state: SequenceState) -> None:
        """Queue a sequence, a new one or one that is to be rebuilt. Raises: InvariantViolation."""
        self.prefill.submit(RunningSequence(state))

    def release(self, sequence_id: str) -> None:
        """Let go of a sequence, whatever its status is; an unknown one is no error."""
        with held_back():
            self._forget(sequence_id)
            if self.decode.export.held(sequence_id) is not None:
                self.decode.leave(sequence_id)
            else:
                self.prefill.release(sequence_id)

    def compute_prompts(self) -> list[EngineOutput]:
        """Run prompts while there is room for more; returns their first tokens."""
        outputs = []
        while self.prefill.has_work:
            outputs += self.step()
        return outputs

    def step(self) -> list[EngineOutput]:
        """Run one pass: of prompts while there is room for more, else one step of the batch.

        Returns:
            The new outputs; of each sequence at most one.
        """
        if self.prefill.has_work:
            return [output for _, output in self.step_prompts() if output is not None]
        return [emission for _, emission in self.decode.step()]

    def step_prompts(self) -> list[PrefillOutput]:
        """Compute a chunk of prompts, if there is room for any; who is done decodes from now on.

        A replica calls it in turn with `decode.step`, so that no answer waits for more than a
        chunk.
        """
        computed = self.prefill.step()
        for sequence, output in computed:
            if output is None or (output.finish is None and output.error is None):
                self.on_computed(sequence)
        return computed

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.prefill.has_work or self.decode.has_work

    def check(self) -> None:
        """Verify the tables of both loops against the slots. Raises: InvariantViolation."""
        slots = self.decode.slots
        slots.check()
        self.decode.check()
        paused = self.decode.is_paused
        decoding = [s.sequence_id for s in self.decode.running if not paused(s.sequence_id)]
        known = sorted([*(s.state.sequence_id for s in self.prefill.running), *decoding])
        if sorted(slots.owners) != known:
            raise InvariantViolation(
                f"slots are held for {sorted(slots.owners)}; {known} are computed or run"
            )

    def _reserve(self, state: SequenceState) -> Slot:
        return self.decode.promise(
            state.sequence_id, state.max_total_tokens, state.num_tokens, state.priority
        )

    def on_kv(
        self, sequence: RunningSequence, chunk: PrefillChunk, first_layer: int, num_layers: int
    ) -> None:
        """KV of these layers is complete at the chunk's positions."""

    def on_computed(self, sequence: RunningSequence) -> None:
        """A prompt is computed, or the KV of a lost sequence is rebuilt."""
        self.join(sequence.state)

    def join(self, state: SequenceState) -> None:
        """Let a sequence whose prompt is done decode from the next step on."""
        self.prefill.hand_over(state.sequence_id)
        self.decode.join(state, is_attached=True)
