"""KV parts between GPUs over NCCL: a communicator of two for each ordered pair of replicas.

No group spans more than two replicas, so one that comes or goes stalls no other. Bytes go from the
sender's device memory to the receiver's; headers, verdicts and pings over a TCP link beside the
pair: a receive that waits in NCCL is a kernel that spins on the GPU, has no deadline, and can only
be broken off with its communicator. The offer goes through `kv_connect`; NCCL's unique id follows
over the link, so that none is made, and no bootstrap thread of NCCL left waiting, for a peer that
refuses. After a failure the pair is aborted and the next use builds a new one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from quadriga.errors import KVTransportError
from quadriga.kv_transport.channel import (
    CONNECT_TIMEOUT_S,
    NO_ROUTE,
    TOO_LARGE,
    ChannelOffer,
    NcclOffer,
)
from quadriga.kv_transport.link import Link, Listener, join_link
from quadriga.kv_transport.nccl_library import NcclLibrary
from quadriga.kv_transport.nccl_pair import NcclPair

OPEN_TIMEOUT_S = 15.0
"""For a pair to form: NCCL looks at the machine's topology first."""
STAGING_BYTES = 256 << 20
"""Device memory for parts on their way, over all channels; also the largest part."""
MAX_STUCK_PAIRS = 4
"""Pairs whose calls into NCCL do not even return after an abort: then NCCL is given up."""


