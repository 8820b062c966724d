"""The whole of a migration between two replicas of one process: the actors' code without Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from actors.kv_transfer.handoff_sender import HandoffSender
from actors.kv_transfer.migration import Migrations
from actors.replica.decode import DecodeReplica
from actors.rpc.rpc_batcher import RpcBatcher
from quadriga.checkpoint.exits import ExitPolicy
from quadriga.clock import ManualClock
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.kv import KVPart
from quadriga.core.migration import MigrationCause, MigrationOrder, MigrationReport
from quadriga.core.output import EngineOutput
from quadriga.core.replica import ReplicaInfo, Role
from quadriga.core.request import SequenceState
from quadriga.errors import ReplicaError
from quadriga.replica.departed_sequences import DepartedSequences
from quadriga.replica.handoff_receiver import HandoffReceiver
from quadriga.replica.spans import SequenceSpans
from quadriga.scheduling.output_dispatcher import OutputDispatcher
from quadriga.scheduling.transfer import migration_copy
from quadriga.scheduling.transfer.sequence_export import StepPhase
from tests.equivalence.early_exit_reference import LAYERS, build_deep, save_with_exits
from tests.equivalence.test_depth import EXITS, MODELS, Bench, check, reference, states

Result = TypeVar("Result")


class Engine:
    """Runs commands at once, and a step of its loop after each: others decode on."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.core = SimpleNamespace(
            loop=bench.loop, runner=bench.runner, phase=lambda: StepPhase(0.0, 0.0)
        )

    def require_core(self) -> Any:
        return self.core

    async def call(self, command: Callable[[Any], Result]) -> Result:
        await asyncio.sleep(0)
        try:
            return command(self.core)
        finally:
            self.bench.step()


class Side(DecodeReplica):
    """A replica whose process is this one.

    Attributes:
        told: What it told the ingress.
    """

    def __init__(self, name: str, bench: Bench, network: Network) -> None:
        self.name, self.bench = name, bench
        self.clock = ManualClock()  # type: ignore[assignment]
        self.config = QuadrigaConfig()
        self.spec = SimpleNamespace(engine=bench.runner.spec)  # type: ignore[assignment]
        self.engine = Engine(bench)  # type: ignore[assignment]
        self.mail = OutputDispatcher(name, self.clock, 1.0)
        self.spans = SequenceSpans(name, self.clock)
        self.metrics = SimpleNamespace(migrated=lambda *_: None)  # type: ignore[assignment]
        self.info_record = ReplicaInfo(
            name, Role.DECODE, bench.runner.spec.depth_class, "", name, 6, 576
        )
        self._is_draining = self.is_ending = False
        self.departed, self._accepted, self._arrived = DepartedSequences(), [], []
        self._news = asyncio.Event()
        self.receiver = HandoffReceiver(
            bench.runner.spec.depth_class, self, self.clock, any_depth=True
        )
        self.transport = network  # type: ignore[assignment]
        self.calls = RpcBatcher(network.call)
        self.migrations = Migrations(self)
        self.sender = HandoffSender(name, network.line(name), self.calls, self.config.transport)
        self.told: list[EngineOutput] = []

    def emit(self, emissions: Any, *, wakes: bool = True) -> None:
        self.told += [emission for _, emission in emissions]

    def post(self, callback: Callable[..., object], *args: object) -> None:
        callback(*args)

    def remember_peer(self, info: ReplicaInfo) -> None:
        pass


