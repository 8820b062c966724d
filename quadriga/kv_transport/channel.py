"""What a channel between two replicas runs over: frames for control, and the bytes of parts.

A part is sent as

    header frame → verdict frame → payload bytes → verdict frame

and bytes only follow a header that was accepted; but a small part's bytes may follow at once, and
its first verdict is left out then. Pings let a receiver that hears nothing conclude that the sender
is gone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError

if TYPE_CHECKING:
    import torch

_PART_FIELDS = tuple(field.name for field in fields(KVPart))

CONNECT_TIMEOUT_S = 5.0
PING_INTERVAL_S = 5.0
MAX_IDLE_S = 60.0
"""A channel that is not used for so long is given up, and made again when it is: each holds some 20
file descriptors, or buffers of NCCL's on two GPUs."""
SILENCE_TIMEOUT_S = 4 * PING_INTERVAL_S
BROKEN = (RuntimeError, OSError, TimeoutError)
"""What a channel that is of no more use raises."""
NO_ROUTE = "no_route"
"""Code of errors: this transport never reaches that peer, another may."""
TOO_LARGE = "too_large"
"""Code of errors: this part cannot go this way, though others can."""


@dataclass(frozen=True, slots=True)
class ChannelOffer:
    """Where the receiver reaches the sender.

    Attributes:
        generation: Counts the sender's channels; an older one is never joined after a newer.
    """

    source: str
    host: str
    port: int
    generation: int


@dataclass(frozen=True, slots=True)
class LinkOffer(ChannelOffer):
    """How the receiver reaches the sender's control link.

    Attributes:
        token: Proves at the link that the receiver connected.
    """

    token: str


@dataclass(frozen=True, slots=True)
class NcclOffer(LinkOffer):
    """Of a pair of NCCL's.

    Attributes:
        gpu: Where the sender is.
    """

    gpu: str


@dataclass(frozen=True, slots=True)
class NixlOffer(LinkOffer):
    """Of memory that NIXL lets the receiver read."""


class Channel(Protocol):
    """One end of a channel; its thread calls everything but `abort`.

    Every wait ends by its deadline, an instant of `time.monotonic`; what a wait that failed leaves
    behind is of no more use. Broken channels raise RuntimeError, OSError or TimeoutError.

    Attributes:
        max_eager_bytes: A part up to this size follows its header at once: asking first would cost
            more than the bytes of a part that is refused, as its row was reserved before.
    """

    max_eager_bytes: int

    def send_frame(self, content: dict[str, Any], timeout_s: float) -> None:
        """Send a small message; it becomes JSON."""

    def receive_frame(self, timeout_s: float) -> dict[str, Any]:
        """The other end's next message."""

    def send(self, data: torch.Tensor, deadline_s: float) -> None:
        """Send bytes that the other end is about to receive: uint8 [n], wherever they are."""

    def room(self, num_bytes: int, deadline_s: float) -> AbstractContextManager[torch.Tensor]:
        """Memory to receive into, uint8 [num_bytes], for as long as the context lasts.

        Raises: KVTransportError: There is none, or none came free in time.
        """

    def receive(self, data: torch.Tensor, deadline_s: float) -> None:
        """Fill memory from `room` with what the other end sends."""

    def abort(self) -> None:
        """Break off what either end waits for, where that can be done; never waits."""

    def close(self) -> None:
        """Release everything, at the end; does not wait for the other end."""


class Channels(Protocol):
    """Makes channels of one kind."""

    name: str

    def open(self, peer: str, generation: int, invite: Callable[[ChannelOffer], None]) -> Channel:
        """Open a channel to a peer; on the thread of the sending end.

        Args:
            invite: Asks the peer to join; raises QuadrigaError.
        """

    def check(self, offer: ChannelOffer) -> None:
        """Check a peer's offer, on the event loop.

        Raises: KVTransportError, code NO_ROUTE: Nothing will come of it.
        """

    def join(self, offer: ChannelOffer) -> Channel:
        """Join what a peer opened; on the thread of the receiving end."""

    def check_part(self, num_bytes: int) -> None:
        """Raises: KVTransportError, code TOO_LARGE: A part of this size cannot be received."""


def parse_frame(data: bytes) -> dict[str, Any]:
    """A frame's content. Raises: RuntimeError: It is no frame of ours."""
    try:
        content = json.loads(data)
    except ValueError as exc:
        raise RuntimeError(f"a frame is not JSON: {first_line(exc)}") from exc
    if not isinstance(content, dict):
        raise RuntimeError(f"a frame holds a {type(content).__name__}")
    return content


def read_header(frame: dict[str, Any]) -> tuple[KVPart, float, int]:
    """What the header of a part announces: the part, the seconds left, and the eager bytes.

    Raises:
        RuntimeError: It is no header of a part.
    """
    try:
        left_s, eager_bytes = float(frame["left_s"]), int(frame["eager_bytes"])
        given = {name: frame[name] for name in _PART_FIELDS}
        given["shape"] = tuple(int(n) for n in given["shape"])
        part = KVPart(**given)
        numbers = (part.index, part.first_layer, part.num_layers, part.start, part.num_tokens)
        is_sound = (
            isinstance(part.transfer_id, str)
            and isinstance(part.dtype, str)
            and all(type(n) is int and n >= 0 for n in (*numbers, *part.shape))
            and type(part.checksum) is int
            and math.isfinite(left_s)
        )
    except (ArithmeticError, KeyError, TypeError, ValueError) as exc:
        raise RuntimeError(f"a header lacks or garbles {first_line(exc)}") from exc
    if not is_sound:
        raise RuntimeError("a header holds values that no part has")
    return part, left_s, eager_bytes


def read_verdict(frame: dict[str, Any]) -> KVTransportError | None:
    """The receiver's answer to a part; None: it is accepted. Raises: RuntimeError: No verdict."""
    if frame.get("ok") is True:
        return None
    message, code = frame.get("message"), frame.get("code")
    if frame.get("ok") is not False or not isinstance(message, str) or not isinstance(code, str):
        raise RuntimeError("a frame is no verdict")
    return KVTransportError(message, code=code)


def seconds_to(deadline_s: float, what: str) -> float:
    """Time left. Raises: TimeoutError: None is."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(f"{what} is late")
    return left_s


def first_line(exc: BaseException) -> str:
    return str(exc).splitlines()[0][:300] if str(exc) else repr(exc)
