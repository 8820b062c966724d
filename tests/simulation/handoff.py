"""One sequence handed over by a real prefill replica to one of two real decode replicas.

The replicas' own code runs: `PrefillReplica` with its hand-off, `DecodeReplica` with its leases.
Not theirs are the engine (rows are kept in a dict, nothing is computed), the scheduler (the first
replica that is not excluded), Ray and the transport: every call and every part of KV asks `Choices`
what becomes of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from actors.kv_transfer.handoff_sender import HandoffSender
from actors.kv_transfer.placement import DecodePlacement
from actors.replica.decode import DecodeReplica
from actors.replica.decode_engine import DecodeEngine
from actors.replica.prefill import PrefillReplica
from actors.rpc.rpc_batcher import RpcBatcher
from quadriga.background import background
from quadriga.config.loader import load_config
from quadriga.core.kv import KVSpan
from quadriga.core.output import EngineOutput
from quadriga.core.replica import DepthClass, ReplicaInfo, Role
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.core.routing import PlaceRequest
from quadriga.errors import InvariantViolation, QuadrigaError, ReplicaError
from quadriga.replica.departed_sequences import DepartedSequences
from quadriga.replica.handoff_receiver import HandoffReceiver
from quadriga.replica.spans import SequenceSpans
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.transfer.kv_feed import KVFeed, StagingBudget
from quadriga.scheduling.transfer.placement_turns import PlacementTurns
from quadriga.scheduling.transfer.sequence_export import StepPhase
from tests.sequences import make_sequence
from tests.simulation.choices import Choices
from tests.simulation.network import WIRE_S, Network
from tests.simulation.virtual_time import VirtualClock, run_virtually

Result = TypeVar("Result")

CLASS = DepthClass("m", 2)
PROMPT = (5, 6, 7)
FIRST_TOKEN = 8
SEQUENCE = "s"
PREFILL = "p"
DECODES = ("a", "b")
KEYS = [b"5", b"6"]
KEPT = {"a": {b"5"}, "b": {b"5", b"6"}}
"""Blocks of the prompt that the decode replicas have: half of what is fed first, and all of it."""
CONFIG = load_config({"transport": {"deadline_s": 4.0, "lease_s": 3.0}})
DEADLINE_S = 60.0
"""Of the request."""
SETTLED_S = 45.0
"""By then nobody runs what nobody wants, though the deadline would end it later."""
END_S = 70.0


def some_kv(span: KVSpan) -> torch.Tensor:
    """KV that tells its layer and its position: [num_layers, 2, 1, num_tokens, 1]."""
    layers = torch.arange(span.first_layer, span.first_layer + span.num_layers)
    positions = torch.arange(span.start, span.stop)
    values = 100.0 * layers[:, None] + positions
    return values[:, None, None, :, None].repeat(1, 2, 1, 1, 1)


class Rows:
    """What the code above asks of a decode loop: rows promised, sequences that run.

    Raises:
        InvariantViolation: As the loop would, which ends a real replica.
    """

    def __init__(self, kept: set[bytes]) -> None:
        self.kept = kept
        self.running: list[SequenceState] = []
        self.promised: set[str] = set()
        self.written: dict[tuple[int, int], torch.Tensor] = {}

    def reserve(self, sequence_id: str, *_: object) -> Any:
        if sequence_id in self.promised or any(s.sequence_id == sequence_id for s in self.running):
            raise InvariantViolation(f"{sequence_id} is here already")
        self.promised.add(sequence_id)
        self.written.clear()
        return SimpleNamespace(row=0)

    def fill(self, sequence_id: str, row: int, block_keys: Sequence[bytes]) -> int:
        """As if each key was of one position."""
        num_held = len(set(block_keys) & self.kept)
        if num_held:
            self.write_kv(row, 0, 0, some_kv(KVSpan(0, 2, 0, num_held)))
        return num_held

    def join(self, state: SequenceState, resume: object, depth: int) -> None:
        if state.sequence_id not in self.promised:
            raise InvariantViolation(f"{state.sequence_id} has no row")
        span = KVSpan(0, 2, 0, len(PROMPT))
        wanted = some_kv(span)
        for layer in range(2):
            for position in range(span.stop):
                got = self.written.get((layer, position))
                if got is None or not torch.equal(got, wanted[layer, ..., position, :]):
                    raise InvariantViolation(f"layer {layer} lacks position {position}")
        self.promised.remove(state.sequence_id)
        self.running.append(state)

    def leave(self, sequence_id: str) -> None:
        self.promised.discard(sequence_id)
        self.running = [s for s in self.running if s.sequence_id != sequence_id]

    def write_kv(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        for i in range(kv.shape[0]):
            for j in range(kv.shape[3]):
                self.written[first_layer + i, start + j] = kv[i, ..., j, :].clone()


class Engine:
    """Runs commands on the event loop, a turn later, as an engine's thread would."""

    is_ready = True

    def __init__(self, core: Any) -> None:
        self.core = core
        self.violations: list[InvariantViolation] = []

    def require_core(self) -> Any:
        return self.core

    async def call(self, command: Callable[[Any], Result]) -> Result:
        await asyncio.sleep(0)
        try:
            return command(self.core)
        except InvariantViolation as exc:
            self.violations.append(exc)
            raise

    def wake(self) -> None:
        pass


