"""KV parts by NIXL: the receiver reads them from the sender's memory, over what UCX finds.

UCX chooses the way by itself: InfiniBand and RoCE, CUDA IPC between processes of one machine,
shared memory, TCP. A sender keeps one registered buffer for each peer and copies its parts there;
each part's place goes over a TCP link beside it, with headers, verdicts and pings. The receiver
reads and tells the sender when it has. So a transfer that comes late writes into memory of the
receiver who waits for it, and nowhere else, and what is read from a buffer that was written anew
meanwhile fails its digest.

Each end has an agent of its own, without NIXL's thread: that one polls for ever, and an idle
replica would spend a third of a core on it. Whoever waits for a part drives UCX meanwhile.

Source: the Python API of NIXL 1.5.1 (github.com/ai-dynamo/nixl, docs/python_api.md). Its own form
of places is pickled, so it is not used: a frame has numbers.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch

from quadriga.errors import KVTransportError
from quadriga.kv_transport.channel import (
    CONNECT_TIMEOUT_S,
    NO_ROUTE,
    TOO_LARGE,
    ChannelOffer,
    NixlOffer,
    seconds_to,
)
from quadriga.kv_transport.link import Link, Listener, join_link

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The first finds out which of the others fits torch's CUDA; they work alone, too."""
MAX_PART_BYTES = 256 << 20
POLL_S = 50e-6
"""Between two looks at a transfer that is under way."""


def find_nixl() -> Any:
    """NIXL's Python API.

    Raises:
        KVTransportError: Code "no_route": it cannot be imported, and why.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    reasons = []
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except (ImportError, RuntimeError) as exc:
            reasons.append(str(exc))
        else:
            logging.getLogger(package).setLevel(logging.WARNING)
            return api
    raise KVTransportError(
        f"no NIXL ({'; '.join(reasons)}); in a checkout: pip install '.[nixl]'", code=NO_ROUTE
    )


class Agent:
    """One agent of NIXL with UCX, and its errors as those of a broken channel.

    Raises, from every method:
        RuntimeError: NIXL or UCX failed.
    """

    def __init__(self, api: Any, me: str) -> None:
        self.name = f"{me}/{uuid.uuid4().hex}"
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = _named(lambda: api.nixl_agent(self.name, config))

    def register(self, data: torch.Tensor) -> Any:
        """Let a tensor's memory take part in transfers; returns what `deregister` takes."""
        return _named(lambda: self._agent.register_memory(data))

    def deregister(self, registered: Any) -> None:
        _named(lambda: self._agent.deregister_memory(registered))

    def describe(self, registered: Any) -> bytes:
        """What another agent must know to read that memory."""
        description: bytes = _named(
            lambda: self._agent.get_partial_agent_metadata(
                registered, inc_conn_info=True, backends=["UCX"]
            )
        )
        return description

    def meet(self, description: bytes) -> str:
        """Take another agent's description; returns its name."""
        name = _named(lambda: self._agent.add_remote_agent(description))
        return name.decode() if isinstance(name, bytes) else str(name)

    def begin_read(
        self, data: torch.Tensor, peer: str, address: int, gpu: int | None, note: bytes
    ) -> Any:
        """Begin to fill `data`, which is registered, from a peer's memory; returns a transfer.

        Args:
            address: Where `data.numel()` bytes begin there.
            gpu: Its GPU's index in its process; None: host memory.
            note: What the peer hears when the transfer is done.
        """

        def begin() -> Any:
            agent, where = self._agent, [(address, data.numel(), gpu or 0)]
            remote = agent.get_xfer_descs(where, "DRAM" if gpu is None else "VRAM")
            transfer = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(data), remote, peer, note, ["UCX"]
            )
            if agent.transfer(transfer) == "ERR":
                raise RuntimeError("the read was not begun")
            return transfer

        return _named(begin)

    def is_read(self, transfer: Any) -> bool:
        """Whether a transfer is done; drives it. Raises: RuntimeError: It failed."""
        state = _named(lambda: self._agent.check_xfer_state(transfer))
        if state == "ERR":
            raise RuntimeError("NIXL: the read failed")
        return bool(state == "DONE")

    def release(self, transfer: Any) -> None:
        _named(lambda: self._agent.release_xfer_handle(transfer))

    def has_heard(self, note: bytes) -> bool:
        """Whether a peer's transfer with that note is done; drives it."""
        notes = _named(self._agent.get_new_notifs)
        return any(note in heard for heard in notes.values())

    def close(self) -> None:
        """Release everything; what a transfer still under way reads or writes is free after it."""
        self._agent = None


def _named(call: Callable[[], Any]) -> Any:
    """Call NIXL, whose exceptions are no RuntimeErrors."""
    try:
        return call()
    except RuntimeError:
        raise
    except Exception as exc:  # the binding's own, by kind of failure
        raise RuntimeError(f"NIXL: {exc}") from exc


