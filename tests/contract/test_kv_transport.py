"""What every KV transport must do, between real processes."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from actors.rpc.ray_rpc import from_ray
from quadriga.core.kv import TransferOffer
from quadriga.errors import MigrationFailed, QuadrigaError, ReplicaError
from quadriga.scheduling.transfer.handoff import LeaseState
from tests.contract.peer import DEPTH_CLASS, NUM_LAYERS, NUM_ROWS, make_state, start_peer
from tests.waiting import wait_until

TRANSPORTS = ["gloo", "object_store", "nixl", "nccl"]
"""NCCL on a stand-in for the library: see `tests.fake_nccl`."""
pytestmark = pytest.mark.usefixtures("ray_cluster")

START_TIMEOUT_S = 180.0
"""For peers to load torch, on a busy machine."""
GET_TIMEOUT_S = 30.0
LONG_S = 2 * GET_TIMEOUT_S
"""A deadline that ends no `get`: what is there before did not wait for it."""
LEASE_S = 1.5
"""Of the hasty peer, by the clock of whoever gave the lease."""


@dataclass
class Pair:
    """Two peers, the first with a long deadline, and one of short leases, which dies in the end."""

    kind: str
    a: Any
    b: Any
    hasty: Any
    a_name: str
    b_name: str
    hasty_name: str


@pytest.fixture(scope="module", params=TRANSPORTS)
def shared_pair(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[Pair]:
    yield from make_pair(request.param)


def make_pair(kind: str) -> Iterator[Pair]:
    names = [f"{kind}:{side}:{uuid.uuid4().hex[:6]}" for side in ("a", "b", "hasty")]
    a = start_peer(names[0], kind, deadline_s=LONG_S)
    b = start_peer(names[1], kind)
    hasty = start_peer(names[2], kind, lease_s=LEASE_S)
    get([actor.pid.remote() for actor in (a, b, hasty)], START_TIMEOUT_S)
    yield Pair(kind, a, b, hasty, *names)
    for actor in (a, b, hasty):
        ray.kill(actor)


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    get([shared_pair.a.forget.remote(), shared_pair.b.forget.remote()])
    return shared_pair


def get(ref: Any, timeout_s: float = GET_TIMEOUT_S) -> Any:
    """The result, or our own error as it was raised."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as exc:
        raise from_ray("peer", "call", exc) from exc


def new_id() -> str:
    return uuid.uuid4().hex


def everything(num_tokens: int) -> list[tuple[int, int, int, int]]:
    return [(0, NUM_LAYERS, 0, num_tokens)]


@pytest.mark.parametrize(("num_tokens", "num_parts"), [(1, 4), (300, 4), (8000, 1)])
def test_a_sequence_arrives_whole(pair: Pair, num_tokens: int, num_parts: int) -> None:
    """From 64 bytes to 8 MB a part."""
    sequence_id = new_id()
    get(pair.a.move.remote(pair.b_name, sequence_id, 3, num_tokens, num_parts))
    assert get(pair.b.holds.remote(sequence_id, 3, num_tokens))
    assert get(pair.b.epoch.remote(sequence_id)) == 1


def test_later_parts_overwrite_earlier_positions(pair: Pair) -> None:
    """Pre-copy sends what has changed once more: the last word counts."""
    sequence_id = new_id()
    transfer = get(pair.a.open.remote(pair.b_name, sequence_id, 64))
    get(pair.a.send.remote(transfer, 1, everything(64)))
    for first_layer in range(NUM_LAYERS):
        get(pair.a.send.remote(transfer, 2, [(first_layer, 1, 0, 32), (first_layer, 1, 32, 64)]))
    get(pair.a.commit_transfer.remote(transfer, 64))
    assert get(pair.b.holds.remote(sequence_id, 2, 64))


def test_transfers_in_both_directions_at_once(pair: Pair) -> None:
    ids = [(new_id(), new_id()) for _ in range(NUM_ROWS)]
    moves = []
    for seed, (there, back) in enumerate(ids):
        moves.append(pair.a.move.remote(pair.b_name, there, seed, 200 + seed))
        moves.append(pair.b.move.remote(pair.a_name, back, 50 + seed, 300 + seed))
    get(moves)
    for seed, (there, back) in enumerate(ids):
        assert get(pair.b.holds.remote(there, seed, 200 + seed))
        assert get(pair.a.holds.remote(back, 50 + seed, 300 + seed))


def test_peers_that_send_by_different_kinds_receive_from_each_other() -> None:
    """As replicas of the old and the new setting do in a roll-out."""
    names = {kind: f"{kind}:mixed:{new_id()[:6]}" for kind in (*TRANSPORTS, "auto")}
    peers = {kind: start_peer(name, kind) for kind, name in names.items()}
    get([peer.pid.remote() for peer in peers.values()], START_TIMEOUT_S)
    for source, peer in peers.items():
        for kind in names.keys() - {source}:
            sequence_id = new_id()
            get(peer.move.remote(names[kind], sequence_id, 3, 300))
            assert get(peers[kind].holds.remote(sequence_id, 3, 300)), (source, kind)
    for peer in peers.values():
        ray.kill(peer)


