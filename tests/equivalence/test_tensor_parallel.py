"""An engine over several ranks says what one over the whole model says, whatever the weights."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM as AutoModel
from transformers import LlamaConfig, MistralConfig, OPTConfig, Qwen3Config

from quadriga.checkpoint.exits import FULL_DEPTH, ExitParams
from quadriga.config.engine_spec import EngineSpec
from quadriga.config.loader import load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.core.request import SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.tensor_parallel import loading
from quadriga.engine.tensor_parallel import ranks as ranks_module
from quadriga.engine.tensor_parallel.part import Part
from quadriga.engine.tensor_parallel.ranks import Op, Order, RanksLost
from quadriga.engine.weights.loading import FORM_OF_SETTING
from quadriga.engine.weights.matrix import Form
from quadriga.errors import ConfigError
from quadriga.gguf.cache import converted_folder
from tests.equivalence.models import GATED, SIZES, make_spec, make_state, randomise, save
from tests.equivalence.moving import Member
from tests.equivalence.test_lossless import (
    assert_logprobs_are_near,
    make_loop,
    mixed,
    run,
    states,
    tokens_of,
)
from tests.equivalence.test_migrated import SEEDED, Traffic, assert_same, bundled, undisturbed
from tests.equivalence.test_migrated import sequences as to_move
from tests.equivalence.test_rounded_weights import matrices
from tests.gguf_files import write_model

FOUR = {"num_attention_heads": 8, "vocab_size": 132}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(
        **(GATED | FOUR | {"num_key_value_heads": 4}), attention_bias=True, mlp_bias=True
    ),
    "mistral": lambda: MistralConfig(
        **(GATED | FOUR | {"num_key_value_heads": 4}), sliding_window=7, tie_word_embeddings=True
    ),
    "qwen3": lambda: Qwen3Config(**(GATED | FOUR | {"num_key_value_heads": 4}), head_dim=16),
    "opt": lambda: OPTConfig(
        **(SIZES | FOUR), ffn_dim=72, do_layer_norm_before=False, word_embed_proj_dim=24
    ),
}
BLOCKS = GATED | {
    **{"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16},
    **{"intermediate_size": 192, "vocab_size": 260},
}
"""Whole blocks and groups of every form in each matrix; of a quarter of the columns in none."""
EXITS = '{"kind": "shared", "layers": [1, 2], "criterion": "margin", "threshold": 0.2}'
PROMPTS = 9
SILENCE_S = 2.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each family, with an exit behind each layer."""
    made = {}
    for name, config in FAMILIES.items():
        torch.manual_seed(3)
        model = AutoModel.from_config(config(), attn_implementation="eager").eval()
        made[name] = save(randomise(model), tmp_path_factory.mktemp(name))
        (made[name] / "exits.json").write_text(EXITS)
    return made


@pytest.fixture
def load() -> Iterator[Callable[..., NativeRunner]]:
    """Loads runners, whose ranks end with the test."""
    made: list[NativeRunner] = []

    def load(spec: EngineSpec, size: int = 1) -> NativeRunner:
        made.append(NativeRunner.load(replace(spec, tensor_parallel=size)))
        return made[-1]

    yield load
    for runner in made:
        runner.close()


def spec_of(path: Path, **overrides: Any) -> EngineSpec:
    spec = make_spec(path, **({"compile": "wait"} | overrides))
    return replace(spec, exits=spec.checkpoint.exits)


