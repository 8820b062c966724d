"""`auto`: NCCL, gloo and the object store, each for a peer whom the one before does not reach."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import ray

from quadriga.errors import KVTransportError
from tests.contract.peer import Peer, start_peer
from tests.contract.test_kv_transport import START_TIMEOUT_S, get

pytestmark = pytest.mark.usefixtures("ray_cluster")


class DeafPeer(Peer):
    """Can be told to refuse gloo for reasons of its own, as a firewall would."""

    is_deaf = False

    async def turn_deaf(self) -> None:
        self.is_deaf = True

    async def kv_connect(self, offer: Any) -> None:
        if self.is_deaf:
            raise KVTransportError("no route to host")
        await super().kv_connect(offer)


def wait_until_up(*peers: Any) -> None:
    """A peer that still loads torch does not answer in time."""
    get([peer.pid.remote() for peer in peers], START_TIMEOUT_S)


def test_a_peer_out_of_reach_of_gloo_is_served_by_the_object_store() -> None:
    from actors.rpc.ray_rpc import NAMESPACE

    names = [f"auto:{side}:{uuid.uuid4().hex[:6]}" for side in "ab"]
    a = start_peer(names[0], "auto")
    b: Any = (
        ray.remote(DeafPeer)
        .options(name=names[1], namespace=NAMESPACE, num_cpus=0, max_concurrency=100)
        .remote(names[1], "auto")
    )
    wait_until_up(a, b)
    get(b.turn_deaf.remote())
    for seed in range(2):
        sequence_id = uuid.uuid4().hex
        get(a.move.remote(names[1], sequence_id, seed, 500), 60)
        assert get(b.holds.remote(sequence_id, seed, 500))
    assert get(a.num_fallbacks.remote()) == 1, "the peer is remembered, not tried for every part"
    assert get(a.channels.remote())["gloo"]["sending"] == {}

    sequence_id = uuid.uuid4().hex
    get(b.move.remote(names[0], sequence_id, 9, 500))
    assert get(a.holds.remote(sequence_id, 9, 500))
    assert get(b.num_fallbacks.remote()) == 0, "the other direction has gloo"
    for actor in (a, b):
        ray.kill(actor)


def start_on(gpu: str, kind: str = "auto") -> tuple[str, Any]:
    name = f"{kind}:{uuid.uuid4().hex[:6]}"
    return name, start_peer(name, kind, gpu=gpu)


def test_nccl_is_taken_between_gpus_and_gloo_on_one() -> None:
    """NCCL does not take two ranks on one GPU: known before it is tried, and once a peer."""
    (_, a), (next_name, next_door), (same_name, same) = (start_on(gpu) for gpu in ("A", "B", "A"))
    wait_until_up(a, next_door, same)
    for seed in range(2):
        for name, actor in ((next_name, next_door), (same_name, same)):
            sequence_id = uuid.uuid4().hex
            get(a.move.remote(name, sequence_id, seed, 500), 60)
            assert get(actor.holds.remote(sequence_id, seed, 500))
    channels = get(a.channels.remote())
    assert set(channels["nccl"]["sending"]) == {next_name}
    assert set(channels["gloo"]["sending"]) == {same_name}
    assert get(a.num_fallbacks.remote()) == 1
    for actor in (a, next_door, same):
        ray.kill(actor)


def test_a_peer_without_nccl_is_served_by_gloo() -> None:
    a = start_on("A")[1]
    name = f"auto:{uuid.uuid4().hex[:6]}"
    plain = start_peer(name, "auto")
    wait_until_up(a, plain)
    sequence_id = uuid.uuid4().hex
    get(a.move.remote(name, sequence_id, 1, 500), 60)
    assert get(plain.holds.remote(sequence_id, 1, 500))
    assert set(get(a.channels.remote())["gloo"]["sending"]) == {name}
    for actor in (a, plain):
        ray.kill(actor)