class Network:
    """Calls and KV between the sides; everything is pickled on its way.

    Attributes:
        parts, carried: Parts that travelled by themselves, and with a commit.
        calls: How often each method was called; a batch counts once.
        lose: Answers to commits that are lost.
    """

    def __init__(self) -> None:
        self.sides: dict[str, Side] = {}
        self.parts = self.carried = self.lose = 0
        self.calls: Counter[str] = Counter()

    async def call(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        self.calls[args[0] if method == "call_many" else method] += 1
        if method == "commit":
            self.carried += len(args[3].last_kv)
        found = await getattr(self.sides[name], method)(*pickle.loads(pickle.dumps(args, 5)))
        if self.lose and method == "commit":
            self.lose -= 1
            raise ReplicaError("lost", code="timeout")
        return pickle.loads(pickle.dumps(found, 5))

    def line(self, source: str) -> Any:
        async def send(peer: str, part: KVPart, kv: torch.Tensor, *, deadline_s: float) -> None:
            await asyncio.sleep(0)
            self.parts += 1
            self.sides[peer].receiver.accept(source, part)
            self.sides[peer].receiver.store(source, part, kv.clone())

        async def abort(peer: str, transfer_id: str) -> None:
            await asyncio.sleep(0)

        return SimpleNamespace(name="local", send=send, abort=abort)


@pytest.fixture(scope="module", autouse=True)
def llama(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = build_deep("llama")
    MODELS["llama"] = model, save_with_exits(model, tmp_path_factory.mktemp("deep"), EXITS)


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    for side in network.sides.values():
        assert side.receiver.leases.num_open == side.bench.loop.slots.num_held == 0
        assert not side.migrations.under_way


def build(network: Network, *depths: int) -> list[Side]:
    path = MODELS["llama"][1]
    for i, depth in enumerate(depths):
        bench = Bench(path, depth, compile="wait")
        network.sides[f"r{i}"] = Side(f"r{i}", bench, network)
    return list(network.sides.values())


async def migrate(source: Side, destination: Side, sequence_id: str) -> MigrationReport:
    order = MigrationOrder(
        sequence_id,
        source.bench.runner.spec.depth_class,
        source.name,
        destination.name,
        MigrationCause.BALANCE,
        gain=0.1,
        num_tokens=0,
        remaining_tokens=0.0,
    )
    return await source.migrations.migrate(order)


def here(side: Side, sequence_id: str) -> SequenceState:
    return next(s for s in side.bench.loop.running if s.sequence_id == sequence_id)


def start(side: Side, policy: ExitPolicy = "bounded", name: str = "") -> list[SequenceState]:
    made = states("llama", policy, 40)
    for state in made:
        state.sequence_id += name
        side.bench.join(state)
    side.bench.step(6)
    return made


def finish(*sides: Side) -> None:
    for side in sides:
        side.bench.finish()


async def test_to_and_fro_with_the_last_kv_in_the_commit(network: Network) -> None:
    one, other = build(network, LAYERS, LAYERS)
    got = start(one)
    (quiet,) = build(Network(), LAYERS)
    alone = start(quiet)
    finish(quiet)
    for i, state in enumerate(got):
        source, destination = one, other
        for _ in range(2):
            report = await migrate(source, destination, state.sequence_id)
            assert report.outcome == "moved", report
            assert report.bytes_sent > 0
            got[i] = here(destination, state.sequence_id)
            source, destination = destination, source
    assert network.calls["commit"] == 2 * len(got)
    assert [e.move for e in one.told[:2]] == ["begun", "done"]
    finish(one, other)
    assert [s.output_ids for s in got] == [s.output_ids for s in alone]
    assert [s.exit_layers for s in got] == [s.exit_layers for s in alone]
    assert {s.epoch for s in got} == {2}


@pytest.mark.parametrize("max_bytes", [0, 1 << 16], ids=["sent", "carried"])
async def test_the_last_kv_is_carried_or_sent(
    network: Network, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration_copy, "MAX_CARRIED_BYTES", max_bytes)
    one, other = build(network, LAYERS, LAYERS)
    got = start(one)
    for state in got:
        assert (await migrate(one, other, state.sequence_id)).outcome == "moved"
    assert network.parts >= len(got), "what there was before went by itself"
    assert (network.carried > 0) is (max_bytes > 0)
    finish(one, other)


async def test_a_commit_whose_answer_is_lost_is_made_once(network: Network) -> None:
    one, other = build(network, LAYERS, LAYERS)
    network.lose = 1
    got = start(one)
    assert (await migrate(one, other, got[1].sequence_id)).outcome == "moved"
    assert network.calls["commit"] == 2
    moved = here(other, got[1].sequence_id)
    finish(one, other)
    assert len(moved.output_ids) == 40


async def test_paused_sequences(network: Network) -> None:
    one, other = build(network, LAYERS, LAYERS)
    got = start(one)
    preemption = one.bench.loop.preemption
    preemption._resume_one = lambda: False  # type: ignore[method-assign]
    assert one.bench.loop.preemption.pause(got[2].sequence_id)
    assert (await migrate(one, other, got[2].sequence_id)).outcome == "moved"
    assert not one.bench.loop.is_paused(got[2].sequence_id)
    got[2] = here(other, got[2].sequence_id)
    finish(one, other)
    check(reference("llama", "replay"), got, LAYERS)


async def test_between_depths(network: Network) -> None:
    """Bounded down and up; strict up, refused down; nobody but the destination decides."""
    deep, shallow = build(network, LAYERS, 3)
    got = start(deep)
    for i, state in enumerate(got):
        assert (await migrate(deep, shallow, state.sequence_id)).outcome == "moved"
        moved = here(shallow, state.sequence_id)
        if i % 2:
            assert (await migrate(shallow, deep, state.sequence_id)).outcome == "moved"
            moved = here(deep, state.sequence_id)
        got[i] = moved
    finish(deep, shallow)
    check(reference("llama", "replay"), got, LAYERS)
    strict = start(shallow, "strict", name="strict")
    finish(shallow)
    parked = shallow.bench.loop.depth.needs_deeper
    assert parked
    for state in list(parked):
        assert (await migrate(shallow, deep, state.sequence_id)).outcome == "moved"
        strict[strict.index(state)] = here(deep, state.sequence_id)
        report = await migrate(deep, shallow, state.sequence_id)
        assert report.outcome == "refused" and report.reason.startswith("wrong_depth:"), report
    finish(deep)
    assert [len(s.output_ids) for s in strict] == [40] * len(strict)
    check(reference("llama", "replay"), strict, LAYERS)
