"""A channel that is open is one that somebody works on, whatever befell its thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from actors.kv_transfer.transports.gloo import GlooTransport
from actors.kv_transfer.transports.sending import Job, SendingChannel
from quadriga.errors import KVTransportError
from tests.contract.lines import WAIT_S, Rig, make_rig
from tests.contract.test_lines import localhost


@pytest.fixture
def rig() -> Iterator[Rig]:
    with make_rig(lambda me, sink, invite: GlooTransport(me, sink, localhost, invite)) as rig:
        yield rig


def fail_once(monkeypatch: pytest.MonkeyPatch, method: str, failure: BaseException) -> None:
    """A sending channel's method, or one that is made next, fails the first time."""
    original: Any = getattr(SendingChannel, method)

    def once(*args: Any) -> Any:
        monkeypatch.setattr(SendingChannel, method, original)
        raise failure

    monkeypatch.setattr(SendingChannel, method, once)


def test_where_no_thread_is_to_be_had_the_next_part_tries_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, "start", RuntimeError("can't start new thread"))
    with pytest.raises(KVTransportError, match="no channel to b: can't start new thread"):
        rig.send(rig.make(10)).result(WAIT_S)
    rig.deliver()


@pytest.mark.parametrize("method", ["_connect", "_send"])
@pytest.mark.parametrize("failure", [MemoryError("none left"), AssertionError("a bug")])
def test_a_thread_that_fails_takes_its_channel_along(
    rig: Rig, method: str, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, method, failure)
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


def test_who_waited_behind_a_broken_off_part_hears_that_there_is_no_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.sink.gate.clear()
    first = rig.send(rig.make(10, "broken off"))
    assert rig.sink.has_begun.wait(WAIT_S)
    second = rig.send(rig.make(10, "waits"))
    rig.run(_nothing())  # it is queued by then
    fail_once(monkeypatch, "start", RuntimeError("can't start new thread"))
    rig.run(rig.a.abort("b", "broken off"))
    for future in (first, second):
        with pytest.raises(KVTransportError):
            future.result(WAIT_S)
    rig.sink.gate.set()
    rig.deliver()


async def _nothing() -> None:
    return
