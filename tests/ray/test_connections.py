"""Actors call each other over connections, and hear of a death as soon as over Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from actors.rpc import ray_rpc
from actors.rpc.connections import DirectlyCalled
from actors.rpc.lifecycle import create_or_get
from actors.rpc.ray_rpc import NAMESPACE
from quadriga.errors import QuadrigaError
from tests.waiting import wait_until

DEADLINE_S = 60.0


class Callee(DirectlyCalled):
    """Counts the calls that wait for its end."""

    def __init__(self) -> None:
        self._num_watchers = 0

    async def pid(self) -> int:
        return os.getpid()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait_while_connected(self, nonce: bytes) -> None:
        self._num_watchers += 1
        try:
            await super().wait_while_connected(nonce)
        finally:
            self._num_watchers -= 1

    async def num_watchers(self) -> int:
        return self._num_watchers


class Caller(DirectlyCalled):
    """Calls on behalf of a test, as only actors have connections."""

    def __init__(self) -> None:
        ray_rpc.VERDICT_S = DEADLINE_S  # a slow machine's Ray may tell late of a death

    async def call(self, name: str, method: str, *args: Any, timeout_s: float = DEADLINE_S) -> Any:
        try:
            return await ray_rpc.call(name, method, *args, timeout_s=timeout_s)
        except QuadrigaError as exc:
            return type(exc).__name__, exc.code

    async def is_connected(self, name: str) -> bool:
        connection = ray_rpc._connections.get(name)
        return connection is not None and connection.is_usable

    async def forget(self, name: str) -> None:
        ray_rpc.forget_actor(name)


@pytest.fixture
def actors(ray_cluster: None) -> Iterator[tuple[Any, str, Any]]:
    names = [f"connections-{uuid.uuid4().hex}" for _ in range(2)]
    caller, callee = create_or_get(Caller, names[0]), create_or_get(Callee, names[1])
    yield caller, names[1], callee
    for handle in (caller, callee):
        ray.kill(handle)


def of(reference: Any) -> Any:
    return ray.get(reference, timeout=DEADLINE_S)


def connect(caller: Any, name: str) -> int:
    def is_connected() -> bool:
        of(caller.call.remote(name, "pid"))  # calls are what has a connection made
        return bool(of(caller.is_connected.remote(name)))

    wait_until(is_connected, DEADLINE_S)
    pid: int = of(caller.call.remote(name, "pid"))
    return pid


def test_a_killed_actor_fails_its_calls_and_is_called_again_when_it_is_back(
    actors: tuple[Any, str, Any],
) -> None:
    caller, name, _ = actors
    pid = connect(caller, name)
    assert of(caller.call.remote(name, "pid")) == pid
    waiting = caller.call.remote(name, "sleep", DEADLINE_S)
    of(caller.call.remote(name, "pid"))  # it is there by then: both go over one connection
    os.kill(pid, signal.SIGKILL)
    error, code = of(waiting)
    assert (error, code) in {("ReplicaDied", "replica_died"), ("ReplicaDied", "unreachable")}
    wait_until(lambda: isinstance(of(caller.call.remote(name, "pid")), int), DEADLINE_S)
    assert connect(caller, name) != pid


def test_an_actor_that_ended_for_good_is_called_dead(actors: tuple[Any, str, Any]) -> None:
    caller, name, callee = actors
    connect(caller, name)
    waiting = caller.call.remote(name, "sleep", DEADLINE_S)
    of(caller.call.remote(name, "pid"))
    ray.kill(callee)
    assert of(waiting) == ("ReplicaDied", "replica_died")
    assert of(caller.call.remote(name, "pid")) == ("ReplicaDied", "replica_died")
    with pytest.raises(ValueError, match="Failed to look up"):
        ray.get_actor(name, namespace=NAMESPACE)


def test_a_stopped_actor_answers_late_and_its_connection_goes_on(
    actors: tuple[Any, str, Any],
) -> None:
    caller, name, _ = actors
    pid = connect(caller, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        late = of(caller.call.remote(name, "pid", timeout_s=0.5))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert late == ("ReplicaError", "timeout")
    assert of(caller.call.remote(name, "pid")) == pid
    assert of(caller.is_connected.remote(name))


@pytest.mark.parametrize("end", ["forgets it", "is killed"])
def test_a_caller_that_goes_leaves_no_call_waiting(actors: tuple[Any, str, Any], end: str) -> None:
    caller, name, callee = actors
    connect(caller, name)
    wait_until(lambda: of(callee.num_watchers.remote()) == 1, DEADLINE_S)
    if end == "is killed":
        ray.kill(caller)
    else:
        of(caller.forget.remote(name))
    wait_until(lambda: of(callee.num_watchers.remote()) == 0, DEADLINE_S)


def test_a_cancelled_call_takes_no_connection_along(actors: tuple[Any, str, Any]) -> None:
    """Ray cancels what a cancelled call has started; other calls need the connection still."""
    caller, name, _ = actors
    first = caller.call.remote(name, "sleep", DEADLINE_S)  # has the connection made
    wait_until(lambda: of(caller.is_connected.remote(name)), DEADLINE_S)
    second = caller.call.remote(name, "sleep", 1.0)
    of(caller.call.remote(name, "pid"))
    ray.cancel(first)
    with pytest.raises(RayError):
        of(first)
    assert of(second) is None
    assert of(caller.is_connected.remote(name))
