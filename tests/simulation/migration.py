"""A running sequence moved from one real decode replica to another, and back.

The code of `DecodeReplica`, its migrations, its leases and its `DecodeLoop` runs, over a runner
whose next token is a function of the tokens before it, and which fails where a row holds other KV
than its sequence has. What the client gets is put together as by an ingress
(`tests.ray.ingress.Stream`): a gap or a changed token fails the run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any

from actors.kv_transfer.handoff_sender import HandoffSender
from actors.kv_transfer.migration import Migrations
from actors.replica.decode import DecodeReplica
from actors.rpc.rpc_batcher import RpcBatcher
from quadriga.background import background
from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.output import EngineOutput
from quadriga.core.replica import DepthClass, ReplicaInfo, Role
from quadriga.core.request import SamplingParams
from quadriga.errors import QuadrigaError
from quadriga.replica.departed_sequences import DepartedSequences
from quadriga.replica.handoff_receiver import HandoffReceiver
from quadriga.replica.spans import SequenceSpans
from quadriga.scheduling.sequence import SequenceStatus
from tests.fake_runner import FakeRunner, expected_output
from tests.ray.ingress import Stream
from tests.sequences import make_decode_loop, make_sequence, make_slots
from tests.simulation.choices import Choices
from tests.simulation.handoff import CONFIG, RowsEngine
from tests.simulation.network import WIRE_S, Network
from tests.simulation.tensor_runner import TensorRunner
from tests.simulation.virtual_time import VirtualClock, run_virtually

CLASS = DepthClass("fake", FakeRunner.num_layers)
SEQUENCE = "s"
PROMPT = [3 + i for i in range(12)]
NUM_OUTPUT = 60
STEP_S = 0.05
NAMES = ("a", "b")
SETTLED_S = 45.0
NUM_MOVES = 2
"""There, and back."""


class Decode(DecodeReplica):
    """A decode replica whose steps take virtual time."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.world = name, world
        self.clock = VirtualClock()  # type: ignore[assignment]
        self.config = CONFIG
        self.spec = SimpleNamespace(engine=SimpleNamespace(depth_class=CLASS))  # type: ignore[assignment]
        self.spans = SequenceSpans(name, self.clock)
        self.mail = SimpleNamespace(  # type: ignore[assignment]
            expect=lambda ingress_id: None, unacknowledged=lambda *_: [], put=self.emit
        )
        self.metrics = SimpleNamespace(migrated=lambda *_: None)  # type: ignore[assignment]
        self.info_record = ReplicaInfo(name, Role.DECODE, CLASS, "", name, 4, 1024)
        self._is_draining = self.is_ending = False
        self.departed, self._arrived = DepartedSequences(), []
        runner = TensorRunner(4)
        loop = make_decode_loop(runner, make_slots(4, 256, 1024), self.clock)
        self.core = RowsEngine(loop, runner)
        self.engine = SimpleNamespace(  # type: ignore[assignment]
            call=self._command, require_core=lambda: self.core, is_ready=True
        )
        self.transport = world.transport_of(name)
        self.calls = RpcBatcher(world.call_of(name))
        self.migrations = Migrations(self)
        self.sender = HandoffSender(name, self.transport, self.calls, CONFIG.transport)
        self.receiver = HandoffReceiver(CLASS, self, self.clock)
        background(self._sweep())
        background(self._steps())

    async def _command(self, command: Callable[[Any], Any]) -> Any:
        await asyncio.sleep(0)
        return command(self.core)

    async def _steps(self) -> None:
        while self.name not in self.world.dead:
            await asyncio.sleep(STEP_S)
            if self.core.loop.has_work:
                self.emit(self.core.loop.step())

    def emit(self, emissions: Sequence[tuple[str, EngineOutput]], *, wakes: bool = True) -> None:
        for _, output in emissions:
            self.world.hear(self.name, output)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        callback(*args)

    def remember_peer(self, info: ReplicaInfo) -> None:
        pass

    @property
    def decodes(self) -> bool:
        """Whether the sequence runs here; not while it stands still on its way."""
        held = self.core.loop.batch.sequences.get(SEQUENCE)
        return held is not None and held.status is SequenceStatus.RUNNING


