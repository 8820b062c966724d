"""Looking up actors by name: a deadline, one look-up for concurrent calls, and its errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import RayError, RayTaskError

from actors.rpc import ray_rpc
from quadriga.errors import Overloaded, ReplicaDied


class Store:
    """A control store that answers once its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: list[str] = []

    def get_actor(self, name: str, **_: Any) -> Any:
        self.asked.append(name)
        assert self.gate.wait(20.0)
        return Actor()


class Actor:
    """Answers with its argument."""

    def __init__(self) -> None:
        self.echo = self

    async def remote(self, said: str) -> str:
        return said


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    monkeypatch.setattr(ray_rpc.ray, "get_actor", store.get_actor)
    monkeypatch.setattr(ray_rpc, "_handles", {})
    monkeypatch.setattr(ray_rpc, "_used_s", {})
    yield store
    store.gate.set()


async def test_a_look_up_ends_by_the_deadline_of_its_call(store: Store) -> None:
    began_s = time.monotonic()
    with pytest.raises(ReplicaDied, match=r"did not answer within 0\.1 s where slow is") as error:
        await ray_rpc.call("slow", "echo", "a", timeout_s=0.1)
    assert error.value.code == "unreachable"
    assert time.monotonic() - began_s < 5.0


async def test_concurrent_calls_share_one_look_up(store: Store) -> None:
    with pytest.raises(ReplicaDied):
        await ray_rpc.call("one", "echo", "a", timeout_s=0.05)
    asking = [asyncio.create_task(ray_rpc.call("one", "echo", s, timeout_s=20.0)) for s in "bcd"]
    await asyncio.sleep(0.05)
    store.gate.set()
    assert await asyncio.gather(*asking) == ["b", "c", "d"]
    assert store.asked == ["one"]
    assert await ray_rpc.call("one", "echo", "e", timeout_s=20.0) == "e"
    assert store.asked == ["one"]


def test_handles_that_were_long_not_used_are_dropped_at_the_next_look_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(ray_rpc.time, "monotonic", lambda: now_s)
    store.gate.set()
    for passed_s, name in ((0.0, "dead"), (0.0, "called"), (300.0, "called"), (1.0, "new")):
        now_s += passed_s
        ray_rpc.get_actor(name)
    assert set(ray_rpc._handles) == set(ray_rpc._used_s) == {"called", "new"}


@pytest.mark.parametrize(
    ("raised", "code"), [(ValueError("none"), "replica_died"), (RayError("slow"), "unreachable")]
)
def test_only_an_actor_that_ray_does_not_know_counts_as_dead(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, code: str
) -> None:
    def get_actor(*_: Any, **__: Any) -> Any:
        raise raised

    monkeypatch.setattr(ray_rpc.ray, "get_actor", get_actor)
    with pytest.raises(ReplicaDied) as error:
        ray_rpc.get_actor("nobody, ever")
    assert error.value.code == code


class Refusing:
    """Raises an error of ours, as Ray brings it."""

    def __init__(self) -> None:
        self.refuse = self

    async def remote(self, _: object) -> None:
        cause = Overloaded("full", retry_after_s=1.0)
        raise RayTaskError("refuse", "a trace", cause).as_instanceof_cause()


async def test_an_error_of_the_callee_keeps_nothing_of_the_call() -> None:
    async def refused(said: set[str]) -> None:
        with contextlib.suppress(Overloaded):
            await ray_rpc.call_handle("a", Refusing(), "refuse", said, timeout_s=5.0)  # type: ignore[arg-type]

    said = {"a large argument"}
    kept = weakref.ref(said)
    gc.collect()
    gc.disable()
    try:
        await refused(said)
        del said
        assert kept() is None
    finally:
        gc.enable()
