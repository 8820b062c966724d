"""Every kind of line keeps the contract: gloo, NIXL, NCCL's logic.

The loop that GPU tests use does in `tests/gpu/test_nccl.py`, without a GPU as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quadriga.kv_transport.gloo import GlooChannels
from quadriga.kv_transport.nccl import NcclChannels
from quadriga.kv_transport.nccl_library import NcclLibrary
from quadriga.kv_transport.nixl import NixlChannels, find_nixl
from quadriga.kv_transport.pairs import Invite, PairTransport
from tests.contract.lines import LinesContract, Rig, Sink, make_rig
from tests.fake_nccl import FakeDevice, FakeNccl
from tests.waiting import wait_until


def localhost(_: str) -> str:
    return "127.0.0.1"


@pytest.fixture(params=["gloo", "nixl", "nccl"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    modules = {name: FakeNccl(f"gpu-{name}") for name in "ab"}

    def make(me: str, sink: Sink, invite: Invite) -> PairTransport:
        if request.param == "gloo":
            return PairTransport(me, sink, GlooChannels(me, localhost), invite)
        if request.param == "nixl":
            nixl = NixlChannels(me, localhost, find_nixl(), torch.device("cpu"))
            return PairTransport(me, sink, nixl, invite)
        library = NcclLibrary(modules[me], FakeDevice(f"gpu-{me}"))
        return PairTransport(me, sink, NcclChannels(me, localhost, library), invite)

    with make_rig(make) as rig:
        yield rig
    # Aborts end by themselves; a rank that met nobody has nothing to abort.
    made = [module.communicators for module in modules.values()]
    wait_until(lambda: all(c.is_aborted.is_set() or c.is_alone for some in made for c in some))
    for module in modules.values():
        module.close()


class TestLines(LinesContract):
    """See `LinesContract`."""
