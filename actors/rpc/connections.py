"""Calls between actors over TCP connections of their own.

A call through Ray takes each side some 400 µs of processor time, whatever it carries; a message
over a connection takes a tenth of it (docs/experiments/serving.md). Ray places, finds and restarts
the actors, tells of their deaths, and carries calls until a connection stands, and where none can.

Each side begins with 32 random bytes, and proves with them and the other's that it has the key that
Ray has given to both. Then come frames: the length of the content and the number of the call, in
network order, a digest keyed with the key and both greetings, over all that and the frame's place
in its direction, and the content, pickled. Nothing is unpickled that somebody without the key has
sent, has changed or sends again. Frames are not encrypted, and whoever can read what Ray sends can
read the key there.
"""

from __future__ import annotations

import asyncio
import copy
import hmac
import itertools
import logging
import os
import pickle
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import ray

from quadriga.background import background
from quadriga.errors import QuadrigaError, ReplicaDied, ReplicaError
from quadriga.ports import LOOPBACK

logger = logging.getLogger(__name__)

GREETING_BYTES = 32
GREETING_TIMEOUT_S = 5.0
MAX_STRANGERS = 1024
"""Connections to one actor that have not proved yet that they have the key; of more, the oldest are
closed."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""Seconds, probes and milliseconds until a peer that is out of reach counts as lost."""
MAX_FRAME_BYTES = 1 << 30
DIGEST_BYTES = 16
_HEAD = struct.Struct("!IQ")
_OVERHEAD = _HEAD.size + DIGEST_BYTES

Outcome = tuple[bool, Any]
"""(whether the call returned, its result or its error)."""


@dataclass(frozen=True, slots=True)
class CallAddress:
    """Where an actor takes calls.

    Attributes:
        key: Of the actor's process; whoever has it may call.
    """

    host: str
    port: int
    key: bytes = field(repr=False)


