"""A replica frees what is cancelled, but not what another ingress has adopted meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from actors.kv_transfer.migration import Migrations
from actors.replica.decode import DecodeReplica
from actors.rpc.rpc_batcher import RpcBatcher
from quadriga.clock import ManualClock
from quadriga.core.output import EngineOutput
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import MigrationFailed, ReplicaDied, TakenOver
from quadriga.replica.departed_sequences import DepartedSequences

GONE, HEIR = "ingress-0", "ingress-1"


def a_state(sequence_id: str, ingress_id: str = GONE) -> SequenceState:
    return SequenceState(
        sequence_id, "r", "m", [1], SamplingParams(max_tokens=4), ingress_id, 0.0, 1e12
    )


async def unanswered(*_: Any, timeout_s: float) -> None:
    raise ReplicaDied("nobody is there")


class Engine:
    """Runs commands at once; `before` runs first, once: another command that was faster."""

    is_ready = True

    def __init__(self, core: Any) -> None:
        self.core = core
        self.before: Callable[[], object] = lambda: None

    async def call(self, command: Callable[[Any], Any]) -> Any:
        before, self.before = self.before, lambda: None
        before()
        return command(self.core)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        callback(*args)


class Loop:
    def __init__(self, *running: SequenceState) -> None:
        self.running = list(running)

    def leave(self, sequence_id: str) -> None:
        self.running = [s for s in self.running if s.sequence_id != sequence_id]

    def join(self, state: SequenceState, *_: object) -> None:
        self.running.append(state)


class Core:
    """A decode engine's table of what is held."""

    loaded_depth = 8

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.let_go = loop.leave

    @property
    def held(self) -> list[SequenceState]:
        return self.loop.running


class Decode(DecodeReplica):
    """The rules of one without the process around it."""

    def __init__(self, *running: SequenceState) -> None:
        self.name = "app:decode:1"
        self.loop = Loop(*running)
        self.engine: Any = Engine(Core(self.loop))
        self.clock: Any = ManualClock()
        self.calls = RpcBatcher(unanswered)
        self.migrations = Migrations(self)
        self.closed_leases: list[str] = []
        self.receiver: Any = SimpleNamespace(cancel=self._close_lease)
        self.spans: Any = SimpleNamespace(begun=lambda *_: nullcontext(), end=lambda *_, **__: None)
        self.told: list[tuple[str, EngineOutput]] = []
        self.mail: Any = SimpleNamespace(
            expect=lambda _: None, put=self.told.extend, drop=lambda _: None
        )
        self.departed = DepartedSequences()

    async def _close_lease(self, sequence_id: str) -> None:
        self.closed_leases.append(sequence_id)

    def emit(self, emissions: Any, *, wakes: bool = True) -> None:
        self.told.extend(emissions)

    @property
    def ids(self) -> list[str]:
        return [state.sequence_id for state in self.loop.running]


async def test_only_the_owner_cancels() -> None:
    replica = Decode(a_state("a"), a_state("b", HEIR))
    await replica.cancel(["a", "b", "never-heard-of"], GONE)
    assert replica.ids == ["b"]
    assert [s for s in ("a", "b", "never-heard-of") if replica.departed.is_cancelled(s)] == [
        "a",
        "never-heard-of",
    ]
    assert replica.closed_leases == ["a", "never-heard-of"]
    await replica.cancel(["b"], HEIR)
    assert replica.ids == []


async def test_a_cancellation_without_an_ingress_cancels_any_owners_sequence() -> None:
    replica = Decode(a_state("a"), a_state("b", HEIR))
    await replica.cancel(["a", "b"])
    assert replica.ids == []
    assert replica.departed.is_cancelled("a")
    assert replica.departed.is_cancelled("b")


@pytest.mark.parametrize("is_adopted_first", [False, True])
async def test_an_adoption_and_a_cancellation_meet(is_adopted_first: bool) -> None:
    replica = Decode(a_state("a"))
    calls = [replica.adopt("a", HEIR), replica.cancel(["a"], GONE)]
    done = [await call for call in (calls if is_adopted_first else reversed(calls))]
    assert (True in done) is is_adopted_first
    assert replica.ids == (["a"] if is_adopted_first else [])
    assert replica.departed.is_cancelled("a") is not is_adopted_first


async def test_the_former_ingress_is_told_of_an_adoption() -> None:
    replica = Decode(a_state("a"))
    assert await replica.adopt("a", HEIR)
    (heir, said), (gone, news) = replica.told
    assert (heir, said.error, said.token_ids) == (HEIR, None, [])
    assert (gone, news.sequence_id, news.token_ids) == (GONE, "a", [])
    assert isinstance(news.error, TakenOver)
    assert await replica.adopt("a", HEIR)
    assert [(to, e.error) for to, e in replica.told[2:]] == [(HEIR, None)], "it takes its own again"


async def test_a_sequence_cancelled_while_it_joins_does_not_run() -> None:
    """The event loop asked before the engine's thread had noted it."""
    replica = Decode()
    replica.engine.before = lambda: replica.departed.cancel(["a"])
    with pytest.raises(MigrationFailed) as failure:
        await replica.join(a_state("a"), None, 8)
    assert failure.value.code == "cancelled"
    assert replica.ids == []


async def test_a_cancellation_that_follows_a_sequence_names_its_ingress() -> None:
    calls: list[tuple[Any, ...]] = []

    async def call(*args: Any, timeout_s: float) -> None:
        calls.append(args)

    replica = Decode()
    replica.calls = RpcBatcher(call)
    replica.moved_away("a", "app:decode:2")
    await replica.cancel(["a"], GONE)
    await asyncio.sleep(0)
    assert calls == [("app:decode:2", "cancel", ["a"], GONE)]


async def test_a_sequence_that_is_adopted_at_the_last_moment_goes_on() -> None:
    replica = Decode(a_state("a"), a_state("b"), a_state("c", HEIR))
    held = replica._held

    async def and_then() -> Any:
        found = list(await held())
        replica.engine.before = lambda: setattr(found[1], "ingress_id", HEIR)
        found[0].output_ids.append(7)  # by the engine's thread, which tells of it in a moment
        return found

    replica._held = and_then  # type: ignore[method-assign]
    await replica._cancel_abandoned({GONE: 61.0}, forget_after_s=600.0)
    assert replica.ids == ["b", "c"]
    assert {(ingress_id, e.first_index) for ingress_id, e in replica.told} == {(GONE, 0)}
