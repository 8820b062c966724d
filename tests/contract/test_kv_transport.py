"""What every KV transport must do, between real processes."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from actors.calls import from_ray
from quadriga.batching.handoff import LeaseState
from quadriga.errors import MigrationFailed, QuadrigaError, ReplicaError
from quadriga.types import TransferOffer
from tests.contract.peer import DEPTH_CLASS, NUM_LAYERS, NUM_ROWS, make_state, start_peer

TRANSPORTS = ["gloo", "object_store", "nccl"]
"""NCCL on a stand-in for the library: see `tests.fake_nccl`."""
pytestmark = pytest.mark.usefixtures("ray_cluster")


@dataclass
class Pair:
    """Two peers, and one whose leases are short."""

    kind: str
    a: Any
    b: Any
    hasty: Any
    a_name: str
    b_name: str


@pytest.fixture(scope="module", params=TRANSPORTS)
def shared_pair(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[Pair]:
    yield from make_pair(request.param)


def make_pair(kind: str) -> Iterator[Pair]:
    names = [f"{kind}:{side}:{uuid.uuid4().hex[:6]}" for side in "ab"]
    a, b = (start_peer(name, kind) for name in names)
    hasty = start_peer(f"{kind}:hasty:{uuid.uuid4().hex[:6]}", kind, lease_s=1.5)
    ray.get([actor.pid.remote() for actor in (a, b, hasty)], timeout=60)
    yield Pair(kind, a, b, hasty, *names)
    for actor in (a, b, hasty):
        ray.kill(actor)


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    ray.get([shared_pair.a.forget.remote(), shared_pair.b.forget.remote()], timeout=10)
    return shared_pair


def get(ref: Any, timeout_s: float = 30.0) -> Any:
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
    assert get(endless, 10) in ("KVTransportError:aborted", "KVTransportError:refused")
    get(moves)
    assert get(pair.b.num_held.remote()) == 2


def test_a_silent_lease_lapses(pair: Pair) -> None:
    hasty = pair.hasty
    transfer = get(hasty.open.remote(pair.b_name, new_id(), 16))
    get(hasty.send.remote(transfer, 1, everything(16)))
    assert get(pair.b.sweep.remote()) == 0, "it has just been heard of"
    get(hasty.stop_renewing.remote(transfer))
    give_up = time.monotonic() + 10
    while not get(pair.b.sweep.remote()):
        assert time.monotonic() < give_up
    assert get(pair.b.num_held.remote()) == 0
    with pytest.raises(MigrationFailed, match="lapsed"):
        get(hasty.commit_transfer.remote(transfer, 16))


def test_a_renewed_lease_does_not_lapse(pair: Pair) -> None:
    hasty = pair.hasty
    transfer = get(hasty.open.remote(pair.b_name, new_id(), 16))
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert get(pair.b.sweep.remote()) == 0
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
    offer = TransferOffer(
        new_id(), sequence_id, DEPTH_CLASS, pair.a_name, 5, 16, 32, pair.kind, 10.0
    )
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


def test_death_of_the_peer_in_mid_copy(pair: Pair) -> None:
    """An error at once, and the sender works on with others."""
    name = f"victim:{new_id()[:6]}"
    victim = start_peer(name, pair.kind)
    pid = get(victim.pid.remote(), 60)
    transfer = get(pair.a.open.remote(name, new_id(), 4000))
    endless = pair.a.send_forever.remote(transfer, 4000)
    get(pair.a.is_sending.remote())
    started = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert get(endless, 10).startswith("KVTransportError")
    assert time.monotonic() - started < 4.0
    with pytest.raises(ReplicaError):
        get(pair.a.open.remote(name, new_id(), 16))
    get(pair.a.move.remote(pair.b_name, new_id(), 1, 100))


def test_a_hung_peer_costs_a_deadline_and_is_reconnected(pair: Pair) -> None:
    """A stopped process raises nothing; when it wakes up, the next transfer succeeds."""
    name = f"sleeper:{new_id()[:6]}"
    sleeper = start_peer(name, pair.kind)
    impatient_name = f"impatient:{new_id()[:6]}"
    impatient = start_peer(impatient_name, pair.kind, deadline_s=2.0)
    pid, _ = get([sleeper.pid.remote(), impatient.pid.remote()], 60)
    get(impatient.move.remote(name, new_id(), 1, 100))
    transfer = get(impatient.open.remote(name, new_id(), 4000))
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(QuadrigaError):
            get(impatient.send.remote(transfer, 1, everything(4000)))
        assert time.monotonic() - started < 4.0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert get(impatient.abort_transfer.remote(transfer)) is LeaseState.ABORTED
    get(impatient.move.remote(name, new_id(), 2, 4000))
    for actor in (sleeper, impatient):
        ray.kill(actor)
