"""The receiving side of a hand-off as pure state: leases, parts, commit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.core.kv import KVExtent, KVPart, TransferOffer
from quadriga.core.replica import DepthClass
from quadriga.errors import KVTransportError, MigrationFailed, Overloaded
from quadriga.scheduling.transfer.handoff import (
    MAX_LIVE,
    MAX_REMEMBERED,
    Lease,
    LeaseState,
    LeaseTable,
    check_numerics,
)

DEPTH = 4
CLASS = DepthClass("m", DEPTH)


def offer(transfer_id: str = "t", sequence_id: str = "s", epoch: int = 1) -> TransferOffer:
    return TransferOffer(transfer_id, sequence_id, CLASS, "source", epoch, 10, 32, 5.0)


def part(
    index: int,
    first_layer: int = 0,
    num_layers: int = DEPTH,
    start: int = 0,
    num_tokens: int = 10,
    transfer_id: str = "t",
) -> KVPart:
    shape = (num_layers, 2, 2, num_tokens, 8)
    return KVPart(
        transfer_id, index, first_layer, num_layers, start, num_tokens, shape, "float32", 7 + index
    )


def store(table: LeaseTable, piece: KVPart, checksum: int | None = None) -> bool:
    lease = table.begin_store("source", piece, now_s=0.0)
    digest = piece.checksum if checksum is None else checksum
    return table.end_store(lease, piece, digest, now_s=0.0)


@pytest.mark.parametrize(
    ("theirs", "ours", "is_taken"),
    [("", "", True), ("x", "", True), ("x", "x", True), ("x", "y", False), ("", "y", False)],
)
def test_kv_that_was_computed_otherwise_is_refused(theirs: str, ours: str, is_taken: bool) -> None:
    asked = replace(offer(), numerics=theirs)
    if is_taken:
        check_numerics(asked, ours)
        return
    with pytest.raises(MigrationFailed, match="this replica computes with y") as refusal:
        check_numerics(asked, ours)
    assert refusal.value.code == "wrong_numerics"


@pytest.fixture
def table() -> LeaseTable:
    table = LeaseTable(CLASS)
    table.open(offer(), row=3, now_s=0.0)
    return table


def commit(table: LeaseTable, *checksums: int, num_tokens: int = 10, epoch: int = 1) -> bool:
    lease = table.commit("t", epoch=epoch, num_tokens=num_tokens, checksums=checksums)
    return lease is not None and lease.row == 3


def test_layer_groups_and_chunks_together_make_a_commit(table: LeaseTable) -> None:
    pieces = [part(0, 0, 2, 0, 6), part(1, 2, 2, 0, 6), part(2, 0, 2, 6, 4), part(3, 2, 2, 6, 4)]
    for piece in pieces:
        assert store(table, piece) is False
    assert commit(table, *(p.checksum for p in pieces))
    assert table.state("t") is LeaseState.COMMITTED
    assert table.num_open == 0


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_part_is_named(table: LeaseTable, missing: int) -> None:
    pieces = [part(0, 0, 2, 0, 6), part(1, 2, 2, 0, 6), part(2, 0, 2, 6, 4), part(3, 2, 2, 6, 4)]
    del pieces[missing]
    sent = [replace(p, index=i) for i, p in enumerate(pieces)]
    for piece in sent:
        store(table, piece)
    layer, position = (missing % 2) * 2, (missing // 2) * 6
    with pytest.raises(MigrationFailed, match=f"layer {layer} from position {position}"):
        commit(table, *(p.checksum for p in sent))


def extents(*tokens: int) -> list[KVExtent]:
    """Of segments of two layers each."""
    return [KVExtent(2 * i, 2 * i + 2, n) for i, n in enumerate(tokens)]


def test_what_was_never_computed_need_not_come(table: LeaseTable) -> None:
    pieces = [part(0, 0, 4, 0, 6), part(1, 0, 2, 6, 5)]
    for piece in pieces:
        store(table, piece)
    sums = [p.checksum for p in pieces]
    for claimed, gap in ((extents(11, 7), "layer 2 from position 6"), ((), "layer 2")):
        with pytest.raises(MigrationFailed, match=gap) as refusal:
            table.commit("t", epoch=1, num_tokens=10, checksums=sums, extents=claimed)
        assert refusal.value.code == "incomplete"
    assert table.commit("t", epoch=1, num_tokens=10, checksums=sums, extents=extents(11, 6))


@pytest.mark.parametrize(
    "claimed",
    [
        extents(10),
        extents(10, 10, 10),
        extents(9, 9),
        extents(12, 10),
        extents(10, 11),
        extents(10, -1),
        [KVExtent(0, 3, 10), KVExtent(2, 4, 10)],
        [KVExtent(0, 1, 10), KVExtent(2, 4, 10)],
        [KVExtent(0, 0, 10), KVExtent(0, 4, 10)],
        [KVExtent(2, 4, 10), KVExtent(0, 2, 10)],
    ],
)
def test_a_claim_that_no_row_can_make(table: LeaseTable, claimed: list[KVExtent]) -> None:
    """Too few layers, too many, too little of the first, more below than above, gaps, overlaps."""
    store(table, part(0, 0, 4, 0, 12))
    with pytest.raises(MigrationFailed) as refusal:
        table.commit("t", epoch=1, num_tokens=10, checksums=[7], extents=claimed)
    assert refusal.value.code == "incoherent"
    assert table.state("t") is LeaseState.OPEN


@given(
    tokens=st.lists(st.integers(0, 12), min_size=2, max_size=2),
    cuts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 12)), max_size=12),
)
def test_a_commit_wants_exactly_what_was_computed(
    tokens: list[int], cuts: list[tuple[int, int, int]]
) -> None:
    """Random pieces, as rounds of pre-copy send them; a cell nobody brought is always found."""
    table = LeaseTable(CLASS)
    table.open(offer(), row=3, now_s=0.0)
    tokens = [10 + tokens[0] % 2, min(tokens[1], 10)]
    brought: set[tuple[int, int]] = set()
    sums = []
    reach = [0] * DEPTH
    for first, count, length in cuts:
        layers = range(first, min(first + count, DEPTH))
        start = min(reach[layer] for layer in layers)
        stop = min(start + length, 12)
        if stop == start:
            continue
        piece = part(len(sums), first, len(layers), start, stop - start)
        store(table, piece)
        sums.append(piece.checksum)
        for layer in layers:
            brought |= {(layer, position) for position in range(start, stop)}
            reach[layer] = max(reach[layer], stop)
    wanted = {(layer, p) for layer in range(DEPTH) for p in range(tokens[layer // 2])}
    if wanted <= brought:
        assert table.commit("t", epoch=1, num_tokens=10, checksums=sums, extents=extents(*tokens))
        return
    with pytest.raises(MigrationFailed) as refusal:
        table.commit("t", epoch=1, num_tokens=10, checksums=sums, extents=extents(*tokens))
    assert refusal.value.code == "incomplete"
    assert table.state("t") is LeaseState.OPEN


def live(depth: int, least: int = 0, most: int = 0) -> TransferOffer:
    return replace(
        offer(), depth_class=DepthClass("m", depth), is_live=True, min_depth=least, max_depth=most
    )


@pytest.mark.parametrize(
    ("offered", "code"),
    [
        (live(2), None),
        (live(6), None),
        (live(6, least=4), None),
        (live(6, least=5), "wrong_depth"),
        (live(2, least=2), None),
        (live(2, least=2, most=2), "wrong_depth"),
        (live(4, least=4, most=4), None),
        (replace(live(4), depth_class=DepthClass("n", 4)), "wrong_depth_class"),
        (replace(live(6, least=6), is_live=False), None),
    ],
)
def test_who_may_come_from_another_depth(offered: TransferOffer, code: str | None) -> None:
    table = LeaseTable(CLASS, any_depth=True)
    if code is None:
        assert table.open(offered, row=0, now_s=0.0).depth == min(offered.depth_class.depth, DEPTH)
    else:
        with pytest.raises(MigrationFailed) as refusal:
            table.check_offer(offered)
        assert refusal.value.code == code
    if offered.depth_class != CLASS:
        with pytest.raises(MigrationFailed) as refusal:
            LeaseTable(CLASS).check_offer(offered)
        assert refusal.value.code == "wrong_depth_class"


def test_a_deeper_source_sends_the_layers_that_are_here() -> None:
    table = LeaseTable(CLASS, any_depth=True)
    table.open(live(6), row=3, now_s=0.0)
    store(table, part(0, 0, 4, 0, 10))
    with pytest.raises(MigrationFailed) as refusal:
        table.commit("t", epoch=1, num_tokens=10, checksums=[7], extents=extents(10, 10, 10))
    assert refusal.value.code == "incoherent"
    assert table.commit("t", epoch=1, num_tokens=10, checksums=[7], extents=extents(10, 10))


def test_a_replica_that_lost_layers_meanwhile_refuses_who_needs_them() -> None:
    table = LeaseTable(CLASS, any_depth=True)
    table.open(live(4, least=4), row=3, now_s=0.0)
    store(table, part(0, 0, 4, 0, 10))
    table.follow(DepthClass("m", 2))
    with pytest.raises(MigrationFailed) as refusal:
        table.commit("t", epoch=1, num_tokens=10, checksums=[7], extents=extents(10, 10))
    assert refusal.value.code == "wrong_depth"
    assert table.state("t") is LeaseState.OPEN
    table.follow(CLASS)
    assert table.commit("t", epoch=1, num_tokens=10, checksums=[7], extents=extents(10, 10))


def test_only_a_few_running_sequences_come_at_once(table: LeaseTable) -> None:
    for i in range(MAX_LIVE):
        table.open(replace(offer(f"u{i}", f"v{i}"), is_live=True), row=i, now_s=0.0)
    one_more = replace(offer("w", "w"), is_live=True)
    with pytest.raises(Overloaded, match="on their way here"):
        table.check_offer(one_more)
    assert table.check_offer(offer("w", "w")) == [], "a prefilled one may come"
    table.abort("u0")
    assert table.check_offer(one_more) == []


def test_a_commit_that_fails_leaves_the_lease_open_for_another_try(table: LeaseTable) -> None:
    store(table, part(0), checksum=1)
    with pytest.raises(MigrationFailed, match="corrupt"):
        commit(table, 7)
    store(table, part(0))
    with pytest.raises(MigrationFailed, match="1 of 2 parts"):
        commit(table, 7, 8)
    with pytest.raises(MigrationFailed) as refusal:
        commit(table, 7, epoch=2)
    assert refusal.value.code == "stale_epoch"
    assert commit(table, 7)


def test_a_commit_may_be_repeated_and_is_not_aborted(table: LeaseTable) -> None:
    store(table, part(0))
    assert commit(table, 7)
    assert commit(table, 7) is False
    assert table.abort("t") is None
    assert table.state("t") is LeaseState.COMMITTED


@pytest.mark.parametrize("was_here", [False, True])
def test_after_a_revoked_commit_the_same_epoch_may_come_again(was_here: bool) -> None:
    """Its source goes on under the epoch it had, and offers the next one."""
    table, epoch = LeaseTable(CLASS), 1
    if was_here:
        table.open(offer("earlier"), row=3, now_s=0.0)
        store(table, part(0, transfer_id="earlier"))
        assert table.commit("earlier", epoch=1, num_tokens=10, checksums=[7]) is not None
        epoch = 3
    table.open(offer(epoch=epoch), row=3, now_s=0.0)
    store(table, part(0))
    lease = table.commit("t", epoch=epoch, num_tokens=10, checksums=[7])
    assert lease is not None
    table.revoke(lease)
    assert table.state("t") is LeaseState.ABORTED
    with pytest.raises(MigrationFailed, match="aborted"):
        commit(table, 7)
    assert table.check_offer(offer("again", epoch=epoch)) == []
    if was_here:
        with pytest.raises(MigrationFailed) as refusal:
            table.check_offer(offer("stale", epoch=1))
        assert refusal.value.code == "stale_epoch"


def test_only_what_was_offered_is_taken(table: LeaseTable) -> None:
    bad = {
        "unknown transfer": part(0, transfer_id="other"),
        "layers 3..5": part(0, 3, 2),
        "layers -1..1": part(0, -1, 2),
        "positions 30..33": part(0, start=30, num_tokens=3),
        "positions -1..1": part(0, start=-1, num_tokens=2),
        "positions 0..0": part(0, num_tokens=0),
        "contradicts": replace(part(0), shape=(4, 2, 2, 11, 8)),
        "shape": replace(part(0), shape=(4, 2)),
        "0 parts are there": part(1),
    }
    for reason, piece in bad.items():
        with pytest.raises(KVTransportError, match=reason) as refusal:
            table.check_part("source", piece, now_s=0.0)
        assert refusal.value.code == "refused"
    with pytest.raises(KVTransportError, match="not thief's"):
        table.check_part("thief", part(0), now_s=0.0)


def test_a_late_part_cannot_overwrite_newer_ones(table: LeaseTable) -> None:
    """A part that was given up and sent again by another way may still turn up."""
    store(table, part(0))
    store(table, part(0))
    store(table, part(1))
    with pytest.raises(KVTransportError, match="2 parts are there"):
        table.check_part("source", part(0), now_s=0.0)
    with pytest.raises(KVTransportError, match="another part"):
        table.check_part("source", part(1, start=1, num_tokens=9), now_s=0.0)


def test_a_lease_lapses_only_in_silence(table: LeaseTable) -> None:
    assert table.lapse(now_s=5.0) == []
    table.check_part("source", part(0), now_s=4.0)
    assert table.lapse(now_s=9.0) == []
    assert table.renew("t", now_s=9.0)
    assert table.lapse(now_s=14.0) == []
    assert [lease.row for lease in table.lapse(now_s=14.1)] == [3]
    assert table.state("t") is LeaseState.LAPSED
    assert not table.renew("t", now_s=15.0)
    assert table.lapse(now_s=99.0) == []


@pytest.mark.parametrize("by", ["abort", "lapse"])
def test_a_row_is_not_released_under_a_writer(table: LeaseTable, by: str) -> None:
    lease = table.begin_store("source", part(0), now_s=0.0)
    ended = table.abort("t") if by == "abort" else table.lapse(now_s=99.0)
    assert not ended, "somebody is still writing"
    assert table.sequences() == {"s"}
    with pytest.raises(Overloaded, match="not free yet"):
        table.check_row("s")
    assert table.end_store(lease, part(0), 7, now_s=99.0) is True
    table.freed(lease)
    assert table.sequences() == set()
    table.check_row("s")


def test_an_abort_before_the_offer_wins() -> None:
    """They may overtake each other on the way."""
    table = LeaseTable(CLASS)
    assert table.abort("t") is None
    with pytest.raises(MigrationFailed, match="aborted"):
        table.check_offer(offer())


def test_offers_are_judged_by_class_and_epoch(table: LeaseTable) -> None:
    assert table.check_offer(offer("t2")) == ["t"], "the same source tries again"
    assert table.check_offer(offer("t2", epoch=2)) == ["t"]
    with pytest.raises(MigrationFailed, match="epoch 0"):
        table.check_offer(offer("t2", epoch=0))
    with pytest.raises(MigrationFailed, match="m@3"):
        table.check_offer(replace(offer("t3", "s3"), depth_class=DepthClass("m", 3)))
    store(table, part(0))
    commit(table, 7)
    with pytest.raises(MigrationFailed) as refusal:
        table.check_offer(offer("t4", epoch=1))
    assert refusal.value.code == "stale_epoch"
    assert table.check_offer(offer("t4", epoch=2)) == []


def test_memory_is_bounded() -> None:
    table = LeaseTable(CLASS)
    for i in range(MAX_REMEMBERED + 10):
        table.abort(f"t{i}")
    assert table.state("t0") is None
    assert table.state(f"t{MAX_REMEMBERED}") is LeaseState.ABORTED


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "begin", "end", "commit", "abort", "lapse"]), st.integers(0, 3)
    ),
    max_size=60,
)


@given(ACTIONS)
def test_every_row_is_released_exactly_once(actions: list[tuple[str, int]]) -> None:
    """Rows held = open leases + committed ones + ended ones that are still written."""
    table = LeaseTable(CLASS)
    held: set[str] = set()
    committed: set[str] = set()
    writing: list[tuple[str, Lease]] = []

    def release(lease: Lease) -> None:
        assert lease.offer.transfer_id in held - committed
        held.remove(lease.offer.transfer_id)
        table.freed(lease)

    for now_s, (action, i) in enumerate(actions):
        name = f"t{i}"
        piece = part(0, transfer_id=name)
        if action == "open" and name not in held:
            try:
                table.open(offer(name, f"s{i}"), row=i, now_s=float(now_s))
                held.add(name)
            except MigrationFailed:
                pass
        elif action == "begin":
            with suppress(KVTransportError):
                writing.append((name, table.begin_store("source", piece, now_s=float(now_s))))
        elif action == "end" and writing:
            owner, lease = writing.pop(i % len(writing))
            done = part(0, transfer_id=owner)
            if table.end_store(lease, done, 7, now_s=float(now_s)):
                release(lease)
        elif action == "commit":
            try:
                if table.commit(name, epoch=1, num_tokens=10, checksums=[7]) is not None:
                    committed.add(name)
            except MigrationFailed:
                pass
        elif action == "abort":
            ended = table.abort(name)
            if ended is not None:
                release(ended)
        elif action == "lapse":
            for lease in table.lapse(now_s=float(now_s)):
                release(lease)
        closing = {owner for owner, lease in writing if table.state(owner) is not LeaseState.OPEN}
        assert held == set(table.open_transfers()) | committed | (closing & held)
        assert {f"s{name[1:]}" for name in held - committed} == table.sequences()
