"""The paged engine on a device of its own: nothing of the host is mixed in; it waits when it must.

The device is `tests.fake_gpu`. What is pinned here is what a GPU would feel: how often a pass makes
the host wait, how many kernels a layer has, and how many are launched outside of a pass's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from quadriga.checkpoint.exits import SkippedKV
from quadriga.checkpoint.folder import ASSETS
from quadriga.checkpoint.model_config import ModelConfig
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.grammar import Grammar
from quadriga.core.request import SampledToken, SequenceState
from quadriga.engine.baton.model import CausalModel
from quadriga.engine.baton.probe import inspect_cache
from quadriga.engine.baton.prompts import PASS_TOKENS
from quadriga.engine.baton.runner import BatonRunner
from quadriga.engine.cuda.attention import FlashAttention
from quadriga.engine.cuda.decoder import PagedDecoder
from quadriga.engine.cuda.graphs import GraphRecorder
from quadriga.engine.cuda.operations import Operations, Store
from quadriga.engine.cuda.pages import PAGE_TOKENS
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.weights.checkpoint_weights import LayerWeights, Norm
from quadriga.interfaces import MAX_DRAFTED, PrefillChunk
from tests.architecture.bounds import Bound
from tests.equivalence import test_lossless as lossless
from tests.equivalence import test_pause as pausing
from tests.equivalence.models import build, make_spec, make_state, save, start_row, whole_prompt
from tests.equivalence.paged import assert_no_page_is_held, cache_of, graphs_of, load_on_pages
from tests.equivalence.recording import TapeRecorder
from tests.equivalence.relay_models import FAMILIES, build_relay
from tests.equivalence.test_early_exits import MODES, Bench, Family, assert_equal, family, states
from tests.fake_gpu import FakeGpu, FakeTensor
from tests.unit.engine.cuda.test_attention import FlashStandIn

__all__ = ["family"]

pytestmark = pytest.mark.timeout(600)  # each operation goes through Python several times
BUNDLED = ("quadriga-s", "quadriga-l")
KERNELS_A_LAYER = Bound(9, wanted=9)
KERNELS_BESIDE_A_GRAPH = Bound(0, wanted=0)
"""Of a decode pass in bfloat16 with flash-attn and the operations in Triton."""


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu() as gpu:
        yield gpu


@pytest.fixture
def loaded(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[NativeRunner]:
    """Runners are loaded on the device, their decode passes recorded; here is which."""
    made: list[NativeRunner] = []

    def load(spec: EngineSpec) -> NativeRunner:
        made.append(on_gpu(gpu, replace(spec, compile="off"), TapeRecorder()))
        return made[-1]

    monkeypatch.setattr(NativeRunner, "load", staticmethod(load))
    return made


def on_gpu(gpu: FakeGpu, spec: EngineSpec, recorder: GraphRecorder | None = None) -> NativeRunner:
    return load_on_pages(spec, recorder, device=gpu.device)


@pytest.mark.parametrize(
    ("family", "mode"),
    [*(("llama", mode) for mode in MODES if mode != "alias"), ("opt-pre-norm", "project")],
    indirect=["family"],
)
def test_early_exits_mix_nothing_of_the_host_in(
    family: Family, mode: SkippedKV, loaded: list[NativeRunner]
) -> None:
    """Hand-off, every way to make up for skipped KV, rebatching: the reference's answers."""
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        wanted = family.expected(mode)
    bench = Bench(family.path, mode=mode)
    got = states(family.exits)[:4]
    bench.run(got)
    assert_equal(got, wanted[:4])
    for runner in loaded:
        assert_no_page_is_held(runner)
        assert isinstance(cache_of(runner).keys, FakeTensor)


def test_drafts_and_every_sampling_parameter_mix_nothing_of_the_host_in(
    gpu: FakeGpu, loaded: list[NativeRunner], tmp_path: Path
) -> None:
    path = lossless.family("llama", tmp_path, agrees=0.6)
    spec = lossless.spec_of(path, compile="off")
    loop = lossless.make_loop(NativeRunner.load(spec), prefix_caching=True)
    got = lossless.run(loop, lossless.states(lambda i: lossless.LOSSLESS, 5))
    assert loop.decode.counters.verified > 0
    full = lossless.make_loop(NativeRunner.load(spec))
    wanted = lossless.run(full, lossless.states(lambda i: lossless.FULL, 5))
    assert lossless.tokens_of(got) == lossless.tokens_of(wanted)


