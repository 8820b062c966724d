"""The table of a prefill replica: which sequences are in it, and what their ends release."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from actors.kv_transfer.sequence_handoff import PrefillHandoff
from actors.replica.prefill import PrefillReplica
from quadriga.clock import ManualClock
from quadriga.config.loader import load_config
from quadriga.core.kv import KVSpan
from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, SamplingParams, SequenceState
from quadriga.errors import DeadlineExceeded, MigrationFailed, Overloaded, QuadrigaError
from quadriga.replica.departed_sequences import DepartedSequences
from quadriga.scheduling.transfer.kv_feed import KVFeed, StagingBudget
from tests.simulation.handoff import Engine
from tests.waiting import until


class Loop:
    """Takes every sequence, unless it is full."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.is_full = False

    def submit(self, sequence: Any) -> None:
        if self.is_full:
            raise Overloaded("full", retry_after_s=1.0)

    def release(self, sequence_id: str) -> bool:
        self.released.append(sequence_id)
        return True


class Prefill(PrefillReplica):
    """The table and its rules without the process around it."""

    def __init__(self) -> None:
        self.name = "app:prefill:0"
        self.config = load_config({})
        self.clock: Any = ManualClock()
        self.loop = Loop()
        self.engine: Any = Engine(SimpleNamespace(loop=self.loop))
        self.emitted: list[EngineOutput] = []
        self.cancelled_at: list[tuple[str, str]] = []
        self.placement: Any = None
        self.sender: Any = None
        self.mail: Any = SimpleNamespace(expect=lambda _: None)
        self.spanned: list[dict[str, Any]] = []
        self.spans: Any = SimpleNamespace(
            begun=lambda *_: nullcontext(),
            end=lambda *_, **attributes: self.spanned.append(attributes),
        )
        self.sequences = {}
        self._tasks = {}
        self.departed = DepartedSequences()
        self._arrived = []
        self._is_draining = self.is_ending = False
        self.staging = StagingBudget()

    def cancel_at(self, peer: str, sequence_id: str, ingress_id: str | None) -> None:
        self.cancelled_at.append((peer, sequence_id))

    def emit(self, emissions: Any, *, wakes: bool = True) -> None:
        self.emitted += [emission for _, emission in emissions]

    async def begin(self, monkeypatch: pytest.MonkeyPatch, end: Any = None) -> None:
        """Submit the sequence "s" and begin its hand-off, which waits, or ends as `end`."""

        async def run(_: PrefillHandoff) -> str:
            if isinstance(end, QuadrigaError):
                raise end
            if end is None:
                await asyncio.Event().wait()
            return str(end)

        monkeypatch.setattr(PrefillHandoff, "run", run)
        await self.submit(a_state())
        sequence = self.sequences["s"]
        sequence.feed = KVFeed(self.staging, 2, 1)
        self._start_handoff(sequence)
        self.staging.take(8)
        sequence.feed.add(KVSpan(0, 2, 0, 2), SimpleNamespace(nbytes=8))

    async def settle(self) -> None:
        await until(lambda: not self._tasks)


def a_state() -> SequenceState:
    return SequenceState("s", "r", "m", [1, 2], SamplingParams(max_tokens=4), "i", 0.0, 1e12)


async def test_a_sequence_handed_over_leaves_the_table_and_a_late_cancellation_follows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Prefill()
    await replica.begin(monkeypatch, "d0")
    assert await replica.holding(["s", "t"]) == ["s"]
    await replica.settle()
    assert await replica.holding(["s"]) == []
    assert (replica.loop.released, replica.staging.held_bytes) == (["s"], 0)
    await replica.cancel(["s"], "i")
    assert replica.cancelled_at == [("d0", "s")]


async def test_the_span_of_a_prompt_says_how_much_was_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Prefill()
    await replica.begin(monkeypatch)
    sequence = replica.sequences["s"]
    sequence.num_cached = 64
    replica._take_outputs([(sequence, EngineOutput("s", 0, 0, [7], finish=FinishReason.STOP))])
    await replica.settle()
    assert replica.spanned[0] == {"quadriga.cached_tokens": 64}


async def test_a_failed_hand_off_ends_the_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Prefill()
    await replica.begin(monkeypatch, MigrationFailed("no"))
    sequence = replica.sequences["s"]
    await replica.settle()
    late = EngineOutput("s", 0, error=DeadlineExceeded("late"))
    replica._take_outputs([(sequence, late)])
    assert [e.error for e in replica.emitted] == [MigrationFailed("no")]
    assert (replica.sequences, replica.loop.released) == ({}, ["s"])
    assert replica.staging.held_bytes == 0


@pytest.mark.parametrize(
    "output",
    [
        EngineOutput("s", 0, 0, [7], finish=FinishReason.STOP),
        EngineOutput("s", 0, error=DeadlineExceeded("late")),
    ],
    ids=["finished", "failed"],
)
async def test_an_end_here_stops_the_hand_off(
    output: EngineOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Prefill()
    await replica.begin(monkeypatch)
    await asyncio.sleep(0)
    replica._take_outputs([(replica.sequences["s"], output)])
    await replica.settle()
    assert (replica.emitted, replica.sequences) == ([output], {})
    assert (replica.loop.released, replica.staging.held_bytes) == (["s"], 0)


@pytest.mark.parametrize("turns", [0, 2], ids=["before it runs", "while it runs"])
async def test_a_cancellation_stops_the_hand_off_and_releases_the_row(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Prefill()
    await replica.begin(monkeypatch)
    for _ in range(turns):
        await asyncio.sleep(0)
    await replica.cancel(["s"], "i")
    await replica.settle()
    assert (replica.sequences, replica.emitted) == ({}, [])
    assert replica.staging.held_bytes == 0 and "s" in replica.loop.released
    assert replica.departed.is_cancelled("s")


async def test_a_refused_sequence_is_not_in_the_table() -> None:
    replica = Prefill()
    replica.loop.is_full = True
    with pytest.raises(Overloaded):
        await replica.submit(a_state())
    assert replica.sequences == {}


async def test_a_sequence_cancelled_on_its_way_here_is_freed() -> None:
    replica = Prefill()
    replica.departed.cancel(["s"])
    await replica.submit(a_state())
    assert (replica.sequences, replica.loop.released) == ({}, ["s"])


async def test_hand_offs_that_are_broken_off_end_in_the_order_of_their_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, began, ended = Prefill(), list[Any](), list[Any]()
    for _ in range(16):
        await replica.begin(monkeypatch)
        began.append(replica.sequences["s"].handoff.task)
        began[-1].add_done_callback(ended.append)
    await asyncio.sleep(0)  # the last one begins
    await replica._close()
    assert ended == began


async def test_a_hand_off_of_a_sequence_that_is_gone_does_not_begin() -> None:
    replica = Prefill()
    await replica.submit(a_state())
    sequence = replica.sequences["s"]
    sequence.feed = KVFeed(replica.staging, 2, 1)
    await replica.cancel(["s"])
    replica._start_handoff(sequence)
    assert not replica._tasks and not sequence.feed.wants_copies
