"""Rows and cache tokens: handed out once, taken back whole."""

from __future__ import annotations

import pytest

from quadriga.errors import ContextTooLong, InvariantViolation, KVCacheExhausted
from quadriga.scheduling.slots import SlotTable


def table(rows: int = 2, row: int = 64, total: int = 96) -> SlotTable:
    return SlotTable(num_rows=rows, row_capacity_tokens=row, kv_capacity_tokens=total)


def test_rows_run_out() -> None:
    slots = table(rows=1)
    slots.reserve("a", 10)
    with pytest.raises(KVCacheExhausted, match="0 of 1 rows"):
        slots.reserve("b", 10)


def test_tokens_run_out_and_come_back() -> None:
    slots = table()
    slots.reserve("a", 64)
    with pytest.raises(KVCacheExhausted, match="32 of 96 tokens"):
        slots.reserve("b", 33)
    slots.release("a")
    assert slots.reserve("b", 33).reserved_tokens == 48
    slots.check()


def test_a_sequence_beyond_a_row_is_refused_for_good() -> None:
    with pytest.raises(ContextTooLong, match="65 tokens are more than the 64"):
        table().reserve("a", 65)


def test_reserving_twice_is_a_bug_and_releasing_twice_is_not() -> None:
    slots = table()
    slots.reserve("a", 1)
    with pytest.raises(InvariantViolation):
        slots.reserve("a", 1)
    assert slots.release("a") is not None
    assert slots.release("a") is None


def test_the_lowest_free_row_is_used_first() -> None:
    slots = table(rows=3, total=1000)
    assert [slots.reserve(s, 1).row for s in "abc"] == [0, 1, 2]
    slots.release("b")
    slots.release("a")
    assert slots.reserve("d", 1).row == 0