def test_a_flipped_byte_is_refused_at_the_commit(pair: Pair) -> None:
    transfer = get(pair.a.open.remote(pair.b_name, new_id(), 100))
    get(pair.a.send_corrupt.remote(transfer, 100))
    with pytest.raises(MigrationFailed, match="corrupt"):
        get(pair.a.commit_transfer.remote(transfer, 100))
    assert get(pair.a.abort_transfer.remote(transfer)) is LeaseState.ABORTED
    assert get(pair.b.num_held.remote()) == 0, "the row must be free again"


@pytest.mark.parametrize(
    "spans",
    [[(0, NUM_LAYERS - 1, 0, 40)], [(0, NUM_LAYERS, 0, 39)], [(0, NUM_LAYERS, 1, 40)]],
    ids=["a layer short", "a position short", "the first position missing"],
)
def test_an_incomplete_copy_is_refused_at_the_commit(
    pair: Pair, spans: list[tuple[int, int, int, int]]
) -> None:
    transfer = get(pair.a.open.remote(pair.b_name, new_id(), 40))
    get(pair.a.send.remote(transfer, 1, spans))
    with pytest.raises(MigrationFailed, match="lacks layer"):
        get(pair.a.commit_transfer.remote(transfer, 40))


def test_commit_may_be_repeated(pair: Pair) -> None:
    sequence_id = new_id()
    transfer = get(pair.a.open.remote(pair.b_name, sequence_id, 16))
    get(pair.a.send.remote(transfer, 1, everything(16)))
    for _ in range(3):
        get(pair.a.commit_transfer.remote(transfer, 16))
    assert get(pair.b.num_held.remote()) == 1
    assert get(pair.a.abort_transfer.remote(transfer)) is LeaseState.COMMITTED, "too late"
    assert get(pair.b.num_held.remote()) == 1


def test_abort_frees_the_row_and_ends_the_transfer(pair: Pair) -> None:
    transfer = get(pair.a.open.remote(pair.b_name, new_id(), 16))
    get(pair.a.send.remote(transfer, 1, [(0, 2, 0, 16)]))
    for _ in range(2):
        assert get(pair.a.abort_transfer.remote(transfer)) is LeaseState.ABORTED
    assert get(pair.b.num_held.remote()) == 0
    with pytest.raises(QuadrigaError, match="aborted"):
        get(pair.a.send.remote(transfer, 1, [(2, 2, 0, 16)]))
    with pytest.raises(MigrationFailed, match="aborted"):
        get(pair.a.commit_transfer.remote(transfer, 16))


def test_the_source_hears_that_a_sequence_was_cancelled(pair: Pair) -> None:
    sequence_id = new_id()
    transfer = get(pair.a.open.remote(pair.b_name, sequence_id, 16))
    get(pair.b.cancel.remote(sequence_id))
    assert get(pair.b.num_held.remote()) == 0
    with pytest.raises(MigrationFailed, match="cancelled"):
        get(pair.a.commit_transfer.remote(transfer, 16))
    assert get(pair.a.abort_transfer.remote(transfer)) is LeaseState.CANCELLED


def test_abort_in_mid_copy_leaves_the_others_alone(pair: Pair) -> None:
    doomed = get(pair.a.open.remote(pair.b_name, new_id(), 4000))
    endless = pair.a.send_forever.remote(doomed, 4000)
    get(pair.a.is_sending.remote())
    moves = [pair.a.move.remote(pair.b_name, new_id(), 5, 500) for _ in range(2)]
    assert get(pair.a.abort_transfer.remote(doomed)) is LeaseState.ABORTED
    assert get(endless) in ("KVTransportError:aborted", "KVTransportError:refused")
    get(moves)
    # Whoever still writes into the doomed one's row lets go of it afterwards.
    wait_until(lambda: get(pair.b.num_held.remote()) == 2)


def num_lapsed_after(peer: Any, seconds: float) -> int:
    """Make the leases a peer gave older; how many of them lapse by that."""
    get(peer.advance.remote(seconds))
    num_lapsed: int = get(peer.sweep.remote())
    return num_lapsed


def test_a_silent_lease_lapses(pair: Pair) -> None:
    hasty = pair.hasty
    transfer = get(hasty.open.remote(pair.b_name, new_id(), 16))
    get(hasty.send.remote(transfer, 1, everything(16)))
    assert num_lapsed_after(pair.b, LEASE_S - 0.1) == 0, "it was heard of not long ago"
    get(hasty.stop_renewing.remote(transfer))
    # Twice, as one renewal may have been on its way.
    assert num_lapsed_after(pair.b, LEASE_S + 0.1) or num_lapsed_after(pair.b, LEASE_S + 0.1)
    assert get(pair.b.num_held.remote()) == 0
    with pytest.raises(MigrationFailed, match="lapsed"):
        get(hasty.commit_transfer.remote(transfer, 16))


