"""What of a sequence's KV goes when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.core.kv import KVExtent, KVSpan
from quadriga.errors import InvariantViolation, MigrationFailed
from quadriga.scheduling.transfer.sequence_export import (
    MAX_REMAINDER_TOKENS,
    MIN_PIECE_TOKENS,
    PreCopy,
)

ENDS = (2, 5, 8)


def extents(*tokens: int, ends: Sequence[int] = ENDS) -> list[KVExtent]:
    begins = (0, *ends[:-1])
    return [KVExtent(*e) for e in zip(begins, ends, tokens, strict=True)]


def test_layers_that_lack_the_same_go_together() -> None:
    books = PreCopy()
    assert books.take(extents(20, 20, 20)) == [KVSpan(0, 8, 0, 20)]
    assert books.take(extents(25, 20, 20)) == [KVSpan(0, 2, 20, 25)]
    assert books.take(extents(26, 26, 20)) == [KVSpan(0, 2, 25, 26), KVSpan(2, 5, 20, 26)]
    assert books.take(extents(27, 27, 27)) == [KVSpan(0, 5, 26, 27), KVSpan(5, 8, 20, 27)]
    assert books.num_cells == 27 * 8


def test_a_piece_is_no_larger_than_asked_for_and_no_smaller_than_makes_an_end() -> None:
    books = PreCopy()
    (span,) = books.take(extents(1000, 1000, 1000), 800)
    assert span == KVSpan(0, 8, 0, 100)
    (span,) = books.take(extents(1000, 1000, 1000), 1)
    assert span == KVSpan(0, 8, 100, 100 + MIN_PIECE_TOKENS)


def test_when_a_sequence_may_rest() -> None:
    books = PreCopy()
    most = MAX_REMAINDER_TOKENS
    assert books.is_ready(extents(most, most, 0)), "so short that nothing need go before"
    assert not books.is_ready(extents(most + 1, most, 0))
    books.take(extents(50, 30, 30))
    assert books.is_ready(extents(50 + most, 30, 30))
    assert not books.is_ready(extents(51, 51, 30)), "its token went deep meanwhile"


def test_kv_that_was_sent_cannot_vanish() -> None:
    books = PreCopy()
    books.take(extents(20, 20, 20))
    with pytest.raises(InvariantViolation, match="20 positions were sent"):
        books.take(extents(20, 20, 19))


def test_layers_that_the_destination_has_not_got_do_not_go() -> None:
    books = PreCopy(3)
    assert books.take(extents(20, 18, 18)) == [KVSpan(0, 2, 0, 20), KVSpan(2, 3, 0, 18)]
    assert books.num_cells == 2 * 20 + 18
    assert [(e.first_layer, e.stop_layer) for e in books.cut(extents(20, 18, 18))] == [
        (0, 2),
        (2, 3),
    ]
    (span,) = books.take(extents(1000, 18, 18), 1)
    assert span.num_cells == MIN_PIECE_TOKENS * 3, "a piece is of the layers that go"


def test_segments_may_be_others_meanwhile_but_not_fewer_layers() -> None:
    """As of a sequence that was paused before its replica changed its depth."""
    books = PreCopy(5)
    books.take(extents(20, 20, 20))
    assert books.missing(extents(22, 20, ends=(2, 5))) == [KVSpan(0, 2, 20, 22)]
    assert books.missing(extents(21, ends=(8,))) == [KVSpan(0, 5, 20, 21)]
    with pytest.raises(MigrationFailed, match="5 layers were to go, and there are 2 now"):
        books.missing(extents(21, ends=(2,)))


@given(
    start=st.lists(st.integers(0, 120), min_size=3, max_size=3),
    growth=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 2, 3])), max_size=40),
    max_cells=st.integers(1, 400),
)
def test_everything_goes_once_and_in_order(
    start: list[int], growth: list[tuple[int, int]], max_cells: int
) -> None:
    """A source that steps on between pieces: tokens come, and go deep now and then."""
    tokens = sorted(start, reverse=True)
    sent: list[set[int]] = [set() for _ in range(ENDS[-1])]
    books = PreCopy()

    def note(spans: list[KVSpan]) -> None:
        for span in spans:
            assert span.start < span.stop
            for layer in range(span.first_layer, span.stop_layer):
                positions = set(range(span.start, span.stop))
                assert not positions & sent[layer], "sent twice"
                assert span.start == len(sent[layer]), "in order, without gaps"
                sent[layer] |= positions

    for more, depth in growth:
        before = books.num_cells
        spans = books.take(extents(*tokens), max_cells)
        note(spans)
        limit = max(max_cells, MIN_PIECE_TOKENS * ENDS[-1])
        assert books.num_cells - before <= limit
        assert spans or not books.missing(extents(*tokens)), "there is always a next piece"
        tokens[0] += more
        for i in range(1, depth):
            tokens[i] = tokens[0]
        tokens = [max(tokens[i:]) for i in range(3)]
    note(books.take(extents(*tokens)))
    wanted = [
        n for n, (a, b) in zip(tokens, ((0, 2), (2, 5), (5, 8)), strict=True) for _ in range(a, b)
    ]
    assert [len(positions) for positions in sent] == wanted
    assert books.missing(extents(*tokens)) == []
    assert books.is_ready(extents(*tokens))