class NixlChannel:
    """One end: the sender's with its buffer, or the receiver's.

    No part goes unasked: what is read must have its place first.
    """

    max_eager_bytes = 0

    def __init__(self, link: Link, agent: Agent, device: torch.device) -> None:
        self._link = link
        self._agent = agent
        self._device = device
        self._buffer: tuple[torch.Tensor, Any] | None = None
        self._peer: str | None = None
        self._num_parts = 0
        self._unfinished: list[torch.Tensor] = []
        """Memory that a broken transfer may still write to, kept until the agent is closed."""

    def send_frame(self, content: dict[str, Any], timeout_s: float) -> None:
        self._link.send_frame(content, timeout_s)

    def receive_frame(self, timeout_s: float) -> dict[str, Any]:
        return self._link.receive_frame(timeout_s)

    def send(self, data: torch.Tensor, deadline_s: float) -> None:
        description = self._make_room(data)
        assert self._buffer is not None
        place = self._buffer[0][: data.numel()]
        place.copy_(data)
        if place.is_cuda:
            torch.cuda.current_stream(place.device).synchronize()
        self._num_parts += 1
        frame: dict[str, Any] = {
            "address": place.data_ptr(),
            "gpu": place.get_device() if place.is_cuda else None,
            "note": self._num_parts,
        }
        if description is not None:
            frame["agent"] = description.hex()
        self._link.send_frame(frame, seconds_to(deadline_s, "a part"))
        note = _note(self._num_parts)
        self._wait(lambda: self._agent.has_heard(note), deadline_s)

    @contextmanager
    def room(self, num_bytes: int, deadline_s: float) -> Iterator[torch.Tensor]:
        try:
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as exc:  # torch.OutOfMemoryError is one
            raise KVTransportError(f"no memory for a part of {num_bytes} bytes: {exc}") from exc
        if data.is_cuda:  # kernels may still use memory that was freed to the pool
            torch.cuda.current_stream(data.device).synchronize()
        yield data

    def receive(self, data: torch.Tensor, deadline_s: float) -> None:
        frame = self._link.receive_frame(seconds_to(deadline_s, "a part's place"))
        try:
            if "agent" in frame:
                self._peer = self._agent.meet(bytes.fromhex(frame["agent"]))
            address, number = int(frame["address"]), int(frame["note"])
            gpu = None if frame["gpu"] is None else int(frame["gpu"])
        except (KeyError, TypeError, ValueError) as exc:
            raise RuntimeError(f"a part's place lacks or garbles {exc}") from exc
        if self._peer is None:
            raise RuntimeError("a part came before its sender's agent")
        registered = self._agent.register(data)
        self._unfinished.append(data)
        transfer = self._agent.begin_read(data, self._peer, address, gpu, _note(number))
        self._wait(lambda: self._agent.is_read(transfer), deadline_s)
        self._agent.release(transfer)
        self._agent.deregister(registered)
        self._unfinished.clear()

    def abort(self) -> None:
        self._link.shut()

    def close(self) -> None:
        self._link.close()
        self._agent.close()
        self._buffer = None
        self._unfinished.clear()

    def _make_room(self, data: torch.Tensor) -> bytes | None:
        """A buffer for it; returns its description where the receiver has none yet."""
        if self._buffer is not None and self._buffer[0].numel() >= data.numel():
            return None
        if self._buffer is not None:
            self._agent.deregister(self._buffer[1])
            self._buffer = None
        size = 1 << (data.numel() - 1).bit_length()
        buffer = torch.empty(size, dtype=torch.uint8, device=data.device)
        self._buffer = buffer, self._agent.register(buffer)
        return self._agent.describe(self._buffer[1])

    def _wait(self, is_done: Callable[[], bool], deadline_s: float) -> None:
        """Drive a transfer to its end. Raises: TimeoutError; OSError: The other end is gone."""
        while not is_done():
            seconds_to(deadline_s, "a part")
            self._link.check()
            time.sleep(POLL_S)


def _note(number: int) -> bytes:
    return f"part {number}".encode()


class NixlChannels:
    """See `Channels`.

    Args:
        host_for: The local address under which a peer reaches this process.
        api: `find_nixl()`'s.
        device: Where what arrives is to lie.
    """

    name = "nixl"

    def __init__(
        self, me: str, host_for: Callable[[str], str], api: Any, device: torch.device
    ) -> None:
        self._me = me
        self._host_for = host_for
        self._api = api
        self._device = device

    def open(
        self, peer: str, generation: int, invite: Callable[[ChannelOffer], None]
    ) -> NixlChannel:
        host = self._host_for(peer)
        with closing(Listener(host)) as listener:
            invite(NixlOffer(self._me, host, listener.port, generation, listener.token))
            link = listener.accept(time.monotonic() + CONNECT_TIMEOUT_S)
        return self._make(link)

    def check(self, offer: ChannelOffer) -> None:
        if not isinstance(offer, NixlOffer):
            raise KVTransportError(f"{offer.source} does not offer NIXL", code=NO_ROUTE)

    def join(self, offer: ChannelOffer) -> NixlChannel:
        assert isinstance(offer, NixlOffer)
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        return self._make(join_link(offer.host, offer.port, offer.token, deadline_s))

    def check_part(self, num_bytes: int) -> None:
        if num_bytes > MAX_PART_BYTES:
            raise KVTransportError(
                f"a part of {num_bytes} bytes exceeds the {MAX_PART_BYTES} that NIXL's buffer may "
                "have; send smaller parts",
                code=TOO_LARGE,
            )

    def _make(self, link: Link) -> NixlChannel:
        try:
            return NixlChannel(link, Agent(self._api, self._me), self._device)
        except BaseException:
            with suppress(OSError):
                link.close()
            raise
