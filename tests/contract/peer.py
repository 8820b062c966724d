"""A replica reduced to its hand-offs: rows are tensors, there is no engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import ray
import torch

from actors.kv_transfer.handoff_sender import HandoffSender, OutgoingTransfer
from actors.kv_transfer.transport_hub import TransportHub
from actors.rpc.ray_rpc import NAMESPACE, call
from actors.rpc.rpc_batcher import BatchedCalls, RpcBatcher
from quadriga.clock import ManualClock, SystemClock
from quadriga.config.engine import TransportConfig
from quadriga.core.kv import Accepted, KVPart, ResumePoint, TransferOffer
from quadriga.core.replica import DepthClass, ReplicaInfo, Role
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import KVCacheExhausted, QuadrigaError
from quadriga.kv_transport.channel import ChannelOffer
from quadriga.replica.handoff_receiver import HandoffReceiver
from quadriga.scheduling.transfer.handoff import LeaseState
from tests.fake_nccl import FakeNccl
from tests.sequences import make_sequence

NUM_LAYERS = 4
NUM_HEADS = 2
HEAD_DIM = 16
NUM_ROWS = 4
ROW_TOKENS = 8192
DEPTH_CLASS = DepthClass("test", NUM_LAYERS)


def make_state(sequence_id: str, num_tokens: int, *, epoch: int = 0) -> SequenceState:
    """A sequence whose prompt has `num_tokens` and that has emitted its first token."""
    return make_sequence(
        sequence_id,
        [1] * num_tokens,
        SamplingParams(max_tokens=16),
        epoch=epoch,
        output_ids=[7],
        exit_layers=[NUM_LAYERS],
    )


def make_kv(seed: int, num_tokens: int) -> torch.Tensor:
    """Random KV of a whole sequence: [num_layers, 2, num_heads, num_tokens, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_LAYERS, 2, NUM_HEADS, num_tokens, HEAD_DIM, generator=generator)


