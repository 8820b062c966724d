"""Which sequence holds which KV row, and how many tokens of cache are reserved for it.

Two ways to promise. `longest`: a sequence reserves the most it can grow to, so memory cannot run
out in mid-decode and no sequence is ever paused. `used`: it reserves what it has and what it will
probably add (`slot_reservation`), and grows by blocks beyond that; more sequences fit.
When the memory fills, promises that are not used yet are taken back (`trim`), and whoever owns the
table pauses some sequences (BATON).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quadriga.core.forecast import LengthPrediction
from quadriga.core.replica import Reservation
from quadriga.errors import ContextTooLong, InvariantViolation, KVCacheExhausted
from quadriga.policies.slot_reservation import promised_tokens

BLOCK_TOKENS = 16
"""Reservations are rounded up to blocks of this many tokens."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A KV row and the tokens promised to the sequence in it."""

    row: int
    reserved_tokens: int


def _nothing() -> None:
    """Nobody uses what is not promised."""


class SlotTable:
    """Rows and cache tokens of one engine, handed out and taken back.

    Rows are reused lowest first, which keeps the rows in use together.

    Attributes:
        reserved_tokens: Promised to all sequences together.
        on_promise: Called when more was promised, or there is less to promise.

    Not thread-safe: the engine's thread owns it.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        row_capacity_tokens: int,
        kv_capacity_tokens: int,
        reservation: Reservation = "longest",
    ) -> None:
        self.reservation = reservation
        self.num_rows = num_rows
        self.row_capacity_tokens = row_capacity_tokens
        self.kv_capacity_tokens = kv_capacity_tokens
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._slots: dict[str, Slot] = {}
        self.reserved_tokens = 0
        self.on_promise: Callable[[], None] = _nothing

    def reserve(
        self,
        sequence_id: str,
        max_total_tokens: int,
        num_tokens: int | None = None,
        *,
        upper_tokens: int = 1,
        prediction: LengthPrediction | None = None,
    ) -> Slot:
        """Promise a row to a sequence, and the room it needs.

        Args:
            num_tokens: What it has now; `longest` asks for neither this nor what follows.
            upper_tokens, prediction: What it will probably add; see `promised_tokens`.

        Raises:
            ContextTooLong: More than one row holds; no waiting helps.
            KVCacheExhausted: No row or not enough tokens are free now.
            InvariantViolation: The sequence holds a slot already.
        """
        if sequence_id in self._slots:
            raise InvariantViolation(f"sequence {sequence_id} already holds a slot")
        tokens = self.tokens_wanted(
            max_total_tokens, num_tokens, upper_tokens=upper_tokens, prediction=prediction
        )
        if not self._free_rows or self.reserved_tokens + tokens > self.kv_capacity_tokens:
            raise KVCacheExhausted(
                f"no room for {tokens} tokens: {len(self._free_rows)} of {self.num_rows} rows and "
                f"{self.kv_capacity_tokens - self.reserved_tokens} of {self.kv_capacity_tokens} "
                "tokens are free"
            )
        slot = Slot(self._free_rows.pop(), tokens)
        self._slots[sequence_id] = slot
        self.reserved_tokens += tokens
        self.on_promise()
        return slot

    def tokens_wanted(
        self,
        max_total_tokens: int,
        num_tokens: int | None = None,
        *,
        upper_tokens: int = 1,
        prediction: LengthPrediction | None = None,
    ) -> int:
        """What `reserve` would promise.

        Raises:
            ContextTooLong: More than one row holds; no waiting helps.
        """
        if max_total_tokens > self.row_capacity_tokens:
            raise ContextTooLong(
                f"{max_total_tokens} tokens are more than the {self.row_capacity_tokens} one "
                "sequence may have here; shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        if self.reservation == "longest" or not num_tokens:
            return self._rounded(max_total_tokens)
        return self._rounded(
            promised_tokens(
                num_tokens,
                max_total_tokens,
                upper_tokens=upper_tokens,
                num_held=self.num_held,
                prediction=prediction,
            )
        )

    def grow(self, sequence_id: str, num_tokens: int) -> bool:
        """Promise a sequence room for `num_tokens`; False where no block is free.

        Raises: InvariantViolation: It holds no slot.
        """
        slot = self._slot(sequence_id)
        more = self._rounded(num_tokens) - slot.reserved_tokens
        if more <= 0:
            return True
        if self.reserved_tokens + more > self.kv_capacity_tokens:
            return False
        self._slots[sequence_id] = replace(slot, reserved_tokens=slot.reserved_tokens + more)
        self.reserved_tokens += more
        self.on_promise()
        return True

    def trim(self, sequence_id: str, num_tokens: int) -> int:
        """Take back what a sequence was promised beyond room for `num_tokens`.

        Returns:
            The tokens that are free now and were not.

        Raises: InvariantViolation: It holds no slot.
        """
        slot = self._slot(sequence_id)
        freed = slot.reserved_tokens - self._rounded(num_tokens)
        if freed <= 0:
            return 0
        self._slots[sequence_id] = replace(slot, reserved_tokens=slot.reserved_tokens - freed)
        self.reserved_tokens -= freed
        return freed

    def _slot(self, sequence_id: str) -> Slot:
        slot = self._slots.get(sequence_id)
        if slot is None:
            raise InvariantViolation(f"sequence {sequence_id} holds no slot")
        return slot

    def _rounded(self, num_tokens: int) -> int:
        return min(-(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS, self.row_capacity_tokens)

    def release(self, sequence_id: str) -> Slot | None:
        """Take back a sequence's slot; None where it holds none."""
        slot = self._slots.pop(sequence_id, None)
        if slot is None:
            return None
        self.reserved_tokens -= slot.reserved_tokens
        self._free_rows.append(slot.row)
        self._free_rows.sort(reverse=True)
        return slot

    def resize(self, kv_capacity_tokens: int) -> None:
        """Change how many tokens may be promised; what is promised stays so, and where that is
        more, nothing is promised before it is given back."""
        self.kv_capacity_tokens = kv_capacity_tokens
        self.on_promise()

    def get(self, sequence_id: str) -> Slot | None:
        return self._slots.get(sequence_id)

    @property
    def owners(self) -> list[str]:
        """Sequences that hold a slot."""
        return list(self._slots)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_held(self) -> int:
        return len(self._slots)

    def check(self) -> None:
        """Verify the table against itself. Raises: InvariantViolation."""
        rows = [slot.row for slot in self._slots.values()] + self._free_rows
        tokens = sum(slot.reserved_tokens for slot in self._slots.values())
        if sorted(rows) != list(range(self.num_rows)) or tokens != self.reserved_tokens:
            raise InvariantViolation(
                f"slot table is inconsistent: rows {sorted(rows)} of {self.num_rows}, "
                f"{tokens} tokens held, {self.reserved_tokens} counted"
            )