def test_a_renewed_lease_does_not_lapse(pair: Pair) -> None:
    hasty = pair.hasty
    transfer = get(hasty.open.remote(pair.b_name, new_id(), 16))
    for _ in range(3):
        assert num_lapsed_after(pair.b, LEASE_S - 0.1) == 0
        get(pair.b.next_renewal.remote(transfer))
    get(hasty.send.remote(transfer, 1, everything(16)))
    get(hasty.commit_transfer.remote(transfer, 16))


@pytest.mark.parametrize("num_tokens", [64, 8000], ids=["sent unasked", "sent when wanted"])
def test_a_refused_part_leaves_the_line_in_order(pair: Pair, num_tokens: int) -> None:
    """Small parts follow their header at once: when they are not wanted, they must be drained."""
    unwanted, next_one = new_id(), new_id()
    transfer = get(pair.a.open.remote(pair.b_name, unwanted, num_tokens))
    get(pair.b.cancel.remote(unwanted))
    with pytest.raises(QuadrigaError) as refusal:
        get(pair.a.send.remote(transfer, 1, everything(num_tokens)))
    assert refusal.value.code == "refused"
    get(pair.a.move.remote(pair.b_name, next_one, 5, 100))
    assert get(pair.b.holds.remote(next_one, 5, 100))
    assert get(pair.a.num_fallbacks.remote()) == 0


def test_an_unknown_peer_is_refused_before_its_bytes(pair: Pair) -> None:
    """B has a lease with A for one transfer; A sends for another that was never reserved."""
    transfer = get(pair.a.open.remote(pair.b_name, new_id(), 16))
    get(pair.b.abort.remote(transfer))
    with pytest.raises(QuadrigaError) as refusal:
        get(pair.a.send.remote(transfer, 1, everything(16)))
    assert refusal.value.code == "refused"


def test_a_stale_epoch_is_refused(pair: Pair) -> None:
    sequence_id = new_id()
    get(pair.a.move.remote(pair.b_name, sequence_id, 1, 16))
    with pytest.raises(MigrationFailed) as refusal:
        get(pair.a.open.remote(pair.b_name, sequence_id, 16, epoch=0))
    assert refusal.value.code == "stale_epoch"


def test_a_commit_of_another_epoch_is_refused(pair: Pair) -> None:
    sequence_id = new_id()
    offer = TransferOffer(new_id(), sequence_id, DEPTH_CLASS, pair.a_name, 5, 16, 32, 10.0)
    get(pair.b.reserve.remote(offer))
    with pytest.raises(MigrationFailed) as refusal:
        get(pair.b.commit.remote(offer.transfer_id, make_state(sequence_id, 16, epoch=4), ()))
    assert refusal.value.code == "stale_epoch"


def test_a_newer_offer_replaces_an_open_one(pair: Pair) -> None:
    sequence_id = new_id()
    old = get(pair.a.open.remote(pair.b_name, sequence_id, 16))
    new = get(pair.a.open.remote(pair.b_name, sequence_id, 16))
    assert get(pair.b.num_held.remote()) == 1
    with pytest.raises(QuadrigaError):
        get(pair.a.send.remote(old, 1, everything(16)))
    get(pair.a.send.remote(new, 1, everything(16)))
    get(pair.a.commit_transfer.remote(new, 16))


def test_a_full_peer_says_so(pair: Pair) -> None:
    for _ in range(NUM_ROWS):
        get(pair.a.open.remote(pair.b_name, new_id(), 16))
    with pytest.raises(QuadrigaError) as refusal:
        get(pair.a.open.remote(pair.b_name, new_id(), 16))
    assert refusal.value.code == "kv_cache_exhausted"


def test_a_hung_peer_costs_a_deadline_and_is_reconnected(pair: Pair) -> None:
    """A stopped process raises nothing; when it wakes up, the next transfer succeeds."""
    name, pid = pair.hasty_name, get(pair.hasty.pid.remote())
    get(pair.a.move.remote(name, new_id(), 1, 100))
    transfer = get(pair.a.open.remote(name, new_id(), 4000))
    os.kill(pid, signal.SIGSTOP)
    try:
        # The part's own deadline, not A's, which `get` does not wait for.
        with pytest.raises(QuadrigaError):
            get(pair.a.send.remote(transfer, 1, everything(4000), deadline_s=2.0))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert get(pair.a.abort_transfer.remote(transfer)) is LeaseState.ABORTED
    get(pair.a.move.remote(name, new_id(), 2, 4000))


def test_death_of_the_peer_in_mid_copy(pair: Pair) -> None:
    """An error at once, and the sender works on with others."""
    name, pid = pair.hasty_name, get(pair.hasty.pid.remote())
    transfer = get(pair.a.open.remote(name, new_id(), 4000))
    endless = pair.a.send_forever.remote(transfer, 4000)
    get(pair.a.is_sending.remote())
    os.kill(pid, signal.SIGKILL)
    assert get(endless).startswith("KVTransportError"), "long before A's deadline"
    with pytest.raises(ReplicaError):
        get(pair.a.open.remote(name, new_id(), 16))
    get(pair.a.move.remote(pair.b_name, new_id(), 1, 100))
