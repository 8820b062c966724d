"""The source's side of a live migration against a destination that does what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
import torch

from actors.kv_transfer.migration import MAX_OUTGOING, REST_DEADLINE_S, Migration, Migrations
from actors.replica.replica import Replica as ReplicaActor
from actors.rpc.lifecycle import scheduler_name
from actors.rpc.rpc_batcher import Caller, RpcBatcher
from quadriga.checkpoint.exits import ExitParams
from quadriga.clock import ManualClock
from quadriga.core.kv import ResumePoint, TransferOffer
from quadriga.core.migration import MigrationCause, MigrationOrder, MigrationReport
from quadriga.core.output import EngineOutput
from quadriga.core.replica import DepthClass, ReplicaInfo, Role
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import (
    ContextTooLong,
    KVCacheExhausted,
    KVTransportError,
    MigrationFailed,
    QuadrigaError,
    ReplicaDied,
    ReplicaError,
)
from quadriga.replica.departed_sequences import DepartedSequences
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.sequence import SequenceStatus
from quadriga.scheduling.transfer import migration_copy
from quadriga.scheduling.transfer.handoff import LeaseState
from quadriga.scheduling.transfer.sequence_export import StepPhase
from tests.fake_runner import FakeRunner, FakeSuspended, next_token
from tests.sequences import make_decode_loop, make_sequence, make_slots
from tests.simulation.tensor_runner import TensorRunner

CLASS = DepthClass("fake", FakeRunner.num_layers)
Result = TypeVar("Result")


class TensorSuspended(FakeSuspended):
    def read(self, first_layer: int, num_layers: int, start: int, stop: int) -> torch.Tensor:
        assert stop <= len(self.tokens)
        return torch.zeros(num_layers, 2, 1, stop - start, 2)


class Runner(TensorRunner):
    def suspend(self, row: int) -> TensorSuspended:
        found = super().suspend(row)
        return TensorSuspended(found.tokens, found.extents, found.rest, found.depth)


@dataclass
class Transfer:
    """A transfer whose calls end as planned.

    Attributes:
        fails: Errors by call: "send", "commit"; and "settle", one for each try.
        end: What the destination says in the end.
        sent: Positions per layer.
        left_s: The deadline of each part.
        carried: Those that went with the commit.
        committed: What came with the commit.
    """

    offer: TransferOffer
    peer: ReplicaInfo
    fails: dict[str, list[Exception]]
    end: LeaseState
    on: Callable[[str], Any]
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    left_s: list[float] = field(default_factory=list)
    carried: list[tuple[int, int, int]] = field(default_factory=list)
    committed: tuple[SequenceState, ResumePoint] | None = None
    num_aborts: int = 0
    num_settles: int = 0

    def _fail(self, name: str) -> None:
        self.on(name)
        if self.fails.get(name):
            raise self.fails[name].pop(0)

    async def send(
        self, first_layer: int, start: int, kv: torch.Tensor, *, deadline_s: float
    ) -> None:
        self.left_s.append(deadline_s)
        self._fail("rest" if deadline_s <= REST_DEADLINE_S else "send")
        self.sent.append((first_layer, start, kv.shape[3]))

    def carry(self, first_layer: int, start: int, kv: torch.Tensor) -> None:
        self.carried.append((first_layer, start, kv.shape[3]))

    async def commit(self, state: SequenceState, resume: ResumePoint, *, deadline_s: float) -> None:
        self.committed = (state, resume)
        self._fail("commit")

    async def settle(self) -> LeaseState:
        self.num_settles += 1
        self._fail("settle")
        return self.end

    async def abort(self) -> None:
        self.num_aborts += 1

    async def step_phase(self) -> StepPhase:
        self._fail("phase")
        return StepPhase(0.0, 0.0)


class Metrics:
    def __init__(self) -> None:
        self.counted: list[MigrationReport] = []

    def migrated(self, cause: MigrationCause, report: MigrationReport) -> None:
        self.counted.append(report)


class Mail:
    def __init__(self) -> None:
        self.pending: list[EngineOutput] = []

    def unacknowledged(self, ingress_id: str, sequence_id: str) -> list[EngineOutput]:
        return self.pending


class Engine:
    """Runs commands at once; steps when the test wants."""

    def __init__(self, loop: DecodeLoop) -> None:
        self.loop = loop
        self.error: QuadrigaError | None = None

    async def call(self, command: Callable[[Any], Result]) -> Result:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return command(self)


async def unheard(name: str, method: str, *args: object, timeout_s: float) -> None:
    """A call whose answer nobody needs."""


class Replica:
    """The source, and the plan for what its transfers meet."""

    moved_away = ReplicaActor.moved_away
    cancel_at = ReplicaActor.cancel_at
    name = "source"

    def __init__(self, calls: Caller = unheard, **fails: Sequence[Exception]) -> None:
        self.clock = ManualClock()
        self.runner = Runner(4)
        self.loop = make_decode_loop(self.runner, make_slots(4, 256, 1024), self.clock)
        self.engine = Engine(self.loop)
        self.metrics, self.mail = Metrics(), Mail()
        self.told: list[EngineOutput] = []
        self.fails = {step: list(errors) for step, errors in fails.items()}
        self.end = LeaseState.ABORTED
        self.on: Callable[[str], Any] = lambda name: None
        self.transfers: list[Transfer] = []
        self.their_depth = CLASS.depth

        class Config:
            name = "app"
            deterministic = False

            class transport:
                deadline_s = 5.0

        class Spec:
            class engine:
                depth_class = CLASS

        self.config, self.spec = Config, Spec
        self.info_record = ReplicaInfo(
            self.name, Role.DECODE, CLASS, "", self.name, 4, 1024, numerics="ours"
        )
        self.calls = RpcBatcher(calls)
        self.departed = DepartedSequences()
        self.migrations = Migrations(self)  # type: ignore[arg-type]
        self.sender = self

    async def reserve(
        self,
        peer: str,
        state: SequenceState,
        depth_class: DepthClass,
        *,
        is_live: bool,
        depths: tuple[int, int],
        numerics: str,
    ) -> Transfer:
        assert is_live and numerics == "ours"
        self.asked = (depth_class, depths)
        self.on("reserve")
        if self.fails.get("reserve"):
            raise self.fails["reserve"].pop(0)
        offer = TransferOffer("t", state.sequence_id, CLASS, "source", state.epoch + 1, 0, 0, 1.0)
        theirs = replace(CLASS, depth=self.their_depth)
        info = ReplicaInfo(peer, Role.DECODE, theirs, "", "", 4, 1024)
        transfer = Transfer(offer, info, self.fails, self.end, self.on)
        self.transfers.append(transfer)
        return transfer

    def remember_peer(self, info: ReplicaInfo) -> None:
        assert info.name == "destination"

    def emit(self, emissions: list[tuple[str, EngineOutput]]) -> None:
        self.told += [emission for _, emission in emissions]

    @property
    def moves(self) -> list[str | None]:
        return [emission.move for emission in self.told]

    def take(self, name: str = "s", prompt: int = 40) -> SequenceState:
        state = make_sequence(
            name,
            [3 + i for i in range(prompt)],
            SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
        )
        slot = self.loop.reserve(name, state.max_total_tokens, prompt)
        state.output_ids.append(next_token(state.prompt_ids))
        state.exit_layers.append(8)
        self.runner.kv[slot.row] = list(state.prompt_ids)
        self.loop.join(state)
        for _ in range(5):
            self.loop.step()
        return state

    async def migrate(self, **changes: Any) -> MigrationReport:
        order = MigrationOrder(
            "s", CLASS, "source", "destination", MigrationCause.BALANCE, 0.1, 40, 0.0
        )
        return await self.migrations.migrate(replace(order, **changes))

    async def settled(self) -> None:
        for _ in range(200):
            if not self.migrations.under_way:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it does not end")

    def goes_on(self) -> bool:
        """Whether the sequence decodes here."""
        before = {s.sequence_id: len(s.output_ids) for s in self.loop.running}
        self.loop.step()
        return any(len(s.output_ids) > before[s.sequence_id] for s in self.loop.running)


def running(calls: Caller = unheard, **fails: Sequence[Exception]) -> Replica:
    """A source where the sequence "s" runs."""
    replica = Replica(calls, **fails)
    replica.take()
    return replica


BROKEN_LINE = KVTransportError("lost", code="refused")
LOST = MigrationFailed("no answer", code="timeout")
SILENT = ReplicaError("no answer", code="timeout")


async def test_a_sequence_moves() -> None:
    replica = Replica()
    state = replica.take()
    said = EngineOutput("s", 0, 4, [1, 2], [8, 8])
    replica.mail.pending = [said]
    report = await replica.migrate()
    assert (report.outcome, report.reason) == ("moved", "")
    (transfer,) = replica.transfers
    assert transfer.committed is not None
    moved, resume = transfer.committed
    assert moved.output_ids == state.output_ids
    assert (moved.num_moves, moved.moved_unix_s) == (1, replica.clock.unix_s())
    assert (state.num_moves, state.moved_unix_s) == (0, 0.0), "counted with the commit, not before"
    assert resume.unacknowledged == (replace(said, epoch=1),)
    assert sum(n for _, _, n in transfer.sent) == state.num_tokens - 1
    assert report.bytes_sent == (state.num_tokens - 1) * 8 * 2 * 4
    assert report.rounds >= 2
    assert replica.moves == ["begun", "done"]
    assert {e.epoch for e in replica.told} == {0}
    assert {e.moved_to for e in replica.told} == {"destination"}
    assert replica.loop.slots.owners == []
    assert replica.metrics.counted == [report]
    assert not replica.migrations.under_way


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"destination": "source"}, "same_replica"),
        ({"depth_class": DepthClass("other", 8)}, "wrong_depth_class"),
        ({"sequence_id": "nobody"}, "not_running"),
    ],
)
async def test_orders_that_cannot_be_followed(changes: dict[str, Any], reason: str) -> None:
    replica = running()
    report = await replica.migrate(**changes)
    assert (report.outcome, report.at_fault) == ("refused", "")
    assert report.reason.startswith(f"{reason}:")
    assert replica.told == []
    assert replica.metrics.counted == [report]
    assert replica.goes_on()


@pytest.mark.parametrize("cause", list(MigrationCause))
async def test_the_scheduler_hears_what_came_of_orders_that_others_gave(
    cause: MigrationCause,
) -> None:
    told: list[tuple[object, ...]] = []

    async def heard(name: str, method: str, *args: object, timeout_s: float) -> object:
        told.append((name, method, *args))
        return None

    replica = running(heard)
    report = await replica.migrate(cause=cause)
    await asyncio.sleep(0)
    told = [args for args in told if args[1] == "moved"]
    if cause in (MigrationCause.DRAIN, MigrationCause.ESCALATE):
        ((scheduler, _, order, said),) = told
        assert scheduler == scheduler_name("app")
        assert isinstance(order, MigrationOrder) and order.cause is cause
        assert said == report
    else:
        assert not told


async def test_a_paused_sequence_moves_out_of_host_memory() -> None:
    replica = Replica()
    state = replica.take()
    known = state.num_tokens - 1
    assert replica.loop.preemption.pause("s")
    assert (await replica.migrate()).outcome == "moved"
    (transfer,) = replica.transfers
    assert sum(n for _, _, n in transfer.sent + transfer.carried) == known
    assert transfer.committed is not None
    assert transfer.committed[1].extents[-1].num_tokens == known
    assert replica.moves == ["begun", "done"]
    assert not replica.loop.is_paused("s")
    assert replica.loop.slots.owners == []


@pytest.mark.parametrize("step", ["reserve", "send", "commit"])
async def test_a_paused_sequence_that_does_not_move_comes_back(step: str) -> None:
    replica = running(**{step: [BROKEN_LINE]})
    assert replica.loop.preemption.pause("s")
    report = await replica.migrate()
    assert report.outcome == ("refused" if step == "reserve" else "failed")
    assert replica.loop.is_paused("s")
    assert replica.goes_on()


@pytest.mark.parametrize("step", ["send", "phase"])
async def test_a_sequence_may_be_paused_and_resumed_while_it_is_copied(step: str) -> None:
    replica = running()

    def turn(name: str) -> None:
        if name == step and not replica.loop.is_paused("s"):
            assert replica.loop.preemption.pause("s")
        elif name == step:
            replica.loop.step()  # there is room: it runs again

    replica.on = turn
    assert (await replica.migrate()).outcome == "moved"
    assert replica.loop.preemption.num_pauses > 0
    (transfer,) = replica.transfers
    assert transfer.committed is not None
    known = transfer.committed[0].num_tokens - 1
    assert sum(n for _, _, n in transfer.sent + transfer.carried) == known, "nothing goes twice"
    assert replica.loop.slots.owners == []


async def test_the_last_kv_goes_with_the_commit() -> None:
    replica = running()
    replica.on = lambda name: replica.loop.step() if name == "phase" else None
    report = await replica.migrate()
    (transfer,) = replica.transfers
    assert [n for _, _, n in transfer.carried] == [1]
    num_tokens = sum(n for _, _, n in transfer.sent + transfer.carried)
    assert report.bytes_sent == num_tokens * 8 * 2 * 4


@pytest.mark.parametrize(
    ("exits", "deterministic", "depths"),
    [
        (ExitParams(policy="strict"), False, (8, 0)),
        (ExitParams(policy="strict", max_depth=5), True, (5, 0)),
        (ExitParams(policy="bounded"), False, (0, 0)),
        (ExitParams(policy="bounded"), True, (8, 8)),
        (ExitParams(policy="bounded", max_depth=5), True, (5, 0)),
        (ExitParams(policy="bounded", max_depth=9), True, (8, 8)),
    ],
)
async def test_how_deep_the_destination_must_be(
    exits: ExitParams, deterministic: bool, depths: tuple[int, int]
) -> None:
    replica = Replica()
    replica.config.deterministic = deterministic
    replica.take().exits = exits
    assert (await replica.migrate()).outcome == "moved"
    assert replica.asked == (CLASS, depths)


async def test_a_shallower_destination_gets_its_layers_alone() -> None:
    replica = Replica()
    replica.their_depth = 3
    replica.take().exits = ExitParams(policy="bounded")
    assert (await replica.migrate()).outcome == "moved"
    (transfer,) = replica.transfers
    assert transfer.committed is not None
    assert [e.stop_layer for e in transfer.committed[1].extents] == [3]


async def test_a_source_that_changes_its_depth_keeps_the_sequence() -> None:
    replica = running()

    def change(name: str) -> None:
        if name == "send":
            replica.loop.batch.num_depth_changes += 1

    replica.on = change
    report = await replica.migrate()
    assert (report.outcome, report.reason.split(":")[0]) == ("failed", "depth_changed")
    assert not report.at_fault
    assert replica.goes_on()


async def test_a_sequence_refused_at_the_destination_stays() -> None:
    errors = [KVCacheExhausted("full"), ReplicaDied("gone"), ContextTooLong("rows are short")]
    replica = running(reserve=errors)
    for code in ("kv_cache_exhausted", "replica_died", "context_length_exceeded"):
        report = await replica.migrate()
        at_fault = "" if code.startswith("context") else "destination"  # others fit there
        assert (report.outcome, report.at_fault) == ("refused", at_fault)
        assert report.reason.startswith(f"{code}:")
    assert replica.told == []
    assert replica.goes_on()


async def test_one_order_for_a_sequence_at_a_time_and_few_of_all() -> None:
    replica = Replica()
    names = ["s", "t", "u"]
    for name in names:
        replica.take(name)
    gate = asyncio.Event()

    async def hold(*args: Any, **options: Any) -> None:
        await gate.wait()
        raise KVCacheExhausted("full")

    replica.reserve = hold  # type: ignore[assignment,method-assign]
    held = [asyncio.create_task(replica.migrate(sequence_id=n)) for n in names[:MAX_OUTGOING]]
    await asyncio.sleep(0)
    assert set(replica.migrations.under_way) == set(names[:MAX_OUTGOING])
    assert (await replica.migrate()).reason.startswith("under_way:")
    assert (await replica.migrate(sequence_id="u")).reason.startswith("busy:")
    gate.set()
    await asyncio.gather(*held)
    await replica.settled()


@pytest.mark.parametrize("step", ["send", "phase", "rest"])
async def test_a_failure_before_the_commit_leaves_the_sequence_at_its_source(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration_copy, "MAX_CARRIED_BYTES", 0)  # what is left is sent by itself
    replica = Replica(**{step: [BROKEN_LINE]})
    state = replica.take()
    # It decodes on before it rests, so that something is left to be sent then.
    replica.on = lambda name: replica.loop.step() if name == "phase" else None
    report = await replica.migrate()
    assert (report.outcome, report.at_fault) == ("failed", "destination")
    assert report.reason.startswith("refused:")
    assert replica.moves == ["begun", "failed"]
    assert state.epoch == 0
    await asyncio.sleep(0)
    assert replica.transfers[0].num_aborts == 1
    assert replica.transfers[0].committed is None
    assert replica.goes_on()


async def test_copying_that_takes_too_long_leaves_the_sequence_at_its_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One deadline from the order on: what came before is taken off."""
    replica = running()
    replica.config.transport.deadline_s = 60.0
    took_s = {"reserve": 59.75, "rest": 0.125}
    replica.on = lambda name: replica.clock.advance(took_s.get(name, 0.0))

    async def hang(_: Transfer) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Transfer, "step_phase", hang)
    monkeypatch.setattr(migration_copy, "FIRST_READ_CELLS", 200)
    async with asyncio.timeout(60):
        report = await replica.migrate()
    assert replica.transfers[0].left_s == [0.25, 0.125]
    assert report.reason.startswith("timeout:")
    assert replica.goes_on()