class Staging:
    """Device memory for parts on their way; bounded, and waited for."""

    def __init__(self, library: NcclLibrary, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._library = library
        self._stream = library.device.make_stream()
        self.taken_bytes = 0
        self._changed = threading.Condition()

    def take(self, num_bytes: int, deadline_s: float) -> torch.Tensor:
        """Memory, uint8 [num_bytes]; the caller gives it back.

        Raises:
            KVTransportError: There is never, or not in time, or on the whole device, that much.
        """
        self.check(num_bytes)
        with self._changed:
            if not self._changed.wait_for(
                lambda: self.taken_bytes + num_bytes <= self.limit_bytes,
                max(0.0, deadline_s - time.monotonic()),
            ):
                raise KVTransportError(
                    f"no staging memory came free in time: {self.taken_bytes} of "
                    f"{self.limit_bytes} bytes are taken",
                    code="timeout",
                )
            self.taken_bytes += num_bytes
        try:
            return self._library.device.empty(num_bytes, self._stream)
        except RuntimeError as exc:  # torch.OutOfMemoryError is one
            self.give_back(num_bytes)
            raise KVTransportError(f"no staging memory of {num_bytes} bytes: {exc}") from exc

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self.taken_bytes -= num_bytes
            self._changed.notify_all()

    def holds(self, data: torch.Tensor) -> bool:
        """Whether the tensor is on the device already."""
        return self._library.device.holds(data)

    def check(self, num_bytes: int) -> None:
        """Raises: KVTransportError, code TOO_LARGE."""
        if num_bytes > self.limit_bytes:
            raise KVTransportError(
                f"a part of {num_bytes} bytes exceeds NCCL's staging memory of "
                f"{self.limit_bytes}; send smaller parts",
                code=TOO_LARGE,
            )


class NcclChannel:
    """One end of a pair and of the link beside it.

    No part goes unasked: a transfer that is not received would have to be aborted, and
    the pair with it.
    """

    max_eager_bytes = 0

    def __init__(self, link: Link, pair: NcclPair, staging: Staging) -> None:
        self._link = link
        self._pair = pair
        self._staging = staging

    def send_frame(self, content: dict[str, Any], timeout_s: float) -> None:
        self._link.send_frame(content, timeout_s)

    def receive_frame(self, timeout_s: float) -> dict[str, Any]:
        return self._link.receive_frame(timeout_s)

    def send(self, data: torch.Tensor, deadline_s: float) -> None:
        if self._staging.holds(data):
            self._pair.send(data, deadline_s, self._link.check)
            return
        with self.room(data.numel(), deadline_s) as here:
            self._pair.stream.copy(data, here)
            self._pair.send(here, deadline_s, self._link.check)

    @contextmanager
    def room(self, num_bytes: int, deadline_s: float) -> Iterator[torch.Tensor]:
        # Half the time at most, so that the other end still hears of a refusal.
        now_s = time.monotonic()
        memory = [self._staging.take(num_bytes, now_s + (deadline_s - now_s) / 2)]

        def give_back() -> None:
            memory.clear()
            self._staging.give_back(num_bytes)

        try:
            yield memory[0]
        finally:
            self._pair.when_unused(give_back)

    def receive(self, data: torch.Tensor, deadline_s: float) -> None:
        self._pair.receive(data, deadline_s, self._link.check)

    def abort(self) -> None:
        self._link.shut()
        self._pair.abort()

    def close(self) -> None:
        self._link.close()
        self._pair.abort()


class NcclChannels:
    """See `Channels`.

    KV to be sent is on this process's GPU, complete: a runner's `read_kv` orders its copy behind
    the engine's stream and waits for it. What the sink gets is complete too, and its memory is
    reused when `store` returns. KV in host memory is copied to the GPU first.

    Args:
        host_for: The local address under which a peer reaches this process.
        library: NCCL on this process's GPU.
    """

    name = "nccl"

    def __init__(
        self,
        me: str,
        host_for: Callable[[str], str],
        library: NcclLibrary,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._me = me
        self._host_for = host_for
        self._library = library
        self.staging = Staging(library, staging_bytes)
        self._pairs: list[NcclPair] = []
        self._lock = threading.Lock()

    def open(
        self, peer: str, generation: int, invite: Callable[[ChannelOffer], None]
    ) -> NcclChannel:
        self._check_stuck()
        host = self._host_for(peer)
        with closing(Listener(host)) as listener:
            gpu = self._library.device.gpu
            invite(NcclOffer(self._me, host, listener.port, generation, listener.token, gpu))
            link = listener.accept(time.monotonic() + CONNECT_TIMEOUT_S)
        return self._lead(link)

    def check(self, offer: ChannelOffer) -> None:
        if not isinstance(offer, NcclOffer):
            raise KVTransportError(f"{offer.source} does not offer NCCL", code=NO_ROUTE)
        if reason := self._library.why_not(offer.gpu):
            raise KVTransportError(
                f"no NCCL between {offer.source} and {self._me}: {reason}", code=NO_ROUTE
            )
        self._check_stuck()

    def join(self, offer: ChannelOffer) -> NcclChannel:
        assert isinstance(offer, NcclOffer)
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        link = join_link(offer.host, offer.port, offer.token, deadline_s)
        try:
            uid = bytes.fromhex(link.receive_frame(OPEN_TIMEOUT_S)["uid"])
            return self._open(link, uid, 1, deadline_s)
        except BaseException:
            link.close()
            raise

    def check_part(self, num_bytes: int) -> None:
        self.staging.check(num_bytes)

    def _lead(self, link: Link) -> NcclChannel:
        """Form a pair with a peer that connected, as its rank 0."""
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        try:
            uid = self._library.unique_id()
            link.send_frame({"uid": uid.hex()}, OPEN_TIMEOUT_S)
            return self._open(link, uid, 0, deadline_s)
        except BaseException:
            link.close()
            raise

    def _open(self, link: Link, uid: bytes, rank: int, deadline_s: float) -> NcclChannel:
        pair = NcclPair(self._library, rank)
        with self._lock:
            self._pairs = [p for p in self._pairs if not p.is_quiet()]
            self._pairs.append(pair)
        try:
            pair.open(uid, deadline_s, link.check)
        except BaseException:
            pair.abort()
            raise
        return NcclChannel(link, pair, self.staging)

    def _check_stuck(self) -> None:
        with self._lock:
            num_stuck = sum(pair.is_stuck for pair in self._pairs)
        if num_stuck >= MAX_STUCK_PAIRS:
            raise KVTransportError(
                f"{num_stuck} NCCL communicators of {self._me} do not return, not even when "
                "aborted; run with NCCL_DEBUG=INFO",
                code=NO_ROUTE,
            )
