"""`auto`: gloo, and the object store for a peer whom gloo does not reach."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import ray

from quadriga.errors import KVTransportError
from tests.contract.peer import Peer, start_peer
from tests.contract.test_kv_transport import get

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


def test_a_peer_out_of_reach_of_gloo_is_served_by_the_object_store() -> None:
    from actors.calls import NAMESPACE

    names = [f"auto:{side}:{uuid.uuid4().hex[:6]}" for side in "ab"]
    a = start_peer(names[0], "auto")
    b: Any = (
        ray.remote(DeafPeer)
        .options(name=names[1], namespace=NAMESPACE, num_cpus=0, max_concurrency=100)
        .remote(names[1], "auto")
    )
    get(b.turn_deaf.remote(), 60)
    for seed in range(2):
        sequence_id = uuid.uuid4().hex
        get(a.move.remote(names[1], sequence_id, seed, 500), 60)
        assert get(b.holds.remote(sequence_id, seed, 500))
    assert get(a.num_fallbacks.remote()) == 1, "the peer is remembered, not tried for every part"
    assert get(a.channels.remote())["sending"] == {}

    sequence_id = uuid.uuid4().hex
    get(b.move.remote(names[0], sequence_id, 9, 500))
    assert get(a.holds.remote(sequence_id, 9, 500))
    assert get(b.num_fallbacks.remote()) == 0, "the other direction has gloo"
    for actor in (a, b):
        ray.kill(actor)
