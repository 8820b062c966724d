"""What NIXL's channels do beyond the contract of all transports, `tests/contract/test_lines.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from actors.kv_transfer import handoff_sender
from quadriga.errors import KVTransportError
from quadriga.kv_transport import nixl
from quadriga.kv_transport.channel import NO_ROUTE, TOO_LARGE, ChannelOffer
from quadriga.kv_transport.nixl import NixlChannel, NixlChannels, find_nixl
from quadriga.kv_transport.pairs import Invite, PairTransport
from tests.contract.lines import WAIT_S, Rig, Sink, make_rig
from tests.contract.test_lines import localhost
from tests.unit.actors.test_handoff_sender import transfer


@pytest.fixture
def rig() -> Iterator[Rig]:
    def make(me: str, sink: Sink, invite: Invite) -> PairTransport:
        channels = NixlChannels(me, localhost, find_nixl(), torch.device("cpu"))
        return PairTransport(me, sink, channels, invite)

    with make_rig(make) as rig:
        yield rig


def test_a_buffer_grows_with_the_parts_and_is_described_once_a_size(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[int] = []
    describe = nixl.Agent.describe

    def count(self: nixl.Agent, registered: object) -> bytes:
        described.append(1)
        return describe(self, registered)

    monkeypatch.setattr(nixl.Agent, "describe", count)
    for num_tokens in (10, 5, 10, 100, 90, 3000, 1):
        piece = rig.make(num_tokens)
        rig.send(piece).result(WAIT_S)
        assert torch.equal(rig.sink.parts[-1][1], piece[1])
    assert len(described) == 3


def test_a_transfer_sends_what_is_larger_than_a_part_layer_by_layer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, kv = rig.make(200)
    monkeypatch.setattr(nixl, "MAX_PART_BYTES", kv.nbytes // 2)
    with pytest.raises(KVTransportError, match="send smaller parts") as refusal:
        rig.send((part, kv)).result(WAIT_S)
    assert refusal.value.code == TOO_LARGE
    assert rig.offers == []
    monkeypatch.setattr(handoff_sender, "MAX_PART_BYTES", kv.nbytes // 2)

    async def send() -> None:
        made = transfer(transport=rig.a)
        await made.send(3, 0, kv, deadline_s=WAIT_S)
        await made.abort()

    rig.run(send())
    layers = [(part.index, part.first_layer, part.num_layers) for part, _ in rig.sink.parts]
    assert layers == [(0, 3, 1), (1, 4, 1)]
    assert torch.equal(torch.cat([piece for _, piece in rig.sink.parts]), kv)


@pytest.mark.parametrize(
    "frame",
    [
        {"gpu": None, "note": 1},
        {"address": "here", "gpu": None, "note": 1},
        {"address": 1, "gpu": "first", "note": 1},
        {"address": 1, "gpu": None, "note": 1, "agent": "no hex"},
        {"address": 1, "gpu": None, "note": 1, "agent": "00ff"},
        {"address": 1, "gpu": None, "note": 1},
    ],
)
def test_a_place_that_is_none_breaks_the_channel(frame: dict[str, object]) -> None:
    class OneFrame:
        def receive_frame(self, timeout_s: float) -> dict[str, object]:
            return frame

        def close(self) -> None: ...

    channel = NixlChannel(
        OneFrame(),  # type: ignore[arg-type]
        nixl.Agent(find_nixl(), "me"),
        torch.device("cpu"),
    )
    with pytest.raises(RuntimeError):
        channel.receive(torch.empty(8, dtype=torch.uint8), float("inf"))
    channel.close()


def test_another_transport_s_offer_finds_no_route() -> None:
    channels = NixlChannels("me", localhost, None, torch.device("cpu"))
    with pytest.raises(KVTransportError) as refusal:
        channels.check(ChannelOffer("p", "127.0.0.1", 1, 1))
    assert refusal.value.code == NO_ROUTE
