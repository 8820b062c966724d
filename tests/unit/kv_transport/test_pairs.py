"""A channel that is open is one that somebody works on, whatever befell its thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quadriga.errors import KVTransportError
from quadriga.kv_transport.channel_ends import Job, SendingChannel
from quadriga.kv_transport.gloo import GlooChannels
from quadriga.kv_transport.pairs import PairTransport
from tests.contract.lines import WAIT_S, Rig, make_rig
from tests.contract.test_lines import localhost


@pytest.fixture
def rig() -> Iterator[Rig]:
    with make_rig(
        lambda me, sink, invite: PairTransport(me, sink, GlooChannels(me, localhost), invite)
    ) as rig:
        yield rig


def fail_once(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, failure: BaseException
) -> None:
    """Let a method of a class fail the first time."""
    original: Any = getattr(kind, method)

    def once(*args: Any) -> Any:
        monkeypatch.setattr(kind, method, original)
        raise failure

    monkeypatch.setattr(kind, method, once)


def test_a_part_fails_when_no_thread_can_be_started_and_the_next_one_tries_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, SendingChannel, "start", RuntimeError("can't start new thread"))
    with pytest.raises(KVTransportError, match="no channel to b: can't start new thread"):
        rig.send(rig.make(10)).result(WAIT_S)
    rig.deliver()


@pytest.mark.parametrize(("kind", "method"), [(GlooChannels, "open"), (SendingChannel, "_send")])
@pytest.mark.parametrize("failure", [MemoryError("none left"), AssertionError("a bug")])
def test_a_failed_thread_ends_its_channel(
    rig: Rig, kind: type, method: str, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, kind, method, failure)
    with pytest.raises(KVTransportError, match=type(failure).__name__):
        rig.send(rig.make(10)).result(WAIT_S)
    rig.deliver()
    assert rig.generation() == 2


def test_a_deadline_is_one_whoever_sees_it_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel's thread may, before the event loop does."""

    def late(_: Any, __: Any, job: Job) -> None:
        time.sleep(max(0.0, job.deadline_s - time.monotonic()))
        raise RuntimeError("the line says it in its own words")

    original = SendingChannel._send
    monkeypatch.setattr(SendingChannel, "_send", late)
    # The loop's own deadline would come later: what is seen is the thread's.
    monkeypatch.setattr(asyncio, "timeout", lambda seconds: contextlib.nullcontext())
    with pytest.raises(KVTransportError) as error:
        rig.send(rig.make(10), deadline_s=0.2).result(WAIT_S)
    assert error.value.code == "timeout"
    monkeypatch.undo()
    assert SendingChannel._send is original
    rig.deliver()


def test_parts_behind_an_aborted_one_fail_when_no_thread_can_be_started(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.sink.gate.clear()
    first = rig.send(rig.make(10, "broken off"))
    assert rig.sink.has_begun.wait(WAIT_S)
    second = rig.send(rig.make(10, "waits"))
    rig.run(_nothing())  # it is queued by then
    fail_once(monkeypatch, SendingChannel, "start", RuntimeError("can't start new thread"))
    rig.run(rig.a.abort("b", "broken off"))
    for future in (first, second):
        with pytest.raises(KVTransportError):
            future.result(WAIT_S)
    rig.sink.gate.set()
    rig.deliver()


async def _nothing() -> None:
    return


@pytest.mark.parametrize("is_late", [False, True])
def test_parts_that_fail_are_freed_without_the_cyclic_collector(rig: Rig, is_late: bool) -> None:
    """In a process that serves it hardly ever runs."""
    rig.sink.unwanted.add("over")
    gc.collect()
    gc.disable()
    try:
        parts = []
        for _ in range(6):
            if is_late:
                rig.sink.gate.clear()
            parts.append(refused(rig, 1000, "late" if is_late else "over"))
            rig.sink.gate.set()
            rig.deliver()
    finally:
        gc.enable()
    assert sum(part() is not None for part in parts) <= 1, "the thread may have the last one"


def test_a_long_reason_ends_no_channel(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(monkeypatch, type(rig.sink), "store", ValueError("ä" * 600))
    with pytest.raises(KVTransportError, match="could not be stored: ValueError"):
        rig.send(rig.make(10)).result(WAIT_S)
    rig.deliver()
    assert rig.generation() == 1


def test_an_invitation_that_is_refused_leaves_no_store(rig: Rig) -> None:
    rig.refuse_invitations = True
    refused(rig, 10)
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(6):
            refused(rig, 10)
        assert len(os.listdir("/proc/self/fd")) < before + 12, "one has nine, and may still end"
    finally:
        gc.enable()


def refused(rig: Rig, num_tokens: int, name: str = "over") -> weakref.ref[torch.Tensor]:
    """Send a part, which fails; returns what tells whether its KV is still there."""
    piece = rig.make(num_tokens, name)
    with contextlib.suppress(KVTransportError):
        pytest.fail(f"it came to {rig.send(piece, deadline_s=0.3).result(WAIT_S)}")
    return weakref.ref(piece[1])