def outfit(replica: Any, world: World, name: str, role: Role) -> None:
    """What `Replica` has without Ray and an engine's thread."""
    replica.name, replica.world = name, world
    replica.clock = VirtualClock()
    replica.config = CONFIG
    replica.spec = SimpleNamespace(engine=SimpleNamespace(depth_class=CLASS))
    replica.spans = SequenceSpans(name, replica.clock)
    replica.mail = SimpleNamespace(expect=lambda ingress_id: None)
    replica.info_record = ReplicaInfo(name, role, CLASS, "", name, 8, 512)
    replica._is_draining = replica.is_ending = False
    replica.departed, replica._arrived = DepartedSequences(), []


class RowsEngine(DecodeEngine):
    """A decode replica's engine around a loop and a runner of its own, without steps."""

    def __init__(self, loop: Any, runner: Any) -> None:
        self.loop, self.runner = loop, runner

    def phase(self) -> StepPhase:
        return StepPhase(0.0, 0.0)


class Decode(DecodeReplica):
    """A decode replica; it runs what it owns for ever."""

    def __init__(self, world: World, name: str) -> None:
        outfit(self, world, name, Role.DECODE)
        self.rows = Rows(KEPT[name])
        self.engine = Engine(RowsEngine(self.rows, self.rows))  # type: ignore[assignment]
        self.migrations = SimpleNamespace(  # type: ignore[assignment]
            under_way=()
        )
        self.receiver = HandoffReceiver(CLASS, self, self.clock)
        background(self._sweep())

    def post(self, callback: Callable[..., object], *args: object) -> None:
        callback(*args)

    @property
    def runs(self) -> bool:
        """Whether the sequence runs here; `DecodeLoop` ends it at its deadline."""
        return any(s.sequence_id == SEQUENCE for s in self.rows.running)


class Prefill(PrefillReplica):
    """The prefill replica, as it is when the first chunk of the one prompt begins."""

    def __init__(self, world: World) -> None:
        outfit(self, world, PREFILL, Role.PREFILL)
        self.released = False
        self.sequences, self._tasks = {}, {}
        self.load = SimpleNamespace(num_waiting=0)  # type: ignore[assignment]
        self.metrics = SimpleNamespace(  # type: ignore[assignment]
            handoff_failed=lambda code: None, handed_off=lambda seconds, num_bytes: None
        )
        core = SimpleNamespace(
            loop=SimpleNamespace(release=self._release), read_kv=lambda _, span: some_kv(span)
        )
        self.engine = Engine(core)  # type: ignore[assignment]
        self.calls = RpcBatcher(world.call_of(PREFILL))
        transport = world.transport_of(PREFILL)
        self.sender = HandoffSender(PREFILL, transport, self.calls, CONFIG.transport)
        self.placement = DecodePlacement(
            CONFIG, self.calls, PlacementTurns(self.sequences, asyncio.get_running_loop().time)
        )

    def _release(self, sequence_id: str) -> None:
        self.released = True

    def emit(self, emissions: Sequence[tuple[str, EngineOutput]], *, wakes: bool = True) -> None:
        for _, output in emissions:
            self.world.hear(output)

    def remember_peer(self, info: ReplicaInfo) -> None:
        pass