@pytest.mark.parametrize(
    ("name", "size", "compiled"),
    [
        ("llama", 2, "wait"),
        ("llama", 4, "wait"),
        ("llama", 4, "off"),
        ("mistral", 2, "off"),
        ("qwen3", 2, "wait"),
        ("opt", 4, "wait"),
        ("opt", 2, "off"),
    ],
)
def test_every_family_greedy_sampled_with_exits_and_drafts(
    checkpoints: dict[str, Path],
    load: Callable[..., NativeRunner],
    name: str,
    size: int,
    compiled: str,
) -> None:
    spec = spec_of(checkpoints[name], compile=compiled)
    loop, made = make_loop(load(spec, size), chunk_tokens=16), states(mixed, PROMPTS)
    got, wanted_states = run(loop, made), states(mixed, PROMPTS)
    wanted = run(make_loop(load(spec), chunk_tokens=16), wanted_states)
    assert tokens_of(got) == tokens_of(wanted)
    assert_logprobs_are_near(got, wanted)
    if compiled == "wait":
        assert got == wanted, "to the bit"
    assert [s.exit_layers for s in made] == [s.exit_layers for s in wanted_states]
    assert {k for s in made for k in s.exit_layers} == {1, 2, 3}
    assert loop.decode.counters.drafted > 0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", ["bfloat16", "float16", "int8", Kind.Q8_0, Kind.Q4_0])
def test_every_form_of_weights_is_that_of_one_rank_to_the_bit(
    form: Any, size: int, tmp_path: Path, load: Callable[..., NativeRunner]
) -> None:
    """No blocks of inputs, nor of weights, divide among four ranks."""
    torch.manual_seed(size)
    model = randomise(AutoModel.from_config(LlamaConfig(**BLOCKS)).eval())
    if isinstance(form, str):
        path, weights, kept = save(model, tmp_path / "model"), form, FORM_OF_SETTING[form]
    else:
        file = write_model(tmp_path / "model.gguf", model, kind=form)
        path, weights, kept = converted_folder(file, tmp_path / "cache"), "auto", Form[form.name]
    (path / "exits.json").write_text(EXITS)
    spec = spec_of(path, weights=weights)
    one, many = load(spec), load(spec, size)
    for runner in (one, many):
        assert {m.form for m in matrices(runner.weights)} == {kept}
    got = run(make_loop(many, chunk_tokens=16), states(mixed, PROMPTS))
    assert got == run(make_loop(one, chunk_tokens=16), states(mixed, PROMPTS))


def test_an_mlp_without_a_gate_needs_no_whole_groups_of_rows(
    tmp_path: Path, load: Callable[..., NativeRunner]
) -> None:
    """Its first matrix is stored alone, and filled up with zeros."""
    model = AutoModel.from_config(OPTConfig(**(SIZES | FOUR | {"hidden_size": 128}), ffn_dim=48))
    path = save(randomise(model.eval()), tmp_path / "model")
    given = {"model": str(path), "engine": {"weights": "int8", "tensor_parallel": 2}}
    assert resolve(load_config(given), Hardware(16)).replicas
    (path / "exits.json").write_text(EXITS)
    spec = spec_of(path, weights="int8")
    one, many = load(spec), load(spec, 2)
    assert {r.weights.layers[0].up.weight.form for r in (one, many)} == {Form.INT8}
    got = run(make_loop(many, chunk_tokens=16), states(mixed, PROMPTS))
    assert got == run(make_loop(one, chunk_tokens=16), states(mixed, PROMPTS))


def test_a_token_is_the_same_to_the_bit_whoever_is_beside_it(
    checkpoints: dict[str, Path], load: Callable[..., NativeRunner]
) -> None:
    """As nothing is added up over ranks, the batch changes no sum."""
    runner, found = load(spec_of(checkpoints["llama"]), 4), []
    for num_beside in (0, 1, 4, 7):
        made = states(lambda i: FULL_DEPTH, 1 + num_beside)
        for state in made:
            state.sampling = replace(state.sampling, num_logprobs=5)
        run(make_loop(runner), made)
        found.append([(row.token_id, row.logprob) for row in made[0].logprobs])
    assert found == found[:1] * 4 and found[0]


