"""A model that gains and loses layers while it decodes says what its exit record says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quadriga.catalogue.headers import SINGLE_FILE
from quadriga.checkpoint.exits import ExitCounters, ExitParams, ExitPolicy, ExitSpec, SkippedKV
from quadriga.clock import ManualClock
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError, DeadlineExceeded, KVCacheExhausted
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.scheduling.depth import REPAY_TOKENS
from quadriga.scheduling.transfer.handoff import LeaseTable
from quadriga.scheduling.transfer.rebuild import chunk_of, num_prefill_tokens, replays_of
from tests.equivalence.early_exit_reference import (
    LAYERS,
    TIE,
    EarlyExitReference,
    Generated,
    build_deep,
    save_with_exits,
)
from tests.equivalence.models import make_spec, make_state, whole_prompt
from tests.equivalence.moving import move
from tests.equivalence.paged import load_on_pages
from tests.sequences import make_decode_loop, make_slots

NUM_ROWS = 6
EXITS = ExitSpec((1, 3), "norm", "top")
HEADS = ExitSpec((1, 3), "head", "margin")
SHARED = ExitSpec((1, 3), "shared", "top")
FAMILIES = {"llama": EXITS, "opt-post-norm-projected": HEADS, "qwen3": SHARED}
MODES: list[SkippedKV] = ["replay", "project", "linear", "copy", "alias"]
LEVEL = {"top": 0.5, "margin": 0.2}
MODELS: dict[str, tuple[torch.nn.Module, Path]] = {}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    name: str = request.param
    if name not in MODELS:
        model = build_deep(name)
        MODELS[name] = model, save_with_exits(model, tmp_path_factory.mktemp(name), FAMILIES[name])
    return name


def reference(name: str, mode: SkippedKV, newest: int = 0) -> EarlyExitReference:
    (model, path), exits = MODELS[name], FAMILIES[name]
    return EarlyExitReference(model, path, exits, mode, LAYERS, newest)  # type: ignore[arg-type]


@cache
def strict_answers(name: str, mode: SkippedKV) -> list[Generated]:
    """The reference's answers to strict sequences of 14 tokens."""
    return [reference(name, mode).generate(s) for s in states(name, "strict", 14)]


class Bench:
    """A decode replica whose depth changes, and a full-depth one that prefills."""

    def __init__(
        self,
        path: Path,
        depth: int,
        *,
        mode: SkippedKV = "replay",
        compile: str = "off",
        keep_tokens: int = 256,
        replay_newest: int = 0,
        load: Callable[[EngineSpec], NativeRunner] = NativeRunner.load,
    ) -> None:
        spec = make_spec(path, depth=depth, num_rows=NUM_ROWS, compile=compile, skipped_kv=mode)
        plan = spec.checkpoint.exits
        spec = replace(
            spec,
            exits=plan.cut(depth),
            exit_plan=plan,
            keep_tokens=keep_tokens,
            replay_newest=replay_newest,
            kv_memory_bytes=NUM_ROWS * 96 * spec.checkpoint.kv_bytes_per_token(LAYERS, 4),
        )
        self.runner = load(spec)
        whole = make_spec(path, compile=compile, skipped_kv=mode, replay_newest=replay_newest)
        self.prefiller = NativeRunner.load(replace(whole, exits=plan, exit_plan=plan))
        self.clock, self.counters = ManualClock(), ExitCounters()
        costs = SegmentCosts(len(self.runner.segment_ends), NUM_ROWS)
        self.loop = make_decode_loop(
            self.runner,
            make_slots(NUM_ROWS, 96, NUM_ROWS * 96),
            self.clock,
            rebatcher=DrexRebatcher(costs, counters=self.counters, deterministic=True),
            counters=self.counters,
            criterion=plan.criterion,
            is_partial=depth < LAYERS,
        )
        self.table = LeaseTable(spec.depth_class, any_depth=True, max_live=99)

    def join(self, state: SequenceState, depth: int = LAYERS) -> None:
        """Prefill elsewhere, or rebuild; `depth` layers of the KV are sent."""
        stop, replays = num_prefill_tokens(state), replays_of(self.prefiller.spec)
        chunk = chunk_of(state, row=0, start=0, stop=stop, num_layers=LAYERS, replays=replays)
        self.prefiller.attach(0, state)
        token = self.prefiller.prefill([chunk])[0]
        slot = self.loop.reserve(state.sequence_id, state.max_total_tokens)
        kv = self.prefiller.read_kv(0, 0, depth, 0, stop)
        self.runner.write_kv(slot.row, 0, 0, kv)  # what is not loaded here is left out
        self.prefiller.detach(0)
        if token is not None:
            state.output_ids.append(token.token_id)
            state.exit_layers.append(token.exit_layer)
        self.loop.join(state, depth=depth)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.advance(0.001)
            self.loop.step()
            self.loop.check()

    def go(self, depth: int) -> None:
        if depth > self.runner.num_layers:
            with self.runner.prepare_depth(depth, timeout_s=60.0) as prepared:
                self.loop.take_depth(prepared)
        elif depth < self.runner.num_layers:
            assert not self.loop.drop_to(depth).blocked_by
        self.table.follow(self.runner.spec.depth_class)
        self.loop.check()
        assert self.runner.num_layers == depth
        assert self.runner.segment_ends[-1] == depth

    def finish(self) -> None:
        for _ in range(2000):
            if not self.loop.has_work:
                return
            self.step()
        raise AssertionError("the sequences did not end")


