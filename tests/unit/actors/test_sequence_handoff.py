"""A hand-off that breaks: tried elsewhere, or ended here, so that its ingress begins it anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import AsyncMock

import pytest
import torch

from actors.kv_transfer.handoff_sender import HandoffSender
from actors.kv_transfer.placement import DecodePlacement
from actors.kv_transfer.sequence_handoff import PrefillHandoff
from actors.rpc.rpc_batcher import BatchedCalls, RpcBatcher
from quadriga.clock import ManualClock, SystemClock
from quadriga.config.loader import load_config
from quadriga.core.grammar import Grammar
from quadriga.core.kv import Accepted, KVPart, KVSpan, ResumePoint, TransferOffer
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.core.routing import ClusterView, PlaceRequest, ReportOptions
from quadriga.errors import (
    KVCacheExhausted,
    KVTransportError,
    MigrationFailed,
    QuadrigaError,
    ReplicaDied,
    ReplicaError,
)
from quadriga.replica.handoff_receiver import HandoffReceiver
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.transfer.handoff import LeaseState
from quadriga.scheduling.transfer.kv_feed import KVFeed, StagingBudget
from quadriga.scheduling.transfer.placement_turns import PlacementTurns
from tests.waiting import settled, until

CLASS = DepthClass("m", 2)
FORM = Grammar.choice(["a"])
KV = torch.ones(2, 2, 1, 2, 4)


def replica() -> Any:
    """A prefill replica, as far as hand-offs look at it."""
    return SimpleNamespace(
        name="p0",
        clock=SystemClock(),
        config=load_config({}),
        report_options=ReportOptions(),
        is_ending=False,
        load=SimpleNamespace(num_waiting=0),
        spec=SimpleNamespace(engine=SimpleNamespace(depth_class=CLASS)),
        info_record=ReplicaInfo("p0", Role.PREFILL, CLASS, "", "p0", 8, 512, numerics="ours"),
        engine=SimpleNamespace(),
        metrics=SimpleNamespace(
            handoff_failed=lambda code: None, handed_off=lambda seconds, num_bytes: None
        ),
        remember_peer=lambda info: None,
        emit=lambda outputs, wakes: None,
    )


def a_handoff(
    host: Any, sequence: RunningSequence, sender: Any, calls: Any
) -> tuple[PrefillHandoff, KVFeed]:
    places = DecodePlacement(
        host.config, calls, PlacementTurns({sequence.state.sequence_id: sequence}, time.monotonic)
    )
    feed = KVFeed(StagingBudget(), 2, 1)
    return PrefillHandoff(host, sequence, feed, places, sender), feed


def a_state(*, deadline_s: float) -> SequenceState:
    now_s = SystemClock().unix_s()
    return SequenceState(
        "s", "r", "m", [1, 2], SamplingParams(4, grammar=FORM), "i", now_s, now_s + deadline_s
    )


async def cancelled_after(event: asyncio.Event, handing_off: Coroutine[Any, Any, object]) -> None:
    task = asyncio.create_task(handing_off)
    await event.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("failure", "code", "deadline_s"),
    [
        (TypeError("a bug"), ReplicaError.default_code, 20.0),
        (ReplicaDied("d0 died"), "migration_failed", 20.0),
        (KVCacheExhausted("no room"), "deadline_exceeded", 0.05),
    ],
)
async def test_a_failure_ends_the_hand_off_in_its_error(
    failure: Exception, code: str, deadline_s: float
) -> None:
    async def place(*_: Any, **__: Any) -> str:
        return "d0"

    async def reserve(*_: Any, **__: Any) -> None:
        raise failure

    sender = SimpleNamespace(reserve=reserve)
    calls = SimpleNamespace(call=place, tell=place)
    sequence = RunningSequence(a_state(deadline_s=deadline_s))
    handoff, _ = a_handoff(replica(), sequence, sender, calls)
    with pytest.raises(QuadrigaError) as error:
        await handoff.run()
    assert error.value.code == code


@pytest.mark.parametrize(("code", "is_told"), [(None, True), ("unreachable", False)])
async def test_only_a_death_that_is_known_is_told(code: str | None, is_told: bool) -> None:
    told: list[tuple[object, ...]] = []

    async def place(*_: Any, **__: Any) -> str:
        return "d0"

    async def tell(*said: object) -> None:
        told.append(said)

    async def reserve(*_: Any, **__: Any) -> None:
        raise ReplicaDied("d0 does not answer", code=code)

    sequence = RunningSequence(a_state(deadline_s=20.0))
    calls = SimpleNamespace(call=place, tell=tell)
    handoff, _ = a_handoff(replica(), sequence, SimpleNamespace(reserve=reserve), calls)
    with pytest.raises(MigrationFailed):
        await handoff.run()
    await asyncio.sleep(0)
    assert any("replica_died" in said for said in told) is is_told


async def test_without_a_scheduler_full_replicas_are_asked_in_turn_and_dead_ones_no_more() -> None:
    host, info = replica(), ReplicaInfo("d0", Role.DECODE, CLASS, "", "d0", 4, 512, numerics="ours")
    calls = SimpleNamespace(tell=AsyncMock())
    handoff, _ = a_handoff(host, RunningSequence(a_state(deadline_s=60.0)), None, calls)
    places, full = handoff._placement, ReplicaSnapshot(info, 1.0, num_running=4)
    places._view = ClusterView(1.0, [full, replace(full, info=replace(info, name="d1"))])
    places._is_scheduler_away = True
    assert [await handoff._place(n) for n in ((), ("d0",), ("d0", "d1"))] == ["d0", "d1", None]
    places.report_death("d0")
    assert [await handoff._place(n) for n in ((), ("d1",))] == ["d1", None]


async def test_the_wait_for_a_place_begins_behind_the_prompt() -> None:
    host, asked = replica(), []
    host.clock = ManualClock()

    async def find(request: PlaceRequest) -> None:
        asked.append(request.waited_s)

    sequence = RunningSequence(a_state(deadline_s=60.0))
    handoff, _ = a_handoff(host, sequence, SimpleNamespace(), SimpleNamespace())
    handoff._placement.find = find  # type: ignore[method-assign,assignment]
    host.clock.advance(6.0)
    handoff.prompt_done()
    host.clock.advance(1.0)
    await handoff._place(())
    assert asked == [1.0]


async def test_a_hand_off_that_is_cancelled_asks_for_no_room_any_more() -> None:
    """Its question may be on the way; what follows it to the scheduler takes it back."""
    asked, told = asyncio.Event(), asyncio.Event()
    said: list[Any] = []

    async def ask(*_: Any, **__: Any) -> str:
        asked.set()
        return await asyncio.Event().wait() or ""

    async def tell(*words: Any, **__: Any) -> None:
        said.append(words[1:])
        told.set()

    calls = SimpleNamespace(call=ask, tell=tell)
    sequence = RunningSequence(a_state(deadline_s=20.0))
    handoff, _ = a_handoff(replica(), sequence, SimpleNamespace(), calls)
    await cancelled_after(asked, handoff.run())
    await asyncio.wait_for(told.wait(), 20.0)
    assert said == [("finished", [], [sequence.state.sequence_id])]


Fate = Literal["dies", "is_lost", "is_answer_lost", "is_refused"]
"""What becomes of a call. The answer alone is lost where it has taken effect."""


class Peer(BatchedCalls):
    """A decode replica that takes everybody, and the host of its own rows.

    Args:
        fates: Of the calls to it that go wrong, by method.

    Attributes:
        joined: Epochs of the sequences that run here.
    """

    BATCHED = frozenset({"reserve", "commit"})

    def __init__(self, name: str, fates: dict[str, Fate]) -> None:
        self.name = name
        self.fates = fates
        self.joined: list[int] = []
        self.receiver = HandoffReceiver(CLASS, self, SystemClock())

    async def reserve(self, offer: TransferOffer) -> Accepted:
        assert offer.grammar == FORM, "it is to be compiled meanwhile"
        await self.receiver.reserve(offer)
        return Accepted(ReplicaInfo(self.name, Role.DECODE, CLASS, "", self.name, 8, 512))

    async def commit(
        self,
        transfer_id: str,
        state: SequenceState,
        checksums: Sequence[int],
        resume: ResumePoint | None,
    ) -> None:
        await self.receiver.commit(transfer_id, state, checksums, resume)

    async def abort(self, transfer_id: str) -> LeaseState | None:
        return await self.receiver.abort(transfer_id)

    async def reserve_row(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    async def release_row(self, sequence_id: str) -> None:
        pass

    async def join(self, state: SequenceState, resume: ResumePoint | None, depth: int) -> None:
        self.joined.append(state.epoch)

    def write_kv(self, *_: Any) -> None:
        pass


class Prefill:
    """A prefill replica and two decode replicas, "a" before "b", whose calls fail as given.

    Attributes:
        ends: Errors that hand-offs ended in.
        owners: Replicas that took a sequence over, as far as this replica knows.
        cancelled: Replicas that were asked to end one.
        asked: Set at the first commit.
        placed: Whether the sequence had a place, at each search for a place and each part sent.
    """

    name = "local"

    def __init__(self, fates: dict[str, Fate], *, deadline_s: float = 0.1) -> None:
        self.peers = {"a": Peer("a", fates), "b": Peer("b", {})}
        self.ends: list[QuadrigaError] = []
        self.owners: list[str] = []
        self.cancelled: list[str] = []
        self.asked = asyncio.Event()
        self.placed: list[bool] = []
        self.replica = replica()
        self.replica.config = load_config({"transport": {"deadline_s": deadline_s}})
        self.replica.engine.call = self.read_kv
        self.replica.cancel_at = lambda peer, *_: self.cancelled.append(peer)
        self.sequence = RunningSequence(a_state(deadline_s=20.0))

    async def hand_off(self) -> None:
        """As after the first token of a prompt of two."""
        transport: Any = self
        calls = RpcBatcher(self.call)
        sender = HandoffSender("p0", transport, calls, self.replica.config.transport)
        self.sequence.state.output_ids.append(7)
        asked = SimpleNamespace(call=self.place, tell=calls.tell)
        handoff, feed = a_handoff(self.replica, self.sequence, sender, asked)
        feed.add(KVSpan(0, 2, 0, 2), KV)
        handoff.prompt_done()
        try:
            self.owners.append(await handoff.run())
        except QuadrigaError as exc:
            self.ends.append(exc)

    async def place(
        self, scheduler: str, method: str, request: PlaceRequest, *, timeout_s: float
    ) -> str:
        self.placed.append(self.sequence.is_placed)
        return next(name for name in self.peers if name not in request.exclude)

    async def read_kv(self, _: object) -> torch.Tensor:
        return KV

    async def call(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        peer, what = self.peers[name], args[0] if method == "call_many" else method
        fate = peer.fates.get(what)
        if fate == "dies":
            raise ReplicaDied(f"{name} died")
        if fate == "is_refused":
            raise MigrationFailed("no")
        answer = None if fate == "is_lost" else await getattr(peer, method)(*args)
        if what == "commit":
            self.asked.set()
        if fate is not None:
            raise ReplicaError("no answer", code="timeout")
        return answer

    # The transport

    async def send(self, name: str, part: KVPart, kv: torch.Tensor, *, deadline_s: float) -> None:
        peer = self.peers[name]
        self.placed.append(self.sequence.is_placed)
        if "send" in peer.fates:
            raise KVTransportError("it did not arrive")
        peer.receiver.accept("p0", part)
        peer.receiver.store("p0", part, kv)

    async def abort(self, name: str, transfer_id: str) -> None:
        pass


async def handed_off(fates: dict[str, Fate]) -> tuple[Prefill, tuple[list[int], ...]]:
    """Hand a sequence off where calls to "a" fail so. Also: what runs at "a" and at "b"."""
    prefill = Prefill(fates)
    await prefill.hand_off()
    return prefill, tuple(peer.joined for peer in prefill.peers.values())


@pytest.mark.parametrize("commit", ["is_answer_lost", "is_lost"])
async def test_a_sequence_that_may_run_at_one_replica_is_tried_at_no_other(commit: Fate) -> None:
    """Neither commit nor abort was answered: under this name it must not run twice."""
    prefill, (at_a, at_b) = await handed_off({"commit": commit, "abort": "is_lost"})
    assert at_a == ([1] if commit == "is_answer_lost" else [])
    assert at_b == []
    (error,) = prefill.ends
    assert isinstance(error, MigrationFailed), "which its ingress answers by beginning it anew"
    assert prefill.cancelled == [], "the ingress may have heard of it from there, and go on so"


@pytest.mark.parametrize(
    "fates",
    [
        {"commit": "is_lost"},
        {"commit": "is_refused"},
        {"commit": "dies", "abort": "dies"},
        {"send": "is_refused", "abort": "is_lost"},
    ],
    ids=["aborted", "refused", "dead", "never_asked"],
)
async def test_a_sequence_that_runs_nowhere_is_tried_elsewhere(fates: dict[str, Fate]) -> None:
    prefill, at_peers = await handed_off(fates)
    assert at_peers == ([], [1])
    assert (prefill.owners, prefill.ends) == (["b"], [])


async def test_a_sequence_has_a_place_from_its_reservation_until_it_fails() -> None:
    prefill, _ = await handed_off({"send": "is_refused"})
    assert prefill.placed == [False, True, False, True], "place, send, place again, send"


async def test_a_commit_that_only_the_abort_tells_of_counts() -> None:
    prefill, at_peers = await handed_off({"commit": "is_answer_lost"})
    assert at_peers == ([1], [])
    assert (prefill.owners, prefill.ends) == (["a"], [])


@pytest.mark.parametrize("abort", [None, "is_lost"])
async def test_a_cancellation_is_passed_to_the_replica_that_may_run_it(abort: Fate | None) -> None:
    fates: dict[str, Fate] = {"commit": "is_answer_lost"}
    prefill = Prefill(fates if abort is None else fates | {"abort": abort}, deadline_s=600.0)
    await cancelled_after(prefill.asked, prefill.hand_off())
    await until(lambda: prefill.cancelled)
    assert prefill.cancelled == ["a"]


async def test_a_replica_that_ends_leaves_committed_sequences_to_their_new_owner() -> None:
    """The client still wants it: only this process goes."""
    prefill = Prefill({"commit": "is_answer_lost"}, deadline_s=20.0)
    prefill.replica.is_ending = True
    await cancelled_after(prefill.asked, prefill.hand_off())
    await settled(50)
    assert prefill.cancelled == []