def test_the_relay_batch_says_what_it_says_on_the_host(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PASS_TOKENS, gpu.device.type, PASS_TOKENS["cuda"])
    loaded = build_relay(FAMILIES["gpt-neox"]())
    spec, model = make_spec(save(loaded, tmp_path), runner="baton"), CausalModel(loaded)

    def answers() -> list[list[int]]:
        runner = BatonRunner(spec, model, geometry)
        made = [make_state([5, 6, 7], **kind) for kind in (PLAIN, DRAWN, TRUNCATED, PENALISED)]
        for row, state in enumerate(made):
            start_row(runner, row, state)
        for _ in range(5):
            for state, token in zip(made, runner.decode([0, 1, 2, 3]), strict=True):
                state.output_ids.append(token.token_id)
        return [state.output_ids for state in made]

    with _disable_current_modes():  # type: ignore[no-untyped-call]
        geometry = inspect_cache(model, spec.checkpoint.id)
        wanted = answers()
    model.to(gpu.device)
    assert answers() == wanted


def test_paused_sequences_come_back_to_the_device(
    loaded: list[NativeRunner], tmp_path: Path
) -> None:
    path = save(build("llama"), tmp_path)
    (path / "exits.json").write_text(
        '{"kind": "shared", "layers": [1, 2], "criterion": "margin", "threshold": 0.2}'
    )
    plain = make_spec(path, skipped_kv="project")
    tokens = 3 * plain.row_capacity_tokens
    exits = plain.checkpoint.exits
    spec = make_spec(path, skipped_kv="project", exits=exits, kv_capacity_tokens=tokens)
    loop = pausing.make_loop(spec, tokens)
    pausing.run(loop, pausing.states())
    assert loop.preemption.num_pauses > 0
    assert_no_page_is_held(loaded[-1])


PLAIN: dict[str, Any] = {}
DRAWN = {"temperature": 0.8, "seed": 3}
TRUNCATED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 1}
PENALISED = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": ((5, 1.0),)}
SCORED = {"num_logprobs": 3}


@pytest.mark.parametrize(
    ("kinds", "waits"),
    [
        ([PLAIN] * 3, 1),
        ([DRAWN] * 3, 1),
        ([PLAIN, DRAWN, TRUNCATED], 1),
        ([PENALISED, DRAWN, PLAIN], 1),
        ([SCORED, SCORED | DRAWN, PLAIN], 2),  # the tokens, then what was asked about them
    ],
    ids=["plain", "drawn", "mixed", "penalised", "scored"],
)
def test_waits_of_each_pass(gpu: FakeGpu, kinds: list[dict[str, Any]], waits: int) -> None:
    """A prompt, a decode step and a step through all segments: one wait, for what comes of it."""
    spec = bundled("quadriga-s")
    runner = on_gpu(gpu, spec)
    rows = list(range(len(kinds)))
    made = [make_state([5, 6, 7 + row], max_tokens=40, **kind) for row, kind in enumerate(kinds)]
    for row, state in zip(rows, made, strict=True):
        runner.attach(row, state)
    with waiting(gpu, waits):
        tokens = runner.prefill([whole_prompt(row, s) for row, s in zip(rows, made, strict=True)])
    for _ in range(2):
        for state, token in zip(made, tokens, strict=True):
            assert token is not None
            state.output_ids.append(token.token_id)
        with waiting(gpu, waits):
            tokens = list(runner.decode(rows))
    says_at_once = all(kind == PLAIN for kind in kinds)
    for segment in range(len(runner.segment_ends)):
        # What leaves at an exit is known with its confidence, unless it is altered or drawn.
        is_altered = any(kind is PENALISED for kind in kinds)
        with waiting(gpu, 2 if is_altered else 1):
            runner.advance(rows, segment, segment + 1)
        with waiting(gpu, 0 if says_at_once else waits):
            runner.emit(rows)


def test_a_step_copies_no_sampling_parameters(gpu: FakeGpu) -> None:
    """They are copied when a sequence takes a row; a step brings its rows and their uniforms."""
    copied = []
    for kind in (PLAIN, DRAWN, TRUNCATED):
        runner = on_gpu(gpu, bundled("quadriga-s"))
        start(runner, [0, 1, 2], **kind)
        gpu.copied.clear()
        runner.decode([0, 2])
        copied.append(list(gpu.copied))
    plain, drawn, truncated = copied
    assert drawn == truncated == [*plain, 3 * 2 * 8]


def test_a_row_is_drawn_by_its_own_sampling_parameters(gpu: FakeGpu) -> None:
    runner = on_gpu(gpu, bundled("quadriga-s"))
    start(runner, [1], temperature=1e-46, num_logprobs=1)
    start(runner, [0], temperature=1e9, seed=1)
    _, token = runner.decode([0, 1])
    assert token.logprob is not None and token.logprob.top[0][0] == token.token_id


