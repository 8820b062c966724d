"""Moving a sequence to another replica, the source's side: reserve → copy → commit → release.

The source keeps its KV until the destination has acknowledged the commit. Why the sequence moves
is not known here: after a prefill, or between decode replicas with rounds of pre-copy, the calls
are the same.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actors.rpc.rpc_batcher import RpcBatcher
from quadriga.background import background
from quadriga.config.engine import TransportConfig
from quadriga.core.kv import Accepted, KVPart, ResumePoint, TransferOffer
from quadriga.core.replica import DepthClass
from quadriga.core.request import SequenceState, layers_of, remaining_of
from quadriga.errors import MigrationFailed, QuadrigaError, ReplicaError, is_known_death
from quadriga.interfaces import KVTransport
from quadriga.kv_transport.payload import checksum, pack, to_host
from quadriga.scheduling.transfer.handoff import LeaseState
from quadriga.scheduling.transfer.sequence_export import StepPhase

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_CALL_TIMEOUT_S = 5.0
MAX_PART_BYTES = 64 << 20
"""Of a part, unless a layer is larger: receivers on GPUs have 256 MiB for parts on their way."""
GROWTH_TOKENS = 32
"""What a sequence may grow by while it is on its way."""


def call_timeout_s(deadline_s: float) -> float:
    """For the small calls of a transfer: reserve, renew, abort, and one attempt at a commit."""
    return min(MAX_CALL_TIMEOUT_S, deadline_s / 2)


class OutgoingTransfer:
    """One transfer at its source; made by `HandoffSender.reserve`."""

    def __init__(
        self,
        offer: TransferOffer,
        accepted: Accepted,
        transport: KVTransport,
        calls: RpcBatcher,
        deadline_s: float,
    ) -> None:
        self.offer = offer
        self.peer = accepted.peer
        self.held_tokens = accepted.held_tokens  # the first, whose KV is there already
        self._transport = transport
        self._calls = calls
        self._deadline_s = deadline_s
        self._checksums: list[int] = []
        self._carried: list[tuple[KVPart, bytes]] = []
        self._may_be_committed = False
        self._renewing: asyncio.Task[None] | None = asyncio.create_task(self._renew())

    async def send(
        self, first_layer: int, start: int, kv: torch.Tensor, *, deadline_s: float | None = None
    ) -> None:
        """Copy KV [num_layers, 2, num_kv_heads, num_tokens, head_dim] to the destination.

        Args:
            deadline_s: For each part of it; None for the transport's own.

        Raises:
            KVTransportError: It did not arrive within the deadline, or is not wanted any more.
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        count = max(1, MAX_PART_BYTES * len(kv) // kv.nbytes)  # of layers: no copy is made of them
        for at in range(0, len(kv), count):
            piece = kv[at : at + count]
            part = self._next_part(first_layer + at, start, piece)
            await self._transport.send(self.peer.name, part, piece, deadline_s=deadline_s)

    def carry(self, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """Send KV with the commit instead of before it; nothing can be sent afterwards."""
        kv = to_host(kv)
        self._carried.append((self._next_part(first_layer, start, kv), pack(kv)))

    def _next_part(self, first_layer: int, start: int, kv: torch.Tensor) -> KVPart:
        self._checksums.append(checksum(kv))
        return KVPart(
            transfer_id=self.offer.transfer_id,
            index=len(self._checksums) - 1,
            first_layer=first_layer,
            num_layers=kv.shape[0],
            start=start,
            num_tokens=kv.shape[3],
            shape=tuple(kv.shape),
            dtype=str(kv.dtype).removeprefix("torch."),
            checksum=self._checksums[-1],
        )

    async def commit(
        self,
        state: SequenceState,
        resume: ResumePoint | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """Make the destination the owner; returns once it has acknowledged.

        A lost answer is asked for again: a commit may be repeated.

        Args:
            state: The sequence with everything emitted so far; sent with the offered epoch.
            resume: Where it stands, if it is decoding here.
            deadline_s: To ask again until then; None for the transport's own.

        Raises:
            MigrationFailed: No acknowledgement came. Whether the destination has the sequence is
                settled by `abort`, which a committed destination refuses.
        """
        self._may_be_committed = True
        owned = replace(state, epoch=self.offer.epoch)
        if resume is not None and self._carried:
            resume = replace(resume, last_kv=tuple(self._carried))
        deadline_s = deadline_s or self._deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._commit_until_answered(owned, resume, call_timeout_s(deadline_s))
        except TimeoutError as exc:
            raise MigrationFailed(
                f"{self.peer.name} did not acknowledge within {deadline_s:.1f} s", code="timeout"
            ) from exc
        self._stop_renewing()

    async def _commit_until_answered(
        self, state: SequenceState, resume: ResumePoint | None, timeout_s: float
    ) -> None:
        what = self.offer.transfer_id, state, tuple(self._checksums), resume
        # Commits after a prefill are batched; a decoding sequence stands still until its commit.
        make = self._calls.call if resume is None else self._calls.call_alone
        while True:
            try:
                await make(self.peer.name, "commit", *what, timeout_s=timeout_s)
                return
            except ReplicaError as exc:
                if exc.code not in ("timeout", "unreachable"):
                    raise
                await asyncio.sleep(0.05)

    async def abort(self) -> LeaseState | None:
        """Give the transfer up on both sides; may be repeated.

        Returns:
            What it is at the destination now: COMMITTED where it was too late and the
            destination owns the sequence, CANCELLED where the sequence is not wanted any more;
            None when there was no answer and the destination may own it: it lives, as far as is
            known, and was asked to commit.
        """
        try:
            return await self.settle()
        except QuadrigaError as exc:
            logger.info("abort of %s at %s: %s", self.offer.transfer_id, self.peer.name, exc)
            is_out = is_known_death(exc) or not self._may_be_committed
            return LeaseState.ABORTED if is_out else None

    async def settle(self) -> LeaseState:
        """As `abort`, for a caller that must know how it ended.

        Raises:
            ReplicaDied: The destination is gone; or, code "unreachable", cannot be reached now.
            ReplicaError: It does not answer.
        """
        self._stop_renewing()
        await self._transport.abort(self.peer.name, self.offer.transfer_id)
        state: LeaseState = await self._call("abort", self.offer.transfer_id)
        return state

    async def step_phase(self) -> StepPhase:
        """Where the destination is in its steps. Raises: ReplicaError."""
        phase: StepPhase = await self._call("step_phase")
        return phase

    async def _call(self, method: str, *args: Any) -> Any:
        timeout_s = call_timeout_s(self._deadline_s)
        return await self._calls.call_alone(self.peer.name, method, *args, timeout_s=timeout_s)

    def _stop_renewing(self) -> None:
        """Let the lease lapse; may be repeated.

        A task keeps what it was cancelled with, and that its frame, and that the transfer. Held on
        to here, they would wait for the garbage collector, which seldom comes, with all the KV.
        """
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def _renew(self) -> None:
        """Keep the lease alive while a chunk is computed of which nothing can be sent yet."""
        while True:
            await asyncio.sleep(self.offer.lease_s / 3)
            try:
                if not await self._call("renew", self.offer.transfer_id):
                    return
            except QuadrigaError as exc:
                if is_known_death(exc):
                    return
                logger.info("lease of %s not renewed: %s", self.offer.transfer_id, exc)


class HandoffSender:
    """The source side of a replica's transfers."""

    def __init__(
        self, me: str, transport: KVTransport, calls: RpcBatcher, config: TransportConfig
    ) -> None:
        self._me = me
        self._transport = transport
        self._calls = calls
        self._config = config

    async def reserve(
        self,
        peer: str,
        state: SequenceState,
        depth_class: DepthClass,
        *,
        is_live: bool = False,
        depths: tuple[int, int] = (0, 0),
        numerics: str = "",
        block_keys: tuple[bytes, ...] = (),
    ) -> OutgoingTransfer:
        """Ask a replica for room for a sequence and all it can grow to.

        Args:
            depth_class: The layers of its KV.
            is_live: The sequence is decoding here, and goes on until the commit.
            depths: Least and most layers of a live one; see `ExitParams.depth_bounds`.
            numerics: Of this replica.
            block_keys: Of the prompt, where the destination may have some of its KV.

        Raises:
            KVCacheExhausted: It has no room now.
            MigrationFailed: It will not take this sequence.
            ReplicaError: It is gone or does not answer.
        """
        offer = TransferOffer(
            transfer_id=uuid.uuid4().hex,
            sequence_id=state.sequence_id,
            depth_class=depth_class,
            source=self._me,
            epoch=state.epoch + 1,
            num_tokens=min(
                state.num_tokens + (GROWTH_TOKENS if is_live else 0), state.max_total_tokens
            ),
            max_total_tokens=state.max_total_tokens,
            lease_s=self._config.lease_s,
            priority=state.priority,
            prediction=remaining_of(state),
            is_live=is_live,
            min_depth=depths[0],
            max_depth=depths[1],
            numerics=numerics,
            block_keys=block_keys,
            grammar=state.sampling.grammar,
            expected_layers=layers_of(state),
        )
        timeout_s = call_timeout_s(self._config.deadline_s)
        try:
            info: Accepted = await self._calls.call(peer, "reserve", offer, timeout_s=timeout_s)
        except (asyncio.CancelledError, ReplicaError):
            # The reservation may have been made: give it back without waiting for it to lapse.
            background(self._calls.tell(peer, "abort", offer.transfer_id))
            raise
        return OutgoingTransfer(offer, info, self._transport, self._calls, self._config.deadline_s)
