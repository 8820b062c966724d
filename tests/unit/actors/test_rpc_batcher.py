"""Calls that are sent together: each caller still gets its own result and its own error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.rpc import rpc_batcher
from actors.rpc.rpc_batcher import MAX_BATCH, BatchedCalls, RpcBatcher
from quadriga.errors import KVCacheExhausted, ReplicaDied, ReplicaError
from tests.waiting import settled


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
        self.sizes.append(len(args[1]))
        return await getattr(self.callee, method)(*args)


def batcher() -> tuple[RpcBatcher, Line]:
    line = Line()
    return RpcBatcher(line), line


async def test_calls_of_one_turn_travel_together() -> None:
    calls, line = batcher()
    answers = await asyncio.gather(*(calls.call("a", "double", i, timeout_s=60) for i in range(5)))
    assert answers == [0, 2, 4, 6, 8]
    assert line.sizes == [5]


async def test_a_lone_call_leaves_at_once_and_close_followers_are_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc_batcher, "GATHER_S", 0.2)
    calls, line = batcher()
    async with asyncio.timeout(20):
        assert await calls.call("a", "double", 1, timeout_s=60) == 2
        second = asyncio.create_task(calls.call("a", "double", 2, timeout_s=60))
        await settled()
        third = asyncio.create_task(calls.call("a", "double", 3, timeout_s=60))
        await settled()
        assert line.sizes == [1]
        assert (await second, await third) == (4, 6)
    assert line.sizes == [1, 2]


async def test_each_call_of_a_batch_gets_its_own_error() -> None:
    calls, _ = batcher()
    good, full, bug = await asyncio.gather(
        *(calls.call("a", "double", i, timeout_s=60) for i in (4, -1, 13)), return_exceptions=True
    )
    assert good == 8
    assert full == KVCacheExhausted("negative", retry_after_s=2.0)
    assert isinstance(bug, ReplicaError)


async def test_a_failed_batch_gives_each_caller_an_error_of_its_own() -> None:
    calls, line = batcher()
    line.fails = ReplicaDied("a is gone")
    first, second = await asyncio.gather(
        *(calls.call("a", "double", i, timeout_s=60) for i in (1, 2)), return_exceptions=True
    )
    assert first == second == ReplicaDied("a is gone")
    assert first is not second


async def test_a_call_cancelled_before_it_left_is_not_made() -> None:
    calls, line = batcher()
    gone = asyncio.create_task(calls.call("a", "double", 1, timeout_s=60))
    stays = asyncio.create_task(calls.call("a", "double", 2, timeout_s=60))
    asyncio.get_running_loop().call_soon(gone.cancel)
    async with asyncio.timeout(20):
        assert await stays == 4
    assert gone.cancelled()
    assert line.sizes == [1]


async def test_a_batch_under_way_delays_no_other() -> None:
    calls, line = batcher()
    slow = asyncio.create_task(calls.call("a", "wait", 1, timeout_s=60))
    async with asyncio.timeout(20):
        assert await calls.call("a", "double", 2, timeout_s=60) == 4
        assert not slow.done()
        line.callee.gate.set()
        assert await slow == 1


async def test_many_calls_are_split_into_batches() -> None:
    calls, line = batcher()
    count = MAX_BATCH + 3
    answers = await asyncio.gather(
        *(calls.call("a", "double", 1, timeout_s=60) for _ in range(count))
    )
    assert answers == [2] * count
    assert sorted(line.sizes) == [3, MAX_BATCH]


async def test_only_named_methods_take_batches() -> None:
    calls, _ = batcher()
    with pytest.raises(ReplicaError, match="does not take batches"):
        await calls.call("a", "secret", timeout_s=60)


@pytest.mark.parametrize("failure", [KeyError("a bug"), TypeError("it cannot be pickled: a bug")])
async def test_an_unexpected_failure_of_a_batch_reaches_all_its_callers(failure: Exception) -> None:
    """No caller awaits the task that makes the call, so it must not leave them waiting."""
    calls, line = batcher()
    line.fails = failure
    async with asyncio.timeout(60):
        ends = await asyncio.gather(
            *(calls.call("a", "double", i, timeout_s=60) for i in range(3)), return_exceptions=True
        )
    assert all(isinstance(end, ReplicaError) and "a bug" in end.message for end in ends)