@pytest.mark.parametrize("mode", ["project", "alias", "copy", "replay"])
def test_every_way_to_fill_skipped_layers(
    checkpoints: dict[str, Path], load: Callable[..., NativeRunner], mode: Any
) -> None:
    spec = spec_of(checkpoints["llama"], skipped_kv=mode, replay_newest=2)
    bounded = lambda i: ExitParams(0.2, "bounded")  # noqa: E731
    got = run(make_loop(load(spec, 2)), states(bounded, PROMPTS))
    assert tokens_of(got) == tokens_of(run(make_loop(load(spec)), states(bounded, PROMPTS)))


def test_exits_with_heads_and_maps_of_their_own(load: Callable[..., NativeRunner]) -> None:
    spec = replace(bundled("quadriga-s"), skipped_kv="linear", replay_newest=1)
    one, two = Member(spec, rebatches=True, runner=load(spec)), load(spec, 2)
    wanted = undisturbed(one, to_move(4, 30, threshold=0.9))
    got = undisturbed(Member(spec, rebatches=True, runner=two), to_move(4, 30, threshold=0.9))
    assert_same(got, wanted)
    assert len({k for s in got for k in s.exit_layers}) > 1, "tokens leave at several exits"


def test_paused_and_resumed(
    checkpoints: dict[str, Path], load: Callable[..., NativeRunner]
) -> None:
    spec = spec_of(checkpoints["llama"])
    loop, paused = make_loop(load(spec, 2), reservation="used"), 0

    def disturb(step: int) -> None:
        nonlocal paused
        running = loop.decode.running
        if step % 4 == 0 and running:
            paused += loop.decode.preemption.pause(running[-1].sequence_id)

    got = run(loop, states(mixed, PROMPTS), disturb)
    assert tokens_of(got) == tokens_of(run(make_loop(load(spec)), states(mixed, PROMPTS)))
    assert paused > 3


def test_prompts_that_begin_alike_share_their_kv(
    checkpoints: dict[str, Path], load: Callable[..., NativeRunner]
) -> None:
    spec = spec_of(checkpoints["llama"], num_rows=3)

    def made() -> list[SequenceState]:
        """Three beginnings, of which there is room for two."""
        return [
            replace(
                make_state([*range(start, start + 66), 5 + i], max_tokens=8), sequence_id=f"s{i}"
            )
            for i, start in enumerate((3, 20, 3, 40, 3, 20))
        ]

    loop = make_loop(load(spec, 2), prefix_caching=True, max_slots=1)
    got = run(loop, made())
    assert tokens_of(got) == tokens_of(run(make_loop(load(spec)), made()))
    prefixes = loop.prefill.prefixes
    assert prefixes is not None
    totals = prefixes.count()
    assert totals.hits > 0 and totals.evicted > 0


def test_moved_between_engines_of_one_two_and_four_ranks(
    checkpoints: dict[str, Path], load: Callable[..., NativeRunner]
) -> None:
    """At any step, with tokens that wait at exits, out of host memory, and back."""
    spec = spec_of(checkpoints["llama"], row_capacity_tokens=80)
    wanted = undisturbed(Member(spec, rebatches=True, runner=load(spec)), to_move(5, 24, **SEEDED))
    members = [Member(spec, rebatches=True, runner=load(spec, k)) for k in (1, 2, 2, 4)]
    traffic = Traffic(members, to_move(5, 24, **SEEDED), random.Random(4), pauses=0.1)
    assert_same(traffic.run(), wanted)
    assert traffic.moves > 15 and traffic.waited > 0