def states(name: str, policy: ExitPolicy = "bounded", max_tokens: int = 40) -> list[SequenceState]:
    level = LEVEL[FAMILIES[name].criterion]
    made = []
    for i in range(5):
        generator = torch.Generator().manual_seed(50 + i)
        ids = torch.randint(3, 130, (3 + 9 * i,), generator=generator).tolist()
        state = make_state(ids, max_tokens=max_tokens, ignore_eos=True)
        state.sequence_id = f"s{i}"
        state.exits = ExitParams((level, 0.9, 0.15)[i % 3], policy)
        made.append(state)
    return made


def check(of: EarlyExitReference, got: Sequence[SequenceState], prompt_depth: int) -> None:
    """Every token is the best at the exit it left at, over the KV that the record describes."""
    num_tokens = num_ties = 0
    for state in got:
        ids = state.prompt_ids + state.output_ids
        depths = [prompt_depth] * len(state.prompt_ids) + state.exit_layers[1:] + [LAYERS]
        seen = of.hidden(ids, depths)
        for i, (token, depth) in enumerate(zip(state.output_ids, state.exit_layers, strict=True)):
            if i == 0:
                continue  # the prefill replica's
            logits = of.logits(seen[depth - 1][len(state.prompt_ids) + i - 1], depth)
            gap = (logits.max() - logits[token]).item()
            assert gap <= TIE, f"token {i} of {state.sequence_id} at {depth}: {gap:.2g} below"
            num_tokens, num_ties = num_tokens + 1, num_ties + (gap > 0)
    assert num_ties <= 0.02 * num_tokens


compiled = pytest.mark.parametrize("compile", ["off", "wait"], ids=["eager", "kernels"])


@compiled
@pytest.mark.parametrize("mode", MODES)
def test_grown_while_decoding(family: str, mode: SkippedKV, compile: str) -> None:
    """1 → 3 → all layers, with sequences that come before, between and after."""
    bench = Bench(MODELS[family][1], 1, mode=mode, compile=compile)
    todo = states(family)
    for state in todo[:3]:
        bench.join(state)
    bench.step(9)
    bench.go(3)
    early = [len(s.output_ids) for s in todo[:3]]
    bench.step(12)
    bench.go(LAYERS)
    bench.join(todo[3])
    bench.join(todo[4])
    bench.finish()
    old, new = todo[:3], todo[3:]
    for state, count in zip(old, early, strict=True):
        assert set(state.exit_layers[1:count]) == {1}
    assert {1, 3, LAYERS} <= {k for s in old for k in s.exit_layers[1:]}, "they all went deeper"
    is_stateless = mode in ("copy", "alias")
    check(reference(family, mode), old, 1 if is_stateless else LAYERS)
    check(reference(family, mode), new, LAYERS)
    assert (bench.loop.depth.num_repayments > 0) is not is_stateless
    assert bench.loop.slots.num_held == 0


@pytest.mark.parametrize(("keep_tokens", "compile"), [(0, "wait"), (5, "off"), (256, "wait")])
@pytest.mark.parametrize(
    ("mode", "newest"),
    [("replay", 0), ("project", 0), ("linear", 0), ("project", 2), ("linear", 5)],
)
def test_shrunk_and_grown_again(
    family: str, mode: SkippedKV, newest: int, keep_tokens: int, compile: str
) -> None:
    """What was computed deep before is computed again as deep, kept states or not."""
    bench = Bench(
        MODELS[family][1],
        LAYERS,
        mode=mode,
        compile=compile,
        keep_tokens=keep_tokens,
        replay_newest=newest,
    )
    todo = states(family)
    for state in todo:
        bench.join(state)
    for depth in (3, LAYERS, 1, 3, 1, LAYERS, 3, 1, LAYERS):
        bench.step(7)
        bench.go(depth)
    bench.finish()
    assert {1, 3, LAYERS} == {k for s in todo for k in s.exit_layers[1:]}
    check(reference(family, mode, newest), todo, LAYERS)
    assert bench.loop.batch.num_depth_changes == 9 and bench.counters.involuntary_exits == 0