class Peer(BatchedCalls):
    """Both ends of hand-offs in one actor, with the calls a replica answers.

    The leases it gives go by a clock of their own, which moves by `advance` alone: how long a
    process stands still is no concern of theirs. What waits for an answer goes by the machine's.
    """

    BATCHED = frozenset({"reserve", "commit"})

    def __init__(
        self,
        name: str,
        kind: str,
        lease_s: float = 10.0,
        deadline_s: float = 20.0,
        gpu: str | None = None,
    ) -> None:
        self._name = name
        self._rows = torch.zeros(NUM_ROWS, NUM_LAYERS, 2, NUM_HEADS, ROW_TOKENS, HEAD_DIM)
        self._held: dict[str, int] = {}
        self.joined: dict[str, SequenceState] = {}
        # NCCL's own part is a stand-in here; each peer has a GPU to itself, unless one is named.
        self.nccl = FakeNccl(gpu or name) if kind == "nccl" or gpu else None
        self._clock = ManualClock()
        self._renewed: dict[str, asyncio.Event] = {}
        self._receiver = HandoffReceiver(DEPTH_CLASS, self, self._clock)
        self.transport = TransportHub(
            kind,  # type: ignore[arg-type]
            name,
            self._receiver,
            lambda _: "127.0.0.1",
            clock=SystemClock(),
            nccl=self.nccl.library() if self.nccl is not None else None,
        )
        config = TransportConfig(lease_s=lease_s, deadline_s=deadline_s)
        self._sender = HandoffSender(name, self.transport, RpcBatcher(call), config)
        self._transfers: dict[str, OutgoingTransfer] = {}
        self._is_sending = asyncio.Event()

    # The calls of a replica

    async def reserve(self, offer: TransferOffer) -> Accepted:
        await self._receiver.reserve(offer)
        return Accepted(
            ReplicaInfo(self._name, Role.DECODE, DEPTH_CLASS, "node", "incarnation", NUM_ROWS, 0)
        )

    async def renew(self, transfer_id: str) -> bool:
        is_open = self._receiver.leases.renew(transfer_id, now_s=self._clock.now_s())
        if is_open and transfer_id in self._renewed:
            self._renewed.pop(transfer_id).set()
        return is_open

    async def commit(
        self,
        transfer_id: str,
        state: SequenceState,
        sums: Sequence[int],
        resume: ResumePoint | None = None,
    ) -> None:
        await self._receiver.commit(transfer_id, state, sums, resume)

    async def abort(self, transfer_id: str) -> LeaseState | None:
        return await self._receiver.abort(transfer_id)

    async def kv_connect(self, offer: ChannelOffer) -> None:
        self.transport.connect(offer)

    async def kv_deliver(
        self, source: str, part: KVPart, refs: list[Any], deadline_s: float
    ) -> None:
        await self.transport.deliver(source, part, refs, deadline_s)

    # RowHost

    async def reserve_row(self, offer: TransferOffer) -> tuple[int, int]:
        free = set(range(NUM_ROWS)) - set(self._held.values())
        if not free:
            raise KVCacheExhausted("no row is free")
        self._held[offer.sequence_id] = min(free)
        return self._held[offer.sequence_id], 0

    async def release_row(self, sequence_id: str) -> None:
        del self._held[sequence_id]

    async def join(self, state: SequenceState, resume: ResumePoint | None, depth: int) -> None:
        self.joined[state.sequence_id] = state

    def write_kv(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        self._rows[
            row, first_layer : first_layer + kv.shape[0], :, :, start : start + kv.shape[3]
        ] = kv

    # What tests ask for

    async def pid(self) -> int:
        return os.getpid()

    async def open(self, peer: str, sequence_id: str, num_tokens: int, epoch: int = 0) -> str:
        """Reserve at `peer`; returns the transfer's id."""
        state = make_state(sequence_id, num_tokens, epoch=epoch)
        transfer = await self._sender.reserve(peer, state, DEPTH_CLASS)
        self._transfers[transfer.offer.transfer_id] = transfer
        return transfer.offer.transfer_id

    async def send(
        self,
        transfer_id: str,
        seed: int,
        spans: Sequence[tuple[int, int, int, int]],
        deadline_s: float | None = None,
    ) -> None:
        """Send (first_layer, num_layers, start, stop) pieces of `make_kv(seed)`.

        Args:
            deadline_s: For each piece; None for the peer's own.
        """
        transfer = self._transfers[transfer_id]
        kv = make_kv(seed, max(stop for *_, stop in spans))
        for first_layer, num_layers, start, stop in spans:
            piece = kv[first_layer : first_layer + num_layers, :, :, start:stop].contiguous()
            await transfer.send(first_layer, start, piece, deadline_s=deadline_s)

    async def send_corrupt(self, transfer_id: str, num_tokens: int) -> None:
        """Send all KV as one part, with one byte flipped after its checksum was taken."""
        transfer = self._transfers[transfer_id]
        hub = self.transport
        plain_send = hub.send

        async def flip(peer: str, part: KVPart, kv: torch.Tensor, *, deadline_s: float) -> None:
            harmed = kv.clone()
            harmed.view(torch.uint8).reshape(-1)[harmed.nbytes // 2] ^= 1
            await plain_send(peer, part, harmed, deadline_s=deadline_s)

        hub.send = flip  # type: ignore[method-assign]
        try:
            await transfer.send(0, 0, make_kv(1, num_tokens))
        finally:
            hub.send = plain_send  # type: ignore[method-assign]

    async def send_forever(self, transfer_id: str, num_tokens: int) -> str:
        """Send the same part again and again until it fails; returns the error's class and code."""
        transfer = self._transfers[transfer_id]
        kv = make_kv(1, num_tokens)
        self._is_sending.set()
        try:
            while True:
                await transfer.send(0, 0, kv)
        except QuadrigaError as exc:
            return f"{type(exc).__name__}:{exc.code}"
        finally:
            self._is_sending.clear()

    async def is_sending(self) -> None:
        """Return once `send_forever` is under way."""
        await self._is_sending.wait()

    async def commit_transfer(self, transfer_id: str, num_tokens: int) -> None:
        transfer = self._transfers[transfer_id]
        await transfer.commit(make_state(transfer.offer.sequence_id, num_tokens))

    async def abort_transfer(self, transfer_id: str) -> LeaseState | None:
        return await self._transfers[transfer_id].abort()

    async def stop_renewing(self, transfer_id: str) -> None:
        self._transfers[transfer_id]._renewing.cancel()

    async def next_renewal(self, transfer_id: str) -> None:
        """Return once the lease of a transfer to here was renewed, after this call."""
        renewed = self._renewed[transfer_id] = asyncio.Event()
        await renewed.wait()

    async def advance(self, seconds: float) -> None:
        """Make the leases given here older."""
        self._clock.advance(seconds)

    async def cancel(self, sequence_id: str) -> None:
        await self._receiver.cancel(sequence_id)

    async def sweep(self) -> int:
        return await self._receiver.sweep()

    async def move(
        self, peer: str, sequence_id: str, seed: int, num_tokens: int, num_parts: int = 4
    ) -> None:
        """A whole hand-off: reserve, `num_parts` layer groups, commit."""
        transfer_id = await self.open(peer, sequence_id, num_tokens)
        group = NUM_LAYERS // num_parts
        spans = [(layer, group, 0, num_tokens) for layer in range(0, NUM_LAYERS, group)]
        await self.send(transfer_id, seed, spans)
        await self.commit_transfer(transfer_id, num_tokens)

    async def holds(self, sequence_id: str, seed: int, num_tokens: int) -> bool:
        """Whether the sequence's row has exactly the KV that `make_kv(seed)` makes."""
        row = self._rows[self._held[sequence_id]]
        return torch.equal(row[:, :, :, :num_tokens], make_kv(seed, num_tokens))

    async def epoch(self, sequence_id: str) -> int:
        return self.joined[sequence_id].epoch

    async def num_held(self) -> int:
        return len(self._held)

    async def forget(self) -> None:
        """Back to the base line."""
        await self._receiver.abort_all()
        self._held.clear()
        self.joined.clear()

    async def num_fallbacks(self) -> int:
        return self.transport.num_fallbacks

    async def channels(self) -> dict[str, Any]:
        return self.transport.channels()


def start_peer(name: str, kind: str, **settings: Any) -> Any:
    """A peer as a named actor, in the namespace of the replicas."""
    return (
        ray.remote(Peer)
        .options(name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=100)
        .remote(name, kind, **settings)
    )
