"""Pages have one owner each, and never run out while promises are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.engine.cuda.pages import PageTable, pages_per_layer
from quadriga.errors import KVCacheExhausted, QuadrigaError
from quadriga.scheduling.slots import SlotTable

PAGE, CAPACITY, ROWS, ENDS = 16, 50, 4, (2, 3, 6)


def make(budget: int = ROWS * CAPACITY) -> PageTable:
    return PageTable(
        segment_ends=ENDS,
        num_rows=ROWS,
        capacity=CAPACITY,
        num_pages=ENDS[-1] * pages_per_layer(budget, ROWS, CAPACITY, PAGE),
        page_tokens=PAGE,
    )


def ensure(table: PageTable, row: int, tokens: int, segments: range) -> None:
    table.ensure(np.array([row]), np.array([tokens]), segments)


def test_a_page_for_every_layer_of_the_segments_named() -> None:
    table = make()
    ensure(table, 1, 17, range(2))
    assert (table.table[:3, 1, :2] > 0).all() and not table.table[:3, 1, 2:].any()
    assert not table.table[3:].any() and not table.table[:, [0, 2, 3, 4]].any()
    assert len(set(table.table[:3, 1, :2].ravel().tolist())) == 6, "no page twice"
    assert table.held_pages(1) == 6
    before = table.table.copy()
    ensure(table, 1, 32, range(2))
    assert (table.table == before).all(), "32 tokens are two pages too"
    ensure(table, 1, 33, range(2))
    assert table.held_pages(1) == 9
    assert (table.table[:, :, :2] == before[:, :, :2]).all(), "a page stays where it is"
    table.check()


def test_segments_of_layers() -> None:
    table = make()
    assert table.segments(0, 6) == range(3)
    assert table.segments(2, 3) == range(1, 2)
    assert table.segments(1, 3) == range(2)
    assert list(table.segments(3, 3)) == []


def test_rows_may_be_named_twice() -> None:
    table = make()
    table.ensure(np.array([0, 0, 0]), np.array([1, 40, 20]), range(1))
    assert table.held_pages(0) == 3 * 2
    table.check()


def test_the_changes_make_a_copy() -> None:
    table = make()
    mirror = np.zeros_like(table.table)
    rng = np.random.default_rng(0)
    for _ in range(60):
        row = int(rng.integers(ROWS))
        if rng.random() < 0.3:
            table.release(row)
        else:
            ensure(table, row, int(rng.integers(1, CAPACITY)), range(int(rng.integers(1, 4))))
        indices, pages = table.changes()
        table.drop_changes()
        mirror.ravel()[indices] = pages
        used = table.table > 0
        assert (mirror[used] == table.table[used]).all()
        assert not table.has_changes
    assert not mirror[:, ROWS].any(), "the padding row is nobody's"


def test_exhaustion_says_what_is_missing() -> None:
    table = make(budget=CAPACITY)
    assert table.num_pages == 6 * (4 + ROWS)
    for row in range(2):
        ensure(table, row, CAPACITY, range(3))
    with pytest.raises(KVCacheExhausted, match=r"12 pages .* row 2 at layers 4\.\.6, 0 of 48"):
        ensure(table, 2, CAPACITY, range(2, 3))
    table.check()
    table.release(0)
    ensure(table, 2, CAPACITY, range(2, 3))
    table.release(2)
    table.release(2)
    table.release(1)
    table.check()
    assert table.num_free == table.num_pages


actions = st.lists(
    st.tuples(
        st.sampled_from(["join", "grow", "leave", "deepen"]),
        st.integers(0, ROWS - 1),
        st.integers(1, CAPACITY),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(actions=actions, budget=st.integers(CAPACITY, ROWS * CAPACITY), whole=st.booleans())
def test_no_page_is_missing_while_tokens_are_promised(
    actions: list[tuple[str, int, int]], budget: int, whole: bool
) -> None:
    """What the slot table admits finds its pages, in every layer; what leaves gives all back."""
    table = make(budget)
    slots = SlotTable(
        num_rows=ROWS,
        row_capacity_tokens=CAPACITY,
        kv_capacity_tokens=budget,
        reservation="longest" if whole else "used",
    )
    for action, who, tokens in actions:
        name = str(who)
        slot = slots.get(name)
        try:
            if action == "join" and slot is None:
                slot = slots.reserve(name, tokens, max(1, tokens - 1))
            elif action == "leave" and slot is not None:
                slots.release(name)
                table.release(slot.row)
            elif action == "grow" and slot is not None and slots.grow(name, tokens):
                slot = slots.get(name)
        except QuadrigaError:
            continue
        if slot is not None and action in ("join", "grow", "deepen"):
            segments = range(3) if action == "deepen" else range(1)
            ensure(table, slot.row, slot.reserved_tokens, segments)
        table.check()
    for row in range(ROWS):
        table.release(row)
    table.check()
    assert table.num_free == table.num_pages