@pytest.mark.parametrize("mode", ["replay", "project"])
def test_layers_that_come_later_are_reached_a_few_tokens_behind_a_piece(
    family: str, mode: SkippedKV
) -> None:
    """Two of the newest positions go with a later token where states are not filled by replay."""
    bench = Bench(MODELS[family][1], 3, mode=mode, replay_newest=2)
    state = make_state([3 + i for i in range(REPAY_TOKENS + 1)], max_tokens=8, ignore_eos=True)
    state.exits = ExitParams(0.999, "strict")
    bench.join(state)
    bench.go(LAYERS)
    bench.step(60)
    assert len(state.output_ids) == 8 and state.exit_layers[-1] == LAYERS


@pytest.mark.parametrize(("mode", "newest"), [("project", 2), ("linear", 5)])
def test_tokens_that_no_depth_changes_are_those_of_an_undisturbed_replica(
    family: str, mode: SkippedKV, newest: int
) -> None:
    """Of strict and limited sequences, with skipped positions run again: resized, and rebuilt."""
    disturbed, undisturbed = (
        Bench(
            MODELS[family][1],
            depth,
            mode=mode,
            compile="wait",
            keep_tokens=7,
            replay_newest=newest,
        )
        for depth in (3, LAYERS)
    )
    todo, wanted = states(family, "strict", 50), states(family, "strict", 50)
    for state, alone in zip(todo, wanted, strict=True):
        if len(state.prompt_ids) % 2:
            limited = ExitParams(state.exits.threshold, "bounded", max_depth=3)
            state.exits = alone.exits = limited
        disturbed.join(state)
        undisturbed.join(alone)
    undisturbed.finish()
    assert {1, 3, LAYERS} == {k for s in wanted for k in s.exit_layers[1:]}
    disturbed.step(40)
    disturbed.go(LAYERS)
    for _ in range(6):
        disturbed.step(11)
        for state in list(disturbed.loop.running):
            disturbed.loop.leave(state.sequence_id)
            disturbed.join(state)
    disturbed.finish()
    for state, alone in zip(todo, wanted, strict=True):
        assert state.output_ids == alone.output_ids, state.sequence_id
        assert state.exit_layers == alone.exit_layers, state.sequence_id
    assert disturbed.loop.depth.num_repayments > 0


@compiled
@pytest.mark.parametrize("mode", ["replay", "project", "linear"])
def test_strict_sequences_wait_for_layers(family: str, mode: SkippedKV, compile: str) -> None:
    """They say what they say on a replica that has had all layers from the start."""
    bench = Bench(MODELS[family][1], 1, mode=mode, compile=compile)
    todo = states(family, "strict", 14)
    for state in todo:
        bench.join(state)
    for depth in (3, LAYERS):
        bench.finish()
        waiting = bench.loop.depth.needs_deeper
        assert {s.sequence_id for s in waiting} == {s.sequence_id for s in bench.loop.running}
        assert waiting and not bench.loop.has_work
        if depth == LAYERS:
            blocked = bench.loop.drop_to(1).blocked_by
            assert set(blocked) == {s.sequence_id for s in waiting}
        bench.go(depth)
    bench.finish()
    assert not bench.loop.running and bench.counters.breaches == 0
    want = strict_answers(family, mode)
    assert sum(w.certain for w in want) >= 0.8 * sum(len(w.tokens) for w in want)
    for state, w in zip(todo, want, strict=True):
        assert state.output_ids[: w.certain] == w.tokens[: w.certain]
        assert state.exit_layers[: w.certain] == w.depths[: w.certain]