def test_prompt_scores_embeddings_and_grammars_mix_nothing_of_the_host_in(gpu: FakeGpu) -> None:
    spec = bundled("quadriga-s")
    asked = [
        {"num_prompt_logprobs": 2},
        {"max_tokens": 0, "pooling": "mean"},
        {"max_tokens": 0, "pooling": "last"},
        {"grammar": Grammar.choice(["the answer", "no answer"])},
    ]
    answers = []
    for is_here in (True, False):
        runner = on_gpu(gpu, spec) if is_here else load_on_pages(spec)
        made = [make_state([5, 6, 7, 8, 9 + i], **fields) for i, fields in enumerate(asked)]
        for row, state in enumerate(made):
            runner.attach(row, state)
        found = []
        for start, stop in ((0, 2), (2, 5)):
            found = runner.prefill(
                [
                    PrefillChunk(row, state.prompt_ids[start:stop], start, stop == 5)
                    for row, state in enumerate(made)
                ]
            )
        for _ in range(3):
            [formed] = found[3:]
            assert formed is not None and formed.error is None
            made[3].output_ids.append(formed.token_id)
            found[3:] = runner.decode([3])
        answers.append((found, made[3].output_ids))
    (here, formed_here), (there, formed_there) = answers
    assert formed_here == formed_there
    assert here[0] is not None and there[0] is not None
    scores, wanted = here[0].prompt_logprobs, there[0].prompt_logprobs
    assert scores is not None and wanted is not None
    assert [s.token_id for s in scores] == [w.token_id for w in wanted]
    for mine, theirs in zip(here[1:3], there[1:3], strict=True):
        assert mine is not None and theirs is not None and mine.embedding and theirs.embedding
        assert list(mine.embedding) == pytest.approx(list(theirs.embedding), abs=1e-5)


def test_a_row_goes_on_at_another_depth_on_the_device(gpu: FakeGpu) -> None:
    """What a replica of all layers suspended comes back in one that has some, and the reverse."""
    whole = on_gpu(gpu, bundled("quadriga-s"))
    some = on_gpu(gpu, bundled("quadriga-s", depth=whole.segment_ends[0]))
    [state] = start(whole, [0])
    for origin, target in ((whole, some), (some, whole)):
        for _ in range(2):
            [token] = origin.decode([0])
            state.output_ids.append(token.token_id)
        suspended = origin.suspend(0)
        for extent, kv in zip(suspended.extents, suspended.kv, strict=True):
            if extent.first_layer < target.num_layers:
                target.write_kv(0, extent.first_layer, 0, kv)
        target.resume(0, state, suspended.rest, origin.num_layers)
    [token] = whole.decode([0])
    assert token.exit_layer == whole.num_layers
    assert isinstance(cache_of(whole).keys, FakeTensor)


def test_waits_of_drafting(gpu: FakeGpu) -> None:
    runner = on_gpu(gpu, bundled("quadriga-s"))
    rows = [0, 1, 2]
    start(runner, rows)
    for _ in range(3):
        with waiting(gpu, 1):
            runner.advance(rows, 0, 1)
        with waiting(gpu, 0):
            runner.draft(rows)
    with waiting(gpu, 1):
        runner.verify(rows)


def test_moving_a_row_waits_for_its_copies_alone(gpu: FakeGpu) -> None:
    runner = on_gpu(gpu, replace(make_spec(ASSETS / "quadriga-s"), num_rows=3))
    state = make_state([5] * 20, max_tokens=40)
    runner.attach(0, state)
    runner.prefill([whole_prompt(0, state)])
    with waiting(gpu, 0):
        kv = runner.read_kv(0, 0, runner.num_layers, 0, 20)
        runner.write_kv(1, 0, 0, kv)
    assert torch.equal(runner.read_kv(1, 0, runner.num_layers, 0, 20).cpu(), kv.cpu())


@pytest.mark.parametrize("model", BUNDLED)
def test_kernels_of_a_layer_and_beside_its_graph(gpu: FakeGpu, model: str) -> None:
    """Ratchets: lower the figures where kernels are fused; see docs/design/gpu.md."""
    spec = bundled(model, dtype="bfloat16")
    recorder = OneLaunch(gpu)
    runner = load_on_pages(spec, recorder, page_tokens=PAGE_TOKENS, device=gpu.device)
    decoder = runner._decoder
    assert isinstance(decoder, PagedDecoder)
    decoder.attention = FlashAttention(OneKernelFlash(gpu), decoder.config)
    decoder.operations = OneKernelOperations(gpu, decoder.config)
    start(runner, [0, 1, 2])
    runner.decode([0, 1, 2])  # records
    x = torch.zeros(3, decoder.config.hidden_size, dtype=torch.bfloat16, device=gpu.device)
    where = torch.zeros(2, 3, dtype=torch.int64, device=gpu.device)

    def launches(work: Callable[[], object]) -> list[str]:
        before = len(gpu.kernels)
        work()
        return gpu.kernels[before:]

    with torch.inference_mode():
        one, two = (
            launches(partial(decoder.run_each, x, where, 0, stop, PAGE_TOKENS)) for stop in (1, 2)
        )
    a_layer = len(two) - len(one)
    beside = [k for k in launches(lambda: runner.decode([0, 1, 2])) if k != "graph"]
    print(f"{model}: {a_layer} kernels a layer, {len(beside)} beside the graph: {beside}")
    assert a_layer <= KERNELS_A_LAYER.now
    assert len(beside) <= KERNELS_BESIDE_A_GRAPH.now


