"""Calls to named actors: cached handles, a deadline on every call, our errors instead of Ray's.

Actors call each other over connections (`actors.rpc.connections`) once these stand; everybody else,
and whoever gets none, calls through Ray.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from actors.rpc.connections import Connection, broken, connect
from quadriga.background import background
from quadriga.errors import QuadrigaError, ReplicaDied, ReplicaError, is_known_death

logger = logging.getLogger(__name__)

NAMESPACE = "quadriga"
RAY_FAILED = (RayError, RuntimeError, ValueError, OSError)
"""What Ray raises where its control store is away."""

LOOK_UP_TIMEOUT_S = 5.0
IDLE_S = 300.0
"""Handles that were not used for so long are dropped at a look-up: their actors may be dead."""

CONNECT_TIMEOUT_S = 5.0
CONNECT_AGAIN_S = (5.0, 300.0)
"""Pauses between attempts to connect: the first, and the longest; each is twice the one before."""
VERDICT_S = 0.5
"""Where a connection breaks, Ray has so long to say whether the actor is dead."""

_handles: dict[str, ActorHandle[Any]] = {}
_used_s: dict[str, float] = {}
_looking = ThreadPoolExecutor(4, thread_name_prefix="look-up")
"""Threads of their own: where the control store is slow, only look-ups wait for each other."""
_look_ups: dict[str, Future[ActorHandle[Any]]] = {}
_connections: dict[str, Connection] = {}
_attempts: dict[str, tuple[float, float]] = {}
"""Attempts to connect to each actor: when the next one may begin, and the pause after it."""


def get_actor(name: str) -> ActorHandle[Any]:
    """Return the handle of a named actor, cached for this process.

    Blocks on Ray's control store for a few milliseconds at the first use of a name.

    Raises:
        ReplicaDied: There is no such actor; code "unreachable" where the control store does
            not answer.
    """
    handle = _known(name)
    if handle is None:
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError as exc:
            raise ReplicaDied(f"{name} is gone") from exc
        except RayError as exc:
            why = f"the control store does not answer where {name} is: {exc}"
            raise ReplicaDied(why, code="unreachable") from exc
        remember_handle(name, handle)
    return handle


def _known(name: str) -> ActorHandle[Any] | None:
    if (handle := _handles.get(name)) is not None:
        _used_s[name] = time.monotonic()
    return handle


def _look_up(name: str) -> Future[ActorHandle[Any]]:
    """Look a named actor up on another thread, once for all calls that ask meanwhile."""
    found = _look_ups.get(name)
    if found is None:
        found = _look_ups[name] = _looking.submit(get_actor, name)
        found.add_done_callback(lambda _: _look_ups.pop(name, None))
    return found


async def find_actor(name: str, timeout_s: float) -> ActorHandle[Any]:
    """As `get_actor`, with a deadline, and without blocking the event loop.

    Raises:
        ReplicaDied: Likewise; code "unreachable" also where the store did not answer in time.
    """
    if (handle := _known(name)) is not None:
        return handle
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(asyncio.wrap_future(_look_up(name)))
    except TimeoutError as exc:
        why = f"the control store did not answer within {timeout_s:.1f} s where {name} is"
        raise ReplicaDied(why, code="unreachable") from exc


def remember_handle(name: str, handle: ActorHandle[Any]) -> None:
    """Put a handle into the cache, and drop those that were long not used."""
    now_s = time.monotonic()
    for other, used_s in list(_used_s.items()):
        connection = _connections.get(other)
        if now_s - used_s > IDLE_S and not (connection is not None and connection.is_busy):
            forget_actor(other)
    _handles[name], _used_s[name] = handle, now_s


def forget_actor(name: str) -> None:
    """Drop a cached handle, so that the next call looks the name up again."""
    for kept in (_handles, _used_s, _attempts):
        kept.pop(name, None)
    if (connection := _connections.pop(name, None)) is not None:
        connection.close_soon()


async def restart(name: str) -> None:
    """End the process of an actor that hangs; Ray starts a restartable one again.

    The name is looked up anew: where the control store does not answer, the caller is likely cut
    off itself, and a kill that Ray carries out much later would hit a healthy process.

    Raises:
        ReplicaError: It is gone for good, or Ray does not do it.
    """
    forget_actor(name)
    handle = await find_actor(name, LOOK_UP_TIMEOUT_S)
    try:
        await asyncio.to_thread(ray.kill, handle, no_restart=False)
    except (RayError, ValueError) as exc:
        raise ReplicaError(f"{name} was not restarted: {exc}") from exc


async def call(name: str, method: str, *args: Any, timeout_s: float) -> Any:
    """Call a method of a named actor and await its result.

    Raises:
        QuadrigaError: Whatever the method raised of our own.
        ReplicaDied: The actor is gone, or its process died under the call; code "unreachable" where
            that is not known.
        ReplicaError: Code "timeout" when no answer came in time; the call may still take effect.
            Code "unknown_method" where the actor has no such method.
    """
    began_s = time.monotonic()
    handle = await find_actor(name, timeout_s)
    left_s = max(0.0, timeout_s - (time.monotonic() - began_s))
    try:
        if (connection := _connection(name, handle)) is not None:
            return await connection.call(method, *args, timeout_s=left_s)
        return await call_handle(name, handle, method, *args, timeout_s=left_s)
    except (AttributeError, ReplicaError):
        if hasattr(handle, method):
            raise
        why = f"{name} takes no call {method}; it may be of another version"
        raise ReplicaError(why, code="unknown_method") from None


def _connection(name: str, handle: ActorHandle[Any]) -> Connection | None:
    """The connection to an actor, if it stands; begins to make one where there is none."""
    connection = _connections.get(name)
    if connection is not None and connection.is_usable:
        return connection
    now_s = time.monotonic()
    again_s, pause_s = _attempts.get(name, (now_s, CONNECT_AGAIN_S[0]))
    if connection is None and now_s >= again_s:
        context = ray.get_runtime_context()
        _attempts[name] = math.inf, pause_s  # not before this one has ended
        if context.get_actor_id() is not None:
            # In a request's context Ray would cancel the wait for the actor's end with the request.
            background(_connect(name, handle, context.get_node_id(), pause_s), Context())
    return None


def num_connections() -> int:
    """Actors that this process calls over connections."""
    return len(_connections)


async def _connect(name: str, handle: ActorHandle[Any], node: str, pause_s: float) -> None:
    """Connect to an actor, and watch the connection until it or the actor is gone."""
    connection = None
    try:
        address = await call_handle(name, handle, "call_address", node, timeout_s=CONNECT_TIMEOUT_S)
        if address is None:  # it takes no connections, and never will
            return
        connection = await connect(name, address, CONNECT_TIMEOUT_S)
        pause_s = CONNECT_AGAIN_S[0]
    except Exception as exc:  # a border: whatever it is, calls go through Ray
        is_news = pause_s == CONNECT_AGAIN_S[0] and not is_known_death(exc)
        level = logging.WARNING if is_news else logging.INFO
        logger.log(level, "calls to %s go through Ray, as there is no connection: %s", name, exc)
    if name in _attempts:
        _attempts[name] = time.monotonic() + pause_s, min(2 * pause_s, CONNECT_AGAIN_S[1])
    if connection is not None:
        await _keep(name, handle, connection)


async def _keep(name: str, handle: ActorHandle[Any], connection: Connection) -> None:
    """Use a connection until it or the actor is gone, then fail the calls that are under way."""
    error: QuadrigaError = broken(name)
    death = background(_death(name, handle, connection.nonce))
    try:
        if _handles.get(name) is not handle or name in _connections:  # forgotten, or made twice
            return
        _connections[name] = connection
        ends: set[asyncio.Future[Any]] = {death, connection.lost}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if _connections.get(name) is connection:
            _connections.pop(name, None)
        await asyncio.wait({death}, timeout=VERDICT_S)
        if death.done():
            error = death.result()
    finally:
        death.cancel()
        connection.fail(error)


async def _death(name: str, handle: Any, nonce: bytes) -> QuadrigaError:
    """What Ray says of an actor's end, once it does, or the connection ends."""
    try:
        await handle.wait_while_connected.remote(nonce)
    except RayError as exc:
        return from_ray(name, "wait_while_connected", exc)
    except Exception:  # a border: without a word of Ray's the connection itself is the sign
        logger.exception("Ray cannot be asked for the end of %s", name)
    return broken(name)