@pytest.mark.parametrize("when", ["reserve", "send", "phase"])
async def test_a_sequence_that_ends_on_the_way(when: str) -> None:
    replica = running()
    replica.on = lambda name: replica.loop.leave("s") if name == when else None
    report = await replica.migrate()
    assert report.outcome == "finished"
    assert "failed" not in replica.moves, "nobody is told to listen to us again"
    await asyncio.sleep(0)
    assert replica.transfers[0].num_aborts == 1
    assert replica.loop.slots.owners == []


@pytest.mark.parametrize("end", [LeaseState.ABORTED, LeaseState.CANCELLED, LeaseState.LAPSED])
async def test_a_commit_that_did_not_take_effect(end: LeaseState) -> None:
    replica = Replica(commit=[LOST])
    replica.end = end
    state = replica.take()
    report = await replica.migrate()
    assert report.outcome == "failed"
    assert replica.moves == ["begun", "failed"]
    assert state.epoch == 0
    assert replica.goes_on()


async def test_a_commit_whose_answer_was_lost() -> None:
    replica = running(commit=[LOST], settle=[SILENT])
    replica.end = LeaseState.COMMITTED
    report = await replica.migrate()
    assert report.outcome == "unknown", "said at once, settled later"
    assert not replica.goes_on(), "while nobody knows, it rests"
    await replica.settled()
    assert replica.moves == ["begun", "done"]
    assert replica.loop.slots.owners == []
    assert [r.outcome for r in replica.metrics.counted] == ["moved"]
    assert replica.transfers[0].num_settles == 2