class _End(asyncio.Protocol, ABC):
    """One end of a connection: the greeting, then frames.

    Attributes:
        nonce: What this end began with.
        is_trusted: The other end has the key.
        lost: Resolves when the connection is gone.
    """

    ME: ClassVar[bytes]
    PEER: ClassVar[bytes]
    PROVES_FIRST: ClassVar[bool]

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.nonce = secrets.token_bytes(GREETING_BYTES)
        self._peer_nonce = b""
        self._received = bytearray()
        self._num_sent = self._num_taken = 0
        self._transport: asyncio.Transport | None = None
        self.is_trusted = False
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport.get_extra_info("socket"))
        self._transport.write(self.nonce)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while self._transport is not None and self._take():
            pass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._received.clear()
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self) -> None:
        """End the connection at once; calls under way get no answer."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _send(self, number: int, content: bytes) -> None:
        """Send a frame. Raises: ReplicaError: It is too large."""
        if len(content) > MAX_FRAME_BYTES:
            raise ReplicaError(f"{len(content)} bytes are too many for one call", code="too_large")
        if self._transport is None:
            return
        head = _HEAD.pack(len(content), number)
        digest = self._digest(self.ME, self._num_sent, head, content)
        self._transport.write(head + digest + content)
        self._num_sent += 1

    def _take(self) -> bool:
        """Take one message off what was received; whether there was a whole one."""
        if not self.is_trusted:
            return self._take_greeting()
        if len(self._received) < _OVERHEAD:
            return False
        length, number = _HEAD.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            logger.error("a frame of %d bytes ends a connection between actors", length)
            self.close()
            return False
        if len(self._received) < _OVERHEAD + length:
            return False
        frame = bytes(self._received[: _OVERHEAD + length])
        del self._received[: len(frame)]
        head, content = frame[: _HEAD.size], frame[_OVERHEAD:]
        digest = self._digest(self.PEER, self._num_taken, head, content)
        if not hmac.compare_digest(digest, frame[_HEAD.size : _OVERHEAD]):
            logger.error("a forged frame ends a connection between actors")
            self.close()
            return False
        self._num_taken += 1
        self._arrived(number, content)
        return True

    def _take_greeting(self) -> bool:
        if len(self._received) < GREETING_BYTES:
            return False
        taken = bytes(self._received[:GREETING_BYTES])
        del self._received[:GREETING_BYTES]
        if not self._peer_nonce:
            self._peer_nonce = taken
            if self.PROVES_FIRST:
                self._prove()
        elif hmac.compare_digest(taken, self._proof(self.PEER, self._peer_nonce, self.nonce)):
            self._greeted()
            if not self.PROVES_FIRST:
                self._prove()
            self.is_trusted = True
            nonces = sorted((self.nonce, self._peer_nonce))
            self._key = hmac.digest(self._key, b"".join(nonces), "sha256")
        else:
            logger.warning("a connection without the actor's key was closed")
            self.close()
        return True

    def _prove(self) -> None:
        proof = self._proof(self.ME, self.nonce, self._peer_nonce)
        cast(asyncio.Transport, self._transport).write(proof)

    def _proof(self, who: bytes, nonce: bytes, other: bytes) -> bytes:
        return hmac.digest(self._key, who + nonce + other, "sha256")

    def _digest(self, who: bytes, place: int, head: bytes, content: bytes) -> bytes:
        frame = b"%s %d %s%s" % (who, place, head, content)
        return hmac.digest(self._key, frame, "sha256")[:DIGEST_BYTES]

    @abstractmethod
    def _greeted(self) -> None:
        """The other side has the key."""

    @abstractmethod
    def _arrived(self, number: int, content: bytes) -> None:
        """A frame is here."""


class _CalledEnd(_End):
    """The called actor's end: makes each call in a task of its own."""

    ME, PEER, PROVES_FIRST = b"called", b"caller", False

    def __init__(self, server: _CallServer) -> None:
        super().__init__(server.key)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        strangers = self._server.strangers
        strangers[self] = None
        if len(strangers) > MAX_STRANGERS:
            next(iter(strangers)).close()
        asyncio.get_running_loop().call_later(GREETING_TIMEOUT_S, self._end_of_greeting)

    def _end_of_greeting(self) -> None:
        if not self.is_trusted:
            self.close()

    def close(self) -> None:
        super().close()
        self._server.strangers.pop(self, None)

    def _greeted(self) -> None:
        self._server.strangers.pop(self, None)
        self._server.callers[self._peer_nonce] = self

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.strangers.pop(self, None)
        if self._server.callers.get(self._peer_nonce) is self:
            del self._server.callers[self._peer_nonce]

    def _arrived(self, number: int, content: bytes) -> None:
        background(self._answer(number, content))

    async def _answer(self, number: int, content: bytes) -> None:
        outcome = await outcome_of(self._make(content))
        try:
            self._send(number, pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL))
        except Exception as exc:  # a border: the caller would wait for nothing
            logger.exception("what a call returned cannot be sent")
            error = ReplicaError(f"what the call returned cannot be sent: {exc!r}")
            self._send(number, pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL))

    async def _make(self, content: bytes) -> Any:
        method, args = pickle.loads(content)
        if method.startswith("_"):
            raise ReplicaError(f"{method} is not to be called", code="unknown_method")
        return await getattr(self._server.actor, method)(*args)


class _CallServer:
    """Where one actor takes calls: on loopback for its own node, and on its node's address."""

    def __init__(self, actor: object) -> None:
        self.actor = actor
        self.key = secrets.token_bytes(GREETING_BYTES)
        self.strangers: dict[_CalledEnd, None] = {}
        self.callers: dict[bytes, _CalledEnd] = {}
        self._listening: dict[str, asyncio.Server] = {}
        self._opening = asyncio.Lock()

    async def address(self, caller_node: str) -> CallAddress:
        """Listen where callers of a node can reach this process. Raises: OSError."""
        is_here = caller_node == ray.get_runtime_context().get_node_id()
        host: str = LOOPBACK if is_here else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        async with self._opening:
            if host not in self._listening:
                loop = asyncio.get_running_loop()
                # Calls are made in the context in which it listens: in that of the call that asked
                # for the address, they would be that call's children to Ray.
                self._listening[host] = await background(
                    loop.create_server(lambda: _CalledEnd(self), host, 0), Context()
                )
        port = self._listening[host].sockets[0].getsockname()[1]
        return CallAddress(host, port, self.key)