class World(Network):
    """Two decode replicas, an ingress, and a scheduler that orders the moves."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.most_owners = 0

    async def run(self) -> None:
        """Start a sequence, order its moves, wait until all is over, and look at the rest."""
        self.replicas = {name: Decode(self, name) for name in NAMES}
        clock = VirtualClock()
        state = make_sequence(
            SEQUENCE,
            list(PROMPT),
            SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True),
            arrival_unix_s=clock.unix_s(),
            deadline_unix_s=clock.unix_s() + 1e6,
        )
        self.stream = Stream(state, NAMES[0])
        self.wanted = expected_output(PROMPT, NUM_OUTPUT)
        first = self.replicas[NAMES[0]]
        slot = first.core.loop.reserve(SEQUENCE, state.max_total_tokens, len(PROMPT))
        state.output_ids.append(self.wanted[0])
        state.exit_layers.append(CLASS.depth)
        self.hear(first.name, EngineOutput(SEQUENCE, 0, 0, [self.wanted[0]], [CLASS.depth]))
        FakeRunner.write_kv(first.core.runner, slot.row, 0, 0, list(PROMPT))
        first.core.loop.join(state)
        await asyncio.sleep(3 * STEP_S)
        for source, destination in (NAMES, NAMES[::-1])[:NUM_MOVES]:
            if source in self.dead:
                break
            order = MigrationOrder(
                SEQUENCE, CLASS, source, destination, MigrationCause.BALANCE, 0.1, 40, 0.0
            )
            # The scheduler's own patience; a replica that dies does not answer.
            await asyncio.wait(
                [background(self.replicas[source].migrations.migrate(order))], timeout=SETTLED_S
            )
            await asyncio.sleep(4 * STEP_S)
        await asyncio.sleep(SETTLED_S)
        self.check()

    def hear(self, sender: str, output: EngineOutput) -> None:
        """What the ingress hears."""
        if sender not in self.dead:
            self.stream.take(output, sender)

    async def other_call(self, name: str, method: str, *args: Any) -> Any:
        await asyncio.sleep(WIRE_S)

    def cancel(self) -> None:
        background(self._cancel())

    async def _cancel(self) -> None:
        await asyncio.sleep(WIRE_S)
        for name in {self.stream.replica, *self.stream.next_owners} - self.dead:
            try:
                await self.replicas[name].cancel([SEQUENCE], "i")
            except QuadrigaError:
                continue

    def look(self) -> None:
        self.most_owners = max(self.most_owners, sum(d.decodes for d in self.alive().values()))

    def state(self) -> Hashable:
        sides = []
        for name, decode in self.replicas.items():
            held = decode.core.loop.batch.sequences.get(SEQUENCE)
            leases = decode.receiver.leases
            ends = tuple(leases._ended.values())
            sides.append((name in self.dead, held and held.status, leases.num_open, ends))
        return (tuple(sides), self.is_cancelled, self.stream.replica, max(self.stream.epochs))

    def check(self) -> None:
        """Raises: AssertionError: A promise was broken."""
        self.look()
        assert self.most_owners <= 1, "two replicas ran the sequence at once"
        for name, decode in self.alive().items():
            assert not decode.core.loop.slots.owners, f"{name} keeps a row"
            assert not decode.receiver.leases.sequences(), f"{name} keeps a lease"
            assert not decode.migrations.under_way, f"{name} has a move that does not end"
        got = self.stream.token_ids
        assert got == self.wanted[: len(got)], "a token is wrong"
        if not self.dead and not self.is_cancelled:
            assert self.stream.error is None and got == self.wanted, "the stream stopped"
        if not self.choices.faults:
            assert len(self.stream.moved_to) == NUM_MOVES, self.stream.moved_to


def run(choices: Choices) -> None:
    """One run. Raises: AssertionError: A promise was broken."""
    random.seed(0)
    run_virtually(World(choices).run)