@pytest.mark.parametrize("mode", ["replay", "project", "linear"])
def test_strict_sequences_escalate(family: str, mode: SkippedKV) -> None:
    """Parked on a shallow replica, they go on from their hidden state on a deeper one."""
    path = MODELS[family][1]
    replicas = [Bench(path, depth, mode=mode, compile="wait") for depth in (1, 3, LAYERS)]
    todo = states(family, "strict", 14)
    for state in todo:
        replicas[0].join(state)
    num_moves = 0
    for source, target in pairwise(replicas):
        source.finish()
        for state in source.loop.depth.needs_deeper:
            moved, _ = move(source, target, state.sequence_id)
            todo[todo.index(state)] = moved
            num_moves += 1
        assert source.loop.slots.num_held == 0
    replicas[-1].finish()
    assert num_moves >= len(todo)
    assert sum(b.counters.breaches for b in replicas) == 0
    want = strict_answers(family, mode)
    for state, w in zip(todo, want, strict=True):
        assert len(state.output_ids) == 14
        assert state.output_ids[: w.certain] == w.tokens[: w.certain]
        assert state.exit_layers[: w.certain] == w.depths[: w.certain]


@pytest.mark.parametrize("mode", ["replay", "project"])
def test_bounded_sequences_move_down_and_up(family: str, mode: SkippedKV) -> None:
    path = MODELS[family][1]
    deep, shallow = (Bench(path, depth, mode=mode, compile="wait") for depth in (LAYERS, 3))
    todo = states(family)
    for state in todo:
        deep.join(state)
    for source, target in ((deep, shallow), (shallow, deep), (deep, shallow), (shallow, deep)):
        source.step(11)
        for state in list(source.loop.running):
            moved, _ = move(source, target, state.sequence_id)
            todo[todo.index(state)] = moved
    deep.finish()
    assert {1, 3, LAYERS} == {k for s in todo for k in s.exit_layers[1:]}
    check(reference(family, mode), todo, LAYERS)


@pytest.mark.parametrize("mode", ["replay", "project"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "pages"])
def test_prefilled_shallower_than_it_decodes(family: str, mode: SkippedKV, is_paged: bool) -> None:
    """KV of one layer came; the others are made up for before the first deep pass."""
    load = load_on_pages if is_paged else NativeRunner.load
    bench = Bench(MODELS[family][1], LAYERS, mode=mode, load=load)
    todo = states(family)
    for state in todo:
        bench.join(state, depth=1)
    bench.finish()
    assert {1, 3, LAYERS} == {k for s in todo for k in s.exit_layers[1:]}
    check(reference(family, mode), todo, LAYERS)
    assert bench.loop.depth.num_repayments > 0
    if is_paged:
        with pytest.raises(ConfigError, match="an engine on a GPU keeps the 6 layers"):
            bench.runner.prepare_depth(LAYERS)
        with pytest.raises(ConfigError, match="an engine on a GPU keeps the 6 layers"):
            bench.loop.drop_to(1)


def test_paused_and_at_rest_through_changes(family: str) -> None:
    """In host memory, or reserved and half way here, while the depth changes."""
    bench = Bench(MODELS[family][1], LAYERS, mode="replay", compile="wait")
    todo = states(family)
    for state in todo[:4]:
        bench.join(state)
    for turn, depth in enumerate((1, 3, LAYERS, 3, LAYERS, 1, LAYERS)):
        bench.step(3)
        if turn == 2:
            slot = bench.loop.reserve("late", 80)  # comes with the layers there were then
        running = bench.loop.running
        bench.loop.preemption.pause(running[turn % len(running)].sequence_id)
        bench.go(depth)
    late = replace(todo[4], sequence_id="late")
    bench.prefiller.attach(0, late)
    token = bench.prefiller.prefill([whole_prompt(0, late)])[0]
    assert token is not None
    kv = bench.prefiller.read_kv(0, 0, 1, 0, len(late.prompt_ids))  # the rest was let go
    bench.prefiller.detach(0)
    bench.runner.write_kv(slot.row, 0, 0, kv)
    late.output_ids, late.exit_layers = [token.token_id], [token.exit_layer]
    bench.loop.join(late)
    bench.finish()
    assert bench.loop.preemption.num_pauses > 4
    check(reference(family, "replay"), [*todo[:4], late], LAYERS)


