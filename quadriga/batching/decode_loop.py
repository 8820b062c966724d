"""The decode replica's step: one token for every running sequence, joins and leaves in between."""

from __future__ import annotations

from quadriga.batching.finish import append_token, finish_reason
from quadriga.batching.rates import Ewma, RateMeter
from quadriga.batching.slots import Slot, SlotTable
from quadriga.clock import Clock
from quadriga.errors import DeadlineExceeded, InvariantViolation
from quadriga.interfaces import ModelRunner
from quadriga.types import Emission, SequenceState

RATE_WINDOW_S = 10.0


class DecodeLoop:
    """Continuous batch over KV rows.

    A sequence passes through: reserved (its row is being filled by a transfer) → running → gone.
    It joins between two steps, at no cost to the others, and leaves the moment it is finished,
    cancelled, late, or taken away.

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
    ) -> None:
        self.slots = slots
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._running: dict[int, SequenceState] = {}  # row → state, in order of joining
        self._rows: dict[str, int] = {}  # sequence id → row, running sequences only
        self._rate = RateMeter(window_s=RATE_WINDOW_S, now_s=clock.now_s())
        self._step_time = Ewma(0.1)

    def reserve(self, sequence_id: str, max_total_tokens: int) -> Slot:
        """Promise a row to a sequence on its way. Raises: KVCacheExhausted, ContextTooLong."""
        return self.slots.reserve(sequence_id, max_total_tokens)

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
        self._running[slot.row] = state
        self._rows[state.sequence_id] = slot.row

    def leave(self, sequence_id: str) -> SequenceState | None:
        """Take a sequence out and free its slot, reserved or running.

        Returns:
            Its state when it was running, else None.
        """
        row = self._rows.pop(sequence_id, None)
        slot = self.slots.release(sequence_id)
        if row is None:
            return None
        if slot is None or slot.row != row:
            raise InvariantViolation(f"sequence {sequence_id} ran in row {row} but holds {slot}")
        self._runner.detach(row)
        return self._running.pop(row)

    def step(self) -> list[tuple[str, Emission]]:
        """Schedule → run → commit → emit. Returns (ingress id, emission) pairs."""
        emissions = self._expire()
        if not self._running:
            return emissions
        started_s = self._clock.now_s()
        rows = list(self._running)
        tokens = self._runner.decode(rows)
        for row, token in zip(rows, tokens, strict=True):
            state = self._running[row]
            append_token(state, token)
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
        now_s = self._clock.now_s()
        self._step_time.add(now_s - started_s)
        self._rate.add(len(rows), now_s=now_s)
        return emissions

    def _expire(self) -> list[tuple[str, Emission]]:
        now_unix_s = self._clock.unix_s()
        late = [s for s in self._running.values() if s.deadline_unix_s <= now_unix_s]
        emissions = []
        for state in late:
            self.leave(state.sequence_id)
            error = DeadlineExceeded(
                f"the deadline passed after {len(state.output_ids)} tokens", param="deadline_ms"
            )
            emission = Emission(state.sequence_id, state.epoch, len(state.output_ids), error=error)
            emissions.append((state.ingress_id, emission))
        return emissions

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def running(self) -> list[SequenceState]:
        """States of the running sequences, in order of joining."""
        return list(self._running.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_reserved(self) -> int:
        """Sequences on their way here: a row is promised, nothing runs yet."""
        return self.slots.num_held - len(self._running)

    @property
    def used_tokens(self) -> int:
        """Tokens whose KV is held by running sequences."""
        return sum(state.num_tokens for state in self._running.values())

    @property
    def tokens_per_s(self) -> float:
        return self._rate.per_s(now_s=self._clock.now_s())

    @property
    def step_time_s(self) -> float:
        return self._step_time.value
