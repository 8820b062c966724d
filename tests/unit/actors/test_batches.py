"""Calls that travel together: each caller still gets its own result and its own error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.rpc import rpc_batcher as batches
from actors.rpc.rpc_batcher import MAX_BATCH, BatchedCalls, RpcBatcher
from quadriga.errors import KVCacheExhausted, ReplicaDied, ReplicaError


class Callee(BatchedCalls):
    BATCHED = frozenset({"double", "wait"})

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def double(self, number: int) -> int:
        if number < 0:
            raise KVCacheExhausted("negative", retry_after_s=2.0)
        if number == 13:
            raise ValueError("a bug")
        return 2 * number

    async def wait(self, number: int) -> int:
        await self.gate.wait()
        return number

    async def secret(self) -> int:
        return 42


class Line:
    """Carries calls to one callee, and counts them."""

    def __init__(self) -> None:
        self.callee = Callee()
        self.sizes: list[int] = []
        self.fails: Exception | None = None

    async def __call__(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        if self.fails is not None:
            raise self.fails
        reply = await getattr(self.callee, method)(*args)
        self.sizes.append(reply.count(b"\x88"))  # pickle's opcode for True: a call that went well
        return reply


def batcher() -> tuple[RpcBatcher, Line]:
    line = Line()
    return RpcBatcher(line), line


async def test_calls_of_one_turn_travel_together() -> None:
    calls, line = batcher()
    answers = await asyncio.gather(*(calls.call("a", "double", i, timeout_s=1) for i in range(5)))
    assert answers == [0, 2, 4, 6, 8]
    assert line.sizes == [5]


async def test_who_waits_for_nobody_travels_alone() -> None:
    calls, line = batcher()
    others = [asyncio.create_task(calls.call("a", "double", i, timeout_s=1)) for i in range(3)]
    assert await calls.call_alone("a", "double", 4, timeout_s=1) == 8
    assert line.sizes == [1], "and before those that gather"
    with pytest.raises(KVCacheExhausted):
        await calls.call_alone("a", "double", -1, timeout_s=1)
    assert await asyncio.gather(*others) == [0, 2, 4]
    line.fails = ReplicaDied("gone")
    with pytest.raises(ReplicaDied):
        await calls.call_alone("a", "double", 4, timeout_s=1)


async def test_a_call_alone_leaves_at_once_and_a_close_follower_waits_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "GATHER_S", 3600.0)
    calls, line = batcher()
    assert await calls.call("a", "double", 1, timeout_s=1) == 2
    moments: list[tuple[float, Callable[[], None]]] = []

    def call_later(delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        moments.append((delay_s, lambda: callback(*args)))

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "call_later", call_later)
        second = asyncio.create_task(calls.call("a", "double", 2, timeout_s=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        third = asyncio.create_task(calls.call("a", "double", 3, timeout_s=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert line.sizes == [1]
    ((delay_s, leave),) = moments
    assert 0 < delay_s <= 3600
    leave()
    async with asyncio.timeout(20):
        assert (await second, await third) == (4, 6)
    assert line.sizes == [1, 2]


async def test_each_gets_its_own_error() -> None:
    calls, _ = batcher()
    good, full, bug = await asyncio.gather(
        *(calls.call("a", "double", i, timeout_s=1) for i in (4, -1, 13)), return_exceptions=True
    )
    assert good == 8
    assert full == KVCacheExhausted("negative", retry_after_s=2.0)
    assert isinstance(bug, ReplicaError)


async def test_what_befalls_the_batch_befalls_all_with_an_error_of_their_own() -> None:
    calls, line = batcher()
    line.fails = ReplicaDied("a is gone")
    first, second = await asyncio.gather(
        *(calls.call("a", "double", i, timeout_s=1) for i in (1, 2)), return_exceptions=True
    )
    assert first == second == ReplicaDied("a is gone")
    assert first is not second


async def test_a_call_cancelled_before_it_left_is_not_made() -> None:
    calls, line = batcher()
    gone = asyncio.create_task(calls.call("a", "double", 1, timeout_s=1))
    stays = asyncio.create_task(calls.call("a", "double", 2, timeout_s=1))
    asyncio.get_running_loop().call_soon(gone.cancel)
    async with asyncio.timeout(20):
        assert await stays == 4
    assert gone.cancelled()
    assert line.sizes == [1]


async def test_a_batch_under_way_holds_up_nobody_else() -> None:
    calls, line = batcher()
    slow = asyncio.create_task(calls.call("a", "wait", 1, timeout_s=1))
    async with asyncio.timeout(20):
        assert await calls.call("a", "double", 2, timeout_s=1) == 4
        assert not slow.done()
        line.callee.gate.set()
        assert await slow == 1


async def test_large_crowds_are_split() -> None:
    calls, line = batcher()
    count = MAX_BATCH + 3
    answers = await asyncio.gather(
        *(calls.call("a", "double", 1, timeout_s=1) for _ in range(count))
    )
    assert answers == [2] * count
    assert sorted(line.sizes) == [3, MAX_BATCH]


async def test_only_named_methods_take_batches() -> None:
    calls, _ = batcher()
    with pytest.raises(ReplicaError, match="does not take batches"):
        await calls.call("a", "secret", timeout_s=1)


@pytest.mark.parametrize("alone", [False, True])
async def test_a_bug_on_the_way_is_told_to_all_who_wait(alone: bool) -> None:
    """Nobody awaits the task that makes the call: it must not leave its callers waiting."""
    calls, line = batcher()
    line.fails = KeyError("a bug")
    make = calls.call_alone if alone else calls.call
    async with asyncio.timeout(5):
        ends = await asyncio.gather(
            *(make("a", "double", i, timeout_s=1) for i in range(3)), return_exceptions=True
        )
    assert all(isinstance(end, ReplicaError) and "a bug" in end.message for end in ends)


async def test_what_cannot_travel_fails_at_once() -> None:
    calls, _ = batcher()
    async with asyncio.timeout(5):
        with pytest.raises(ReplicaError, match="double of a"):
            await calls.call("a", "double", lambda: None, timeout_s=1)