async def test_a_destination_that_died_may_have_spoken() -> None:
    """So the source outranks what it may have said."""
    unreachable = ReplicaDied("broken line", code="unreachable")
    replica = Replica(commit=[ReplicaDied("dead")], settle=[unreachable, ReplicaDied("dead")])
    state = replica.take()
    await replica.migrate()
    await replica.settled()
    assert replica.moves == ["begun", "failed"]
    assert state.epoch == replica.transfers[0].offer.epoch + 1
    assert replica.told[-1].epoch == state.epoch
    assert replica.goes_on()


async def test_a_cancellation_while_the_owner_is_unknown() -> None:
    replica = running(commit=[LOST], settle=[SILENT, SILENT])
    assert (await replica.migrate()).outcome == "unknown"
    replica.departed.cancel(["s"])
    replica.loop.leave("s")
    await replica.settled()
    assert replica.loop.slots.owners == []
    assert [r.outcome for r in replica.metrics.counted] == ["finished"]


async def test_a_cancellation_during_the_commit_is_passed_to_the_destination() -> None:
    calls: list[tuple[Any, ...]] = []

    async def call(*args: Any, timeout_s: float) -> None:
        calls.append(args)

    replica = running(call)

    def cancel(name: str) -> None:
        if name == "commit":
            replica.departed.cancel(["s"])
            replica.loop.leave("s")

    replica.on = cancel
    assert (await replica.migrate()).outcome == "moved"
    await asyncio.sleep(0)
    assert calls == [("destination", "cancel", ["s"], None)]