class DirectlyCalled:
    """Mixin of actors that take calls over connections."""

    _call_server: _CallServer | None = None

    async def call_address(self, caller_node: str) -> CallAddress | None:
        """RPC: where processes of a node may call this one; None where calls are to stay with Ray.

        They stay where Ray encrypts what it sends: connections do not. Raises: OSError.
        """
        if os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true"):
            return None
        self._call_server = self._call_server or _CallServer(self)
        return await self._call_server.address(caller_node)

    async def wait_forever(self) -> None:
        """RPC: never returns; a caller that awaits it learns at once when this process is gone."""
        await asyncio.Event().wait()

    async def wait_while_connected(self, nonce: bytes) -> None:
        """RPC: as `wait_forever`, for as long as the connection lasts that began with these bytes.

        So it leaves nothing here when the caller dies.
        """
        caller = self._call_server.callers.get(nonce) if self._call_server is not None else None
        if caller is not None:
            await asyncio.shield(caller.lost)


class Connection(_End):
    """The calling end, on one event loop."""

    ME, PEER, PROVES_FIRST = b"caller", b"called", True

    def __init__(self, name: str, key: bytes) -> None:
        super().__init__(key)
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self.is_ready: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_busy(self) -> bool:
        """Whether calls are under way."""
        return bool(self._waiting)

    @property
    def is_usable(self) -> bool:
        """Whether a call from here would be sent."""
        is_open = self._transport is not None and self.is_trusted
        return is_open and asyncio.get_running_loop() is self._loop

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Make a call and await its result. Raises: as `actors.rpc.ray_rpc.call`."""
        number = next(self._numbers)
        answer = self._waiting[number] = self._loop.create_future()
        try:
            self._send(number, pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL))
            async with asyncio.timeout(timeout_s):
                is_well, result = await answer
        except TimeoutError as exc:
            why = f"{self._name} did not answer {method} within {timeout_s:.1f} s"
            raise ReplicaError(why, code="timeout") from exc
        finally:
            self._waiting.pop(number, None)
        if is_well:
            return result
        try:
            raise result
        finally:
            del result  # its traceback has this frame, and so the call's arguments

    def close_soon(self) -> None:
        """As `close`, from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and the connection with it
            self._loop.call_soon_threadsafe(self.close)

    def fail(self, error: QuadrigaError) -> None:
        """Close the connection, and fail all calls under way."""
        self.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result((False, copy.copy(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if isinstance(exc, MemoryError):  # this process is at fault, and not the other one
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(exc)
        if not self.is_ready.done():
            self.is_ready.set_exception(ConnectionError(f"{self._name} closed the connection"))

    def _greeted(self) -> None:
        if not self.is_ready.done():
            self.is_ready.set_result(None)

    def _arrived(self, number: int, content: bytes) -> None:
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        try:
            answer.set_result(pickle.loads(content))
        except MemoryError as exc:  # of this process: no answer of the other one
            answer.set_exception(exc)
        except Exception as exc:  # a border: the caller would wait for nothing
            error = ReplicaError(f"the answer of {self._name} cannot be read: {exc!r}")
            answer.set_result((False, error))


async def connect(name: str, address: CallAddress, timeout_s: float) -> Connection:
    """Connect to an actor. Raises: OSError: It is not reached in time, or lacks the key."""
    connection = Connection(name, address.key)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: connection, address.host, address.port)
            await connection.is_ready
    except BaseException:
        connection.is_ready.cancel()
        connection.close()
        raise
    return connection


async def outcome_of(made: Awaitable[Any]) -> Outcome:
    """Await what a call is; errors that are not ours are logged, and become a ReplicaError."""
    try:
        return True, await made
    except QuadrigaError as exc:
        return False, exc
    except (Exception, asyncio.CancelledError) as exc:  # one failure must not fail the other calls
        logger.exception("a call failed")
        return False, ReplicaError(f"the call failed: {exc!r}")


def broken(name: str) -> ReplicaDied:
    """What calls fail with whose connection broke while Ray knows of no death."""
    return ReplicaDied(f"the connection to {name} broke", code="unreachable")


def keep_alive(sock: Any) -> None:
    """Have the system find out when a peer is out of reach, as far as it can."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