def test_rebuilt_from_its_tokens_alone(
    checkpoints: dict[str, Path], load: Callable[..., NativeRunner]
) -> None:
    """Every token goes as deep again as it once went."""
    spec = spec_of(checkpoints["llama"])
    wanted = states(mixed, 8)
    run(make_loop(load(spec)), wanted)
    todo, random_ = states(mixed, 8), random.Random(5)
    done: dict[str, SequenceState] = {}
    runner = load(spec, 2)
    while todo:
        loop = make_loop(runner, random_.randrange(99))
        for state in todo:
            loop.submit(state)
        ended: set[str] = set()
        for _ in range(random_.randint(8, 20)):
            ended |= {o.sequence_id for o in loop.step() if o.finish is not None}
        done |= {s.sequence_id: s for s in todo if s.sequence_id in ended}
        todo = [s for s in todo if s.sequence_id not in ended]
        for state in todo:
            loop.release(state.sequence_id)
    assert [done[s.sequence_id].output_ids for s in wanted] == [s.output_ids for s in wanted]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_of_16_bits_are_near_those_of_one_rank(
    dtype: str, checkpoints: dict[str, Path], load: Callable[..., NativeRunner]
) -> None:
    """Plain torch computes them, and chooses the order of sums by the shape of a product."""
    spec, found = spec_of(checkpoints["llama"], compile="off", dtype=dtype), []
    for size in (1, 2):
        runner, state = load(spec, size), make_state(list(range(3, 40)))
        runner.attach(0, state)
        run_prompt(runner, state)
        found.append(runner.read_kv(0, 0, runner.num_layers, 0, 37).float())
    assert (found[1] - found[0]).norm() < 0.03 * found[0].norm()


def test_ranks_that_compute_unlike_have_a_name_of_their_own(
    checkpoints: dict[str, Path],
    load: Callable[..., NativeRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a node without a compiler a rank computes in plain torch."""
    init = Part.__init__

    def uncompiled(part: Part, spec: EngineSpec, whole: Any, shard: Any) -> None:
        init(part, replace(spec, compile="off") if shard.rank else spec, whole, shard)

    monkeypatch.setattr(Part, "__init__", uncompiled)
    spec = spec_of(checkpoints["llama"])
    assert load(spec, 2).numerics.startswith(f"{load(spec).numerics} | torch ")


def test_a_rank_holds_its_share(
    checkpoints: dict[str, Path], load: Callable[..., NativeRunner]
) -> None:
    spec = spec_of(checkpoints["llama"])
    one, four = load(spec), load(spec, 4)
    mine, whole = four.weights, one.weights
    assert mine.embed.nbytes * 4 == whole.embed.nbytes
    assert mine.heads[3].weight.nbytes * 4 == whole.heads[3].weight.nbytes
    matrices = [(layer.qkv, layer.out, layer.up, layer.down) for layer in mine.layers]
    of_whole = [(layer.qkv, layer.out, layer.up, layer.down) for layer in whole.layers]
    for ours, theirs in zip(sum(matrices, ()), sum(of_whole, ()), strict=True):
        assert ours.weight.nbytes * 4 == theirs.weight.nbytes
    assert four.numerics == f"{one.numerics} over 4 ranks"
    with pytest.raises(ConfigError, match="over several ranks keeps the 3 layers"):
        four.check_drop(1)


def fail_at(monkeypatch: pytest.MonkeyPatch, fail: Callable[[Part, Order], None]) -> None:
    """Have ranks behind the first do something else instead of running layers."""
    obey = Part._obey

    def instead(part: Part, order: Order) -> None:
        (fail if order.op is Op.LAYERS else obey)(part, order)

    monkeypatch.setattr(Part, "_obey", instead)
    monkeypatch.setattr(ranks_module, "SILENCE_TIMEOUT_S", SILENCE_S)


@pytest.mark.parametrize("way", ["dies", "is silent"])
def test_a_rank_that_is_lost_ends_the_engine(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    is_over = threading.Event()

    def fail(part: Part, order: Order) -> None:
        if way == "dies":
            raise RuntimeError("it died")
        is_over.wait(60.0)

    fail_at(monkeypatch, fail)
    runner = NativeRunner.load(spec_of(checkpoints["llama"], tensor_parallel=2))
    reasons: list[str] = []
    runner.model.decoder.ranks.lost = reasons.append  # type: ignore[attr-defined]
    state = make_state([3, 4, 5])
    runner.attach(0, state)
    for _ in range(2):  # it stays lost
        with pytest.raises(RanksLost, match="layers: "):
            run_prompt(runner, state)
    assert len(reasons) == 1
    is_over.set()
    runner.close()


@pytest.mark.parametrize("compiled", ["wait", "off"])
def test_an_interrupt_in_the_midst_of_a_pass_ends_the_ranks_and_is_raised(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, compiled: str
) -> None:
    def interrupted(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks_module, "SILENCE_TIMEOUT_S", SILENCE_S)
    spec = spec_of(checkpoints["llama"], compile=compiled, tensor_parallel=2)
    runner = NativeRunner.load(spec)
    runner.model.decoder._part.eager.gather = interrupted  # type: ignore[attr-defined]
    state = make_state([3, 4, 5])
    runner.attach(0, state)
    with pytest.raises(KeyboardInterrupt):
        run_prompt(runner, state)
    with pytest.raises(RanksLost, match="layers: KeyboardInterrupt"):
        run_prompt(runner, state)
    runner.close()


def run_prompt(runner: NativeRunner, state: SequenceState) -> None:
    from tests.equivalence.models import whole_prompt

    runner.prefill([whole_prompt(0, state)])


AT_EXIT = """
import atexit, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if "rank-" in t.name]))
from quadriga import LLM
llm = LLM("quadriga-s", **{"engine.tensor_parallel": 2, "engine.compile": "off"})
"""


def test_a_program_that_closes_nothing_ends_when_its_ranks_have() -> None:
    """What gloo's threads do when Python is gone aborts the process."""
    command = [sys.executable, "-c", AT_EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=True)
    assert done.stdout == "[]\n"