class World(Network):
    """The replicas, the wires between them, and a client.

    Attributes:
        error: What the ingress was told the sequence ended in.
        most_owners: The most decode replicas that ran the sequence at one moment.
    """

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.error: QuadrigaError | None = None
        self.most_owners = 0
        self._heard_of: list[str] = []

    async def run(self) -> None:
        """Hand one sequence over, wait until all deadlines have passed, and look at the rest."""
        self.replicas = {name: Decode(self, name) for name in DECODES}
        self.prefill = Prefill(self)
        clock = self.prefill.clock
        state = make_sequence(
            SEQUENCE,
            list(PROMPT),
            SamplingParams(max_tokens=4),
            arrival_unix_s=clock.unix_s(),
            deadline_unix_s=clock.unix_s() + DEADLINE_S,
        )
        sequence = RunningSequence(state, block_keys=list(KEYS))
        sequence.feed = KVFeed(StagingBudget(), 2, 1)
        self.prefill.sequences[SEQUENCE] = sequence
        self.prefill._start_handoff(sequence)
        await asyncio.sleep(0.01)
        sequence.feed.add(KVSpan(0, 2, 0, 2), None)
        await asyncio.sleep(0.01)
        sequence.feed.add(KVSpan(0, 2, 2, len(PROMPT)), None)
        state.output_ids.append(FIRST_TOKEN)
        self.prefill._take_outputs(
            [(sequence, EngineOutput(SEQUENCE, state.epoch, 0, token_ids=[FIRST_TOKEN]))]
        )
        await asyncio.sleep(SETTLED_S)
        self.check_replicas()
        await asyncio.sleep(END_S - SETTLED_S)
        self.check_replicas()
        if PREFILL not in self.dead:
            self.check_prefill()

    def hear(self, output: EngineOutput) -> None:
        """What the ingress hears from the prefill replica."""
        if PREFILL in self.dead:
            return
        if output.moved_to is not None:
            self._heard_of.append(output.moved_to)
        if output.error is not None:
            self.error = output.error
            background(self._give_up())

    def died(self, name: str) -> None:
        if name == PREFILL:
            background(self._give_up())

    def cancel(self) -> None:
        background(self.prefill.cancel([SEQUENCE], "i"))

    async def _give_up(self) -> None:
        """The ingress: it begins the sequence anew under another name, and ends it under this."""
        await asyncio.sleep(0.1)
        for name in set(self._heard_of) - self.dead:
            await self.replicas[name].cancel([SEQUENCE], "i")

    async def other_call(self, name: str, method: str, *args: Any) -> Any:
        """The scheduler."""
        await asyncio.sleep(WIRE_S)
        if method != "call_many":
            return None
        outcomes: list[tuple[bool, Any]] = []
        for (request,) in args[1]:
            assert isinstance(request, PlaceRequest)
            able = [name for name in DECODES if name not in request.exclude]
            gone = ReplicaError("nobody is left", code="unavailable")
            outcomes.append((True, able[0]) if able else (False, gone))
        return outcomes

    # What must hold

    def look(self) -> None:
        self.most_owners = max(self.most_owners, len(self._owners()))

    def state(self) -> Hashable:
        sides = []
        for name, decode in self.replicas.items():
            leases = decode.receiver.leases
            ends = tuple(leases._ended.values())
            sides.append((name in self.dead, decode.runs, leases.num_open, ends))
        sequence = self.prefill.sequences.get(SEQUENCE)
        status = sequence and (sequence.status, sequence.is_placed)
        return (tuple(sides), PREFILL in self.dead, self.is_cancelled, status, self.error is None)

    def check_replicas(self) -> None:
        """Raises: AssertionError: A decode replica broke a promise."""
        self.look()
        assert self.most_owners <= 1, "two replicas ran the sequence at once"
        for name, decode in self.alive().items():
            assert not decode.engine.violations, f"{name}: {decode.engine.violations}"  # type: ignore[attr-defined]
            assert not decode.rows.promised, f"{name} keeps a row that nobody will fill"
            assert not decode.receiver.leases.sequences(), f"{name} keeps a lease"
        if self.is_cancelled or self.error is not None or PREFILL in self.dead:
            assert not self._owners(), f"{self._owners()} run what nobody wants"

    def check_prefill(self) -> None:
        """Raises: AssertionError: The prefill replica, which lives, broke a promise."""
        prefill = self.prefill
        assert not prefill.engine.violations  # type: ignore[attr-defined]
        assert not prefill.sequences and not prefill._tasks, "the prefill replica keeps a sequence"
        assert prefill.released, "the prefill replica keeps a row"
        handed = prefill.departed._peers.get(SEQUENCE)
        if handed in self.alive() and not self.is_cancelled:
            assert self._owners() == [handed], f"it went to {handed}, {self._owners()} run it"
        if not self.choices.faults:
            assert handed == DECODES[0], self.error
        ended = handed is not None or self.error is not None or self.is_cancelled
        assert ended, "the ingress was never told how it ended"

    def _owners(self) -> list[str]:
        return [name for name, decode in self.alive().items() if decode.runs]


def run(choices: Choices) -> None:
    """One run. Raises: AssertionError: A promise was broken."""
    world = World(choices)
    random.seed(0)
    run_virtually(world.run)