def damage(path: Path, how: str) -> None:
    file = path / SINGLE_FILE
    if how == "truncated":
        data = file.read_bytes()
        file.unlink()  # the engine has the old file mapped
        file.write_bytes(data[: len(data) * 2 // 3])
        return
    tensors = load_file(file)
    name = "model.layers.4.mlp.down_proj.weight"
    if how == "missing":
        del tensors[name]
    elif how == "misshapen":
        tensors[name] = tensors[name][:-1].contiguous()
    else:
        tensors[name] = tensors[name].clone()
        tensors[name][3, 5] = float("nan" if how == "NaN" else "inf")
    file.unlink()
    save_file(tensors, file)


@pytest.mark.parametrize("how", ["NaN", "infinity", "missing", "misshapen", "truncated"])
def test_bad_weights_leave_the_old_depth_serving(how: str, tmp_path: Path) -> None:
    model = build_deep("llama")
    path = save_with_exits(model, tmp_path, EXITS)
    MODELS["llama"] = model, path
    bench = Bench(path, 3, mode="replay")
    todo = states("llama")
    for state in todo:
        bench.join(state)
    bench.step(5)
    good = (path / SINGLE_FILE).read_bytes()
    damage(path, how)
    words = {"NaN": "NaN or infinity", "infinity": "NaN or infinity", "misshapen": "has shape"}
    with pytest.raises(ConfigError, match=words.get(how, r"model\.layers\.4|cannot be read")):
        bench.runner.prepare_depth(LAYERS)
    bench.step(5)
    assert bench.runner.num_layers == 3
    (path / SINGLE_FILE).unlink()
    (path / SINGLE_FILE).write_bytes(good)
    bench.go(LAYERS)
    bench.finish()
    del MODELS["llama"]
    check(EarlyExitReference(model, path, EXITS, "replay", LAYERS), todo, LAYERS)


def test_freed_memory_holds_more_sequences(tmp_path: Path) -> None:
    """KV of layers that go, and the layers' own weights."""
    path = save_with_exits(build_deep("llama"), tmp_path, EXITS)
    bench = Bench(path, LAYERS)
    spec = bench.runner.spec
    room = replace(spec, num_rows=64, kv_capacity_tokens=96, kv_memory_bytes=None)
    runner = NativeRunner.load(room)
    width = spec.checkpoint.kv_bytes_per_token(1, 4)
    weights = runner.weights.layers[0].nbytes
    for depth in (3, 1):
        runner.drop_to(depth)
        memory = 96 * LAYERS * width + (LAYERS - depth) * weights
        assert runner.kv_capacity_tokens == min(memory // (depth * width), 64 * 96) > 96
    with runner.prepare_depth(LAYERS) as prepared:
        runner.take_depth(prepared)
    assert runner.kv_capacity_tokens == 96
    bench.loop.slots.resize(96)
    bench.loop.reserve("a", 96)
    with pytest.raises(KVCacheExhausted):
        bench.loop.reserve("b", 96)
    bench.go(1)
    assert bench.loop.slots.kv_capacity_tokens == NUM_ROWS * 96
    for name in "bcdef":
        bench.loop.reserve(name, 96)
    with bench.runner.prepare_depth(LAYERS) as prepared:
        bench.loop.take_depth(prepared)


def test_loading_ends_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gave_up = threading.Event()

    def endless(*args: Any) -> None:
        is_over = args[-1]
        while not is_over():
            time.sleep(1e-3)
        gave_up.set()

    path = save_with_exits(build_deep("llama"), tmp_path, EXITS)
    monkeypatch.setattr("quadriga.engine.loaded_model._load", endless)
    with pytest.raises(DeadlineExceeded, match=r"not loaded in 0\.05 s"):
        Bench(path, 3).runner.prepare_depth(LAYERS, timeout_s=0.05)
    assert gave_up.wait(60), "the thread learns that nobody waits for it"


def test_what_is_refused(tmp_path: Path) -> None:
    path = save_with_exits(build_deep("llama"), tmp_path, EXITS)
    bench = Bench(path, 3)
    runner = bench.runner
    for depth in (2, 5, 7, 3, 1):
        with pytest.raises(ConfigError, match=rf"cannot load more to {depth}; possible are 6"):
            runner.prepare_depth(depth)
    for depth in (0, 2, 6):
        with pytest.raises(ConfigError, match=rf"cannot drop to fewer to {depth}; possible are 1"):
            runner.drop_to(depth)
    prepared = runner.prepare_depth(LAYERS)
    bench.go(1)
    with pytest.raises(ConfigError, match="made for 3 layers; this engine holds 1"):
        bench.loop.take_depth(prepared)
    prepared.close()
    with pytest.raises(ConfigError, match="closed"):
        bench.loop.take_depth(prepared)
    odd = NativeRunner.load(replace(runner.spec, depth=2, exits=EXITS.cut(2), exit_plan=EXITS))
    with pytest.raises(ConfigError, match="2 layers are no exit"):
        odd.prepare_depth(3)
    small = replace(
        runner.spec, depth=1, exits=EXITS.cut(1), kv_capacity_tokens=96, kv_memory_bytes=None
    )
    with pytest.raises(ConfigError, match=r"holds 32 tokens of .* less than one sequence of 96"):
        NativeRunner.load(small).prepare_depth(3)