def test_an_idle_engine_notices_a_silent_rank(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, is_lost = threading.Event(), threading.Event()
    obey = Part._obey

    def instead(part: Part, order: Order) -> None:
        if order.op is Op.PULSE:
            is_over.wait(60.0)
        obey(part, order)

    monkeypatch.setattr(Part, "_obey", instead)
    monkeypatch.setattr(ranks_module, "SILENCE_TIMEOUT_S", SILENCE_S)
    monkeypatch.setattr(ranks_module, "PULSE_S", 0.1)
    runner = NativeRunner.load(spec_of(checkpoints["llama"], tensor_parallel=2))
    runner.model.decoder.ranks.lost = lambda reason: is_lost.set()  # type: ignore[attr-defined]
    assert is_lost.wait(30.0)
    is_over.set()


@pytest.mark.parametrize("failure", [ConfigError("model: its file is gone"), MemoryError()])
def test_what_a_rank_cannot_load_is_said_by_the_engine(
    failure: Exception, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    init = Part.__init__

    def refuse(part: Part, spec: EngineSpec, whole: Any, shard: Any) -> None:
        if shard.rank:
            raise failure
        init(part, spec, whole, shard)

    monkeypatch.setattr(Part, "__init__", refuse)
    monkeypatch.setattr(loading, "LOAD_TIMEOUT_S", 30.0)
    said = "model: its file is gone|MemoryError"
    with pytest.raises(ConfigError, match=f"rank 1 of 2: ({said})"):
        NativeRunner.load(spec_of(checkpoints["llama"], tensor_parallel=2))


def test_ranks_that_do_not_load_are_named_after_one_deadline_for_all(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LOAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(loading.RankThreads, "start", lambda *_: None)
    with pytest.raises(ConfigError, match="of 4 ranks 1, 2, 3 did not load"):
        NativeRunner.load(spec_of(checkpoints["llama"], tensor_parallel=4))


def test_ranks_that_are_ready_wait_for_one_that_loads_for_long(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    init = Part.__init__

    def load_slowly(part: Part, spec: EngineSpec, whole: Any, shard: Any) -> None:
        init(part, spec, whole, shard)
        if shard.rank == 3:
            threading.Event().wait(1.5 * SILENCE_S)

    monkeypatch.setattr(Part, "__init__", load_slowly)
    monkeypatch.setattr(ranks_module, "SILENCE_TIMEOUT_S", SILENCE_S)
    NativeRunner.load(spec_of(checkpoints["llama"], tensor_parallel=4)).close()
