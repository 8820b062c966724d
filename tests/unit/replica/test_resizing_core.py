"""The replicas' own cores over a real engine: layers come and go between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.replica.decode_engine import DecodeEngine
from actors.replica.mixed import MixedEngine
from actors.replica.prefill_engine import PrefillEngine
from quadriga.checkpoint.exits import ExitParams
from quadriga.clock import SystemClock
from quadriga.config.engine_spec import EngineSpec
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.core.output import EngineOutput
from quadriga.core.replica import Role
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.core.routing import ReportOptions
from quadriga.engine.model_runner import NativeRunner
from quadriga.replica.resizing import Resizing
from quadriga.scheduling.prefill_loop import PrefillOutput
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.transfer.sequence_export import PreCopy, SequenceRemainder
from tests.sequences import make_sequence

LIMITED = ExitParams(0.99, "bounded", 4)
STRICT = ExitParams(0.99, "strict")


class Host:
    """A replica without Ray: its engine's thread is the event loop's."""

    def __init__(self, role: Role) -> None:
        self.config: QuadrigaConfig = load_config(
            {
                "model": "quadriga-s",
                "decode.rebatching": "drex",
                "deterministic": True,
                "helios.enabled": True,
                "engine.compile": "off",
                "engine.max_model_len": 256,
                "engine.kv_memory_bytes": 2 << 20,
            }
        )
        specs = resolve(self.config, Hardware(4)).replicas
        self.spec = next(s for s in specs if s.role is role)
        self.clock = SystemClock()
        leases = SimpleNamespace(offers=list, sequences=set)
        self.receiver = SimpleNamespace(leases=leases, joining=frozenset())
        self.report_options = ReportOptions()
        self.name = "replica"
        self.load: Any = None
        self.said: list[tuple[str, EngineOutput]] = []
        self.served: list[int] = []
        self.core: Any = None

    def leaving(self) -> set[str]:
        return set()

    def publish_load(self, load: Any) -> None:
        self.load = load

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        callback(*args)

    def emit(self, emissions: list[tuple[str, EngineOutput]]) -> None:
        self.said += emissions

    def take_outputs(self, outputs: list[PrefillOutput]) -> None:
        self.said += [(s.state.ingress_id, output) for s, output in outputs if output is not None]

    def resized(self, engine: EngineSpec) -> None:
        self.spec = replace(self.spec, engine=engine)
        self.served.append(engine.depth)

    async def on_engine(self, command: Callable[[Any], Any]) -> Any:
        if self.core.has_work:
            self.core.step()
        return command(self.core)


def state(name: str, exits: ExitParams) -> SequenceState:
    return make_sequence(
        name,
        [20 + 3 * i for i in range(12)],
        SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
        exits=exits,
    )


def decode_host() -> tuple[Host, NativeRunner]:
    host = Host(Role.DECODE)
    runner = NativeRunner.load(host.spec.engine)
    fake: Any = host
    host.core = DecodeEngine(
        fake, runner, receiver=fake.receiver, leaving=fake.leaving, resizable=runner
    )
    return host, runner


def test_a_mixed_engine_forecasts_the_prompts_that_it_has_yet_to_compute() -> None:
    host: Any = Host(Role.DECODE)
    runner = NativeRunner.load(host.spec.engine)
    engine = MixedEngine(host, runner, receiver=host.receiver, leaving=host.leaving)
    engine.forecasting.is_wanted = True
    engine.submit(state("queued", LIMITED))
    engine.publish()
    forecast = engine.forecasting.forecast()
    assert forecast is not None and forecast.sequence_ids == ("queued",)


def prefilled(made: SequenceState, runner: NativeRunner) -> Any:
    """The first token and the KV of a prompt, as a prefill replica of full depth has it."""
    from quadriga.interfaces import PrefillChunk

    runner.attach(0, made)
    chunk = PrefillChunk(0, made.prompt_ids, 0, is_last=True)
    (token,) = runner.prefill([chunk])
    assert token is not None
    made.output_ids.append(token.token_id)
    made.exit_layers.append(token.exit_layer)
    kv = runner.read_kv(0, 0, runner.num_layers, 0, len(made.prompt_ids))
    runner.detach(0)
    return kv


def join(host: Host, runner: NativeRunner, made: SequenceState, kv: Any) -> None:
    slot = host.core.loop.reserve(made.sequence_id, made.max_total_tokens, made.num_tokens)
    runner.write_kv(slot.row, 0, 0, kv)
    host.core.loop.join(made, None, 8)


def finish(host: Host) -> None:
    while host.core.has_work:
        host.core.step()
        host.core.publish()


@pytest.fixture(scope="module")
def prefiller() -> NativeRunner:
    return NativeRunner.load(Host(Role.PREFILL).spec.engine)


async def test_decode_goes_down_and_up_and_says_what_fits(prefiller: NativeRunner) -> None:
    host, runner = decode_host()
    alone = state("alone", LIMITED)
    join(host, runner, alone, prefilled(alone, prefiller))
    finish(host)
    resizing = Resizing(host)
    made = state("moved", LIMITED)
    join(host, runner, made, prefilled(made, prefiller))
    capacities = []
    for depth in (4, 8, 4, 8, 4):
        host.core.step()
        report = await resizing.resize(depth, 30.0)
        assert (report.outcome, report.depth) == ("resized", depth)
        capacities.append(report.kv_capacity_tokens)
        assert host.core.loop.slots.kv_capacity_tokens == report.kv_capacity_tokens
        assert (report.load_bytes < 0) is (depth == 4)
    finish(host)
    assert host.served == [4, 8, 4, 8, 4]
    assert made.output_ids == alone.output_ids and made.exit_layers == alone.exit_layers
    assert capacities[0] > 1.9 * capacities[1] and capacities[0] == capacities[2]
    depths = {e.depth for _, e in host.said if e.sequence_id == "moved" and e.token_ids}
    assert depths == {4, 8}, "every token says what was loaded"


async def test_strict_sequences_park_show_and_block(prefiller: NativeRunner) -> None:
    host, runner = decode_host()
    deep = state("deep", STRICT)
    join(host, runner, deep, prefilled(deep, prefiller))
    report = await Resizing(host).resize(4, 0.05)
    assert report.outcome == "blocked" and "deep" in report.reason
    host.core.publish()
    assert host.load.strict_depth == 8
    finish(host)

    assert (await Resizing(host).resize(4, 5.0)).outcome == "resized"
    made = state("parked", STRICT)
    join(host, runner, made, prefilled(made, prefiller))
    finish(host)
    host.core._looked_s = -1e9
    host.core.publish()
    (parked,) = host.load.parked
    assert parked.sequence_id == "parked" and len(made.output_ids) < 60
    assert (await Resizing(host).resize(8, 30.0)).outcome == "resized"
    finish(host)
    assert made.output_ids == deep.output_ids
    host.core._looked_s = -1e9
    host.core.publish()
    assert host.load.parked == () and host.load.strict_depth == 0


async def test_prefill_changes_between_prompts() -> None:
    host = Host(Role.PREFILL)
    runner = NativeRunner.load(host.spec.engine)
    fake: Any = host
    host.core = PrefillEngine(
        fake, runner, None, runner, on_start=lambda _: None, on_outputs=host.take_outputs
    )
    first = state("first", LIMITED)
    host.core.loop.submit(RunningSequence(first))
    host.core.step()
    assert host.said[-1][1].depth == 8
    resizing = Resizing(host)
    report = await resizing.resize(4, 0.05)
    assert report.outcome == "blocked" and "first" in report.reason, "it has not been handed over"
    host.core.loop.release("first")
    assert (await resizing.resize(4, 5.0)).outcome == "resized"
    second = state("second", LIMITED)
    host.core.loop.submit(RunningSequence(second))
    host.core.step()
    said = host.said[-1][1]
    assert (said.sequence_id, said.depth, said.exit_layers) == ("second", 4, [4])
    host.core.loop.release("second")
    assert (await resizing.resize(8, 30.0)).depth == 8


def test_a_paused_sequence_counts_in_the_load_until_its_move_is_over(
    prefiller: NativeRunner,
) -> None:
    """A replica that drains would end before it has handed it over."""
    host, runner = decode_host()
    made = state("one", LIMITED)
    join(host, runner, made, prefilled(made, prefiller))
    loop, books = host.core.loop, PreCopy()
    assert loop.preemption.pause("one")
    paused = host.core._load()
    while not isinstance(loop.export.begin_cutover("one", books), SequenceRemainder):
        pass
    moving = host.core._load()
    assert (paused.num_held, paused.num_paused, moving.num_held, moving.num_paused) == (1, 1, 1, 0)
    assert moving.paused_bytes == paused.paused_bytes > 0
    loop.leave("one")
    assert host.core._load().num_held == 0
