"""A TCP link between two replicas, beside what carries their KV: frames, and news of a death."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from quadriga.kv_transport.channel import parse_frame, seconds_to

MAX_FRAME_BYTES = 64 << 10
HELLO_TIMEOUT_S = 2.0


class Link:
    """One end; used by one thread, `shut` apart."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send_frame(self, content: dict[str, Any], timeout_s: float) -> None:
        """Raises: OSError, TimeoutError."""
        text = json.dumps(content).encode()
        self._socket.settimeout(timeout_s)
        self._socket.sendall(struct.pack("<I", len(text)) + text)

    def receive_frame(self, timeout_s: float) -> dict[str, Any]:
        """Raises: OSError, TimeoutError; RuntimeError: It is no frame of ours."""
        deadline_s = time.monotonic() + timeout_s
        (length,) = struct.unpack("<I", self._receive(4, deadline_s))
        if length > MAX_FRAME_BYTES:
            raise RuntimeError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
        return parse_frame(self._receive(length, deadline_s))

    def check(self) -> None:
        """Raises: OSError: The other end is gone. Does not wait."""
        self._socket.settimeout(0.0)
        with suppress(BlockingIOError):
            if not self._socket.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("the peer closed its control link")

    def shut(self) -> None:
        """Make waiting calls on either end return; from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._socket.close()

    def _receive(self, num_bytes: int, deadline_s: float) -> bytes:
        data = b""
        while len(data) < num_bytes:
            self._socket.settimeout(seconds_to(deadline_s, "a frame"))
            piece = self._socket.recv(num_bytes - len(data))
            if not piece:
                raise ConnectionResetError("the peer closed its control link")
            data += piece
        return data


class Listener:
    """A port on which one peer, which knows the token, may connect."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(16)
        self._socket = socket.create_server((host, 0), backlog=8)
        self.port = int(self._socket.getsockname()[1])

    def accept(self, deadline_s: float) -> Link:
        """The peer's link. Raises: TimeoutError: It did not come."""
        while True:
            self._socket.settimeout(seconds_to(deadline_s, "the peer"))
            connection, _ = self._socket.accept()
            link = Link(connection)
            try:
                hello = link.receive_frame(HELLO_TIMEOUT_S)
                if hmac.compare_digest(str(hello.get("token")).encode(), self.token.encode()):
                    return link
            except (OSError, RuntimeError, ValueError):  # a lone surrogate cannot be encoded
                pass  # a stranger; the peer may still come
            link.close()

    def close(self) -> None:
        self._socket.close()


def join_link(host: str, port: int, token: str, deadline_s: float) -> Link:
    """Go to a listener. Raises: OSError, TimeoutError."""
    left_s = seconds_to(deadline_s, "the meeting")
    link = Link(socket.create_connection((host, port), timeout=left_s))
    try:
        link.send_frame({"token": token}, left_s)
    except OSError:
        link.close()
        raise
    return link