async def call_handle(
    name: str, handle: ActorHandle[Any], method: str, *args: Any, timeout_s: float
) -> Any:
    """As `call`, with the handle at hand."""
    try:
        async with asyncio.timeout(timeout_s):
            return await getattr(handle, method).remote(*args)
    except TimeoutError as exc:
        why = f"{name} did not answer {method} within {timeout_s:.1f} s"
        raise ReplicaError(why, code="timeout") from exc
    except RayError as exc:
        error = from_ray(name, method, exc)
    try:
        raise error  # not from Ray's, of which it may be the cause
    finally:
        del error  # its traceback has this frame, and so the call's arguments


def from_ray(name: str, method: str, exc: RayError) -> QuadrigaError:
    """Turn what Ray raised for a call into one of our errors; never raises."""
    if isinstance(exc, RayTaskError):
        if isinstance(exc.cause, QuadrigaError):
            return exc.cause
        return ReplicaError(f"{method} failed on {name}: {exc.cause!r}")
    if isinstance(exc, ActorUnavailableError):
        return ReplicaDied(f"{name} is not reachable", code="unreachable")
    if isinstance(exc, RayActorError):
        forget_actor(name)
        return ReplicaDied(f"{name} died")
    return ReplicaError(f"{method} on {name} failed in Ray: {exc}")