def test_default_traffic_never_runs_beside_its_graphs(gpu: FakeGpu) -> None:
    """Prompts aside: full steps, segments, drafts and their verification, all rows and fewer."""
    spec = replace(bundled("quadriga-s"), num_rows=3, compile="auto", replay_newest=2)
    runner = load_on_pages(spec, TapeRecorder(), page_tokens=PAGE_TOKENS, device=gpu.device)
    decoder = runner._decoder
    assert isinstance(decoder, PagedDecoder)
    num_recorded = graphs_of(runner).num_recorded
    decoder.run_each = None  # type: ignore[method-assign,assignment]  # what graphs do not cover
    made = start(runner, [0, 1, 2])
    num_segments = len(runner.segment_ends)

    def say(rows: list[int], tokens: Sequence[SampledToken]) -> None:
        for row, token in zip(rows, tokens, strict=True):
            made[row].output_ids.append(token.token_id)

    for rows in ([0, 1, 2], [1], [0, 2]):
        say(rows, runner.decode(rows))
        for leaves_at in range(num_segments):
            for segment in range(leaves_at + 1):
                runner.advance(rows, segment, segment + 1)
            say(rows, runner.emit(rows))
        for _ in range(MAX_DRAFTED):
            runner.advance(rows, 0, 1)
            runner.draft(rows)
        runner.advance(rows, 0, 1)
        for row, tokens in zip(rows, runner.verify(rows), strict=True):
            say([row] * len(tokens), tokens)
    assert graphs_of(runner).num_recorded == num_recorded


class OneLaunch(TapeRecorder):
    """A graph is one launch, however many kernels it holds."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        replay = super().record(work)

        def launch() -> None:
            with self._gpu.as_one_kernel("graph"):
                replay()

        return launch


class OneKernelFlash(FlashStandIn):
    """flash-attn's functions as the one kernel that each of them is."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def flash_attn_with_kvcache(self, *args: Any, **options: Any) -> torch.Tensor:
        with self._gpu.as_one_kernel("flash"):
            return super().flash_attn_with_kvcache(*args, **options)

    def flash_attn_varlen_func(self, *args: Any, **options: Any) -> torch.Tensor:
        with self._gpu.as_one_kernel("flash"):
            return super().flash_attn_varlen_func(*args, **options)


class OneKernelOperations(Operations):
    """The kernels of `TritonOperations`."""

    def __init__(self, gpu: FakeGpu, config: ModelConfig) -> None:
        super().__init__(config)
        self._gpu = gpu

    def add_norm(
        self, x: torch.Tensor, more: torch.Tensor | None, weights: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._gpu.as_one_kernel("add_norm"):
            return super().add_norm(x, more, weights)

    def rotate_and_store(
        self, qkv: torch.Tensor, layer: LayerWeights, store: Store
    ) -> torch.Tensor:
        with self._gpu.as_one_kernel("rotate_and_store"):
            return super().rotate_and_store(qkv, layer, store)

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        with self._gpu.as_one_kernel("activate"):
            return super().activate(up)

    def say(self, logits: torch.Tensor, wide: torch.Tensor, said: torch.Tensor) -> None:
        self._gpu.kernels.append("say_joined")
        with self._gpu.as_one_kernel("say"):
            super().say(logits, wide, said)


def bundled(model: str, **overrides: Any) -> EngineSpec:
    folder = ASSETS / model
    spec = make_spec(folder, num_rows=6, row_capacity_tokens=128, **overrides)
    plan = spec.checkpoint.exits
    return replace(spec, exits=plan.cut(spec.depth), exit_plan=plan, skipped_kv="project")


def start(runner: NativeRunner, rows: list[int], **kind: Any) -> list[SequenceState]:
    """Sequences whose prompts are computed."""
    made = []
    for row in rows:
        state = make_state([5, 6, 7 + row], max_tokens=40, **kind)
        start_row(runner, row, state)
        made.append(state)
    return made


@contextmanager
def waiting(gpu: FakeGpu, count: int) -> Iterator[None]:
    """The host waits so often inside."""
    before = len(gpu.waits)
    yield
    assert len(gpu.waits) - before == count, gpu.waits[before:]