async def test_a_later_cancellation_knows_where_the_sequence_went() -> None:
    replica = running()
    await replica.migrate()
    assert replica.departed.cancel(["s", "unknown"]) == {"s": "destination"}


@pytest.mark.parametrize("step", ["send", "rest", "commit"])
async def test_an_unexpected_error_lets_the_sequence_run_on(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration_copy, "MAX_CARRIED_BYTES", 0)
    replica = running(**{step: [RuntimeError("a bug")]})
    replica.on = lambda name: replica.loop.step() if name == "phase" else None
    report = await replica.migrate()
    assert report.outcome == "failed"
    assert "a bug" in report.reason
    await replica.settled()
    assert not replica.fails[step]
    assert replica.moves == ["begun", "failed"]
    assert replica.goes_on()


@pytest.mark.parametrize("bug", [MemoryError(), RuntimeError("can't start new thread")])
async def test_an_unexpected_error_while_a_commit_is_settled_is_followed_by_another_try(
    bug: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    replica = running(commit=[SILENT], settle=[bug])
    assert (await replica.migrate()).outcome == "unknown"
    await replica.settled()
    assert replica.transfers[0].num_settles == 2
    assert type(bug).__name__ in caplog.text
    assert replica.moves == ["begun", "failed"]
    assert replica.loop.batch.having(SequenceStatus.MOVING) == []
    assert replica.goes_on()


async def test_an_unexpected_error_is_the_orders_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Migration) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Migration, "run", broken)
    replica = Replica()
    with pytest.raises(RuntimeError, match="a bug"):
        await replica.migrate()
    assert not replica.migrations.under_way


async def test_a_drained_replica_moves_every_sequence() -> None:
    replica = Replica()
    for name in ("s", "t", "u"):
        replica.take(name)
    reports = await replica.migrations.move_all("destination")
    assert [r.outcome for r in reports] == ["moved"] * 3
    assert replica.loop.slots.owners == []
