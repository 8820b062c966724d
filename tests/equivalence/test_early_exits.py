"""Tokens and exits of the engine under rebatching equal naive batch-1 early-exit inference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.checkpoint.exits import (
    NEVER,
    ExitCounters,
    ExitParams,
    ExitPolicy,
    ExitSpec,
    SkippedKV,
)
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import ManualClock
from quadriga.core.output import EngineOutput
from quadriga.core.request import SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import InvariantViolation
from quadriga.policies.baselines.exits import EagerExits, LazyExits, MajorityExits
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.policies.rebatching import Rebatcher
from tests.equivalence.early_exit_reference import (
    CONFIGS,
    LAYERS,
    EarlyExitReference,
    Generated,
    build_deep,
    save_with_exits,
)
from tests.equivalence.models import begin, make_spec, make_state, start_row, whole_prompt
from tests.equivalence.relay_models import generate
from tests.sequences import make_decode_loop, make_slots

MODES: tuple[SkippedKV, ...] = ("linear", "project", "copy", "alias", "replay")
PROMPT_LENGTHS = (1, 20, 7, 3, 12, 33, 5)
MAX_TOKENS = (14, 9, 18, 22, 5, 16, 12)
NUM_ROWS = 5
KINDS = {
    "llama": ExitSpec((2, 3), "mlp", "margin"),
    "mistral-window": ExitSpec((1, 4), "head", "top"),
    "qwen3": ExitSpec((2, 4), "shared", "margin"),
    "opt-pre-norm": ExitSpec((2, 5), "head", "margin", has_norm=False),
    "opt-post-norm-projected": ExitSpec((3, 4), "norm", "top"),
}
assert KINDS.keys() == CONFIGS.keys()
# Levels of confidence in these models at which about half of the tokens leave early.
LEVELS = {"top": (0.2, 0.3, 0.5, 0.4), "margin": (0.06, 0.12, 0.3, 0.2)}


@dataclass(slots=True)
class Family:
    """A saved random model, and what the reference has already said about it."""

    model: Any
    path: Path
    exits: ExitSpec
    known: dict[tuple[str, int, int], list[Generated]]

    def reference(
        self, mode: SkippedKV, depth: int = LAYERS, replay_newest: int = 0
    ) -> EarlyExitReference:
        return EarlyExitReference(self.model, self.path, self.exits, mode, depth, replay_newest)

    def expected(
        self, mode: SkippedKV, depth: int = LAYERS, replay_newest: int = 0
    ) -> list[Generated]:
        """The reference's answers to `states`; `alias` and `copy` have the same."""
        key = ("copy" if mode == "alias" else mode, depth, replay_newest)
        if key not in self.known:
            reference = self.reference(mode, depth, replay_newest)
            self.known[key] = [reference.generate(s) for s in states(self.exits)]
        return self.known[key]


FAMILIES: dict[str, Family] = {}


@pytest.fixture
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name: str = request.param
    if name not in FAMILIES:
        model, exits = build_deep(name), KINDS[name]
        path = save_with_exits(model, tmp_path_factory.mktemp(name), exits)
        FAMILIES[name] = Family(model, path, exits, {})
    return FAMILIES[name]


@pytest.fixture(params=["off", "wait"], ids=["eager", "kernels"])
def compile_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompt(number: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + number)
    ids: list[int] = torch.randint(3, 130, (length,), generator=generator).tolist()
    return ids


def states(exits: ExitSpec, **overrides: Any) -> list[SequenceState]:
    """Sequences of all lengths, each with a threshold of its own."""
    levels = LEVELS[exits.criterion]
    made = []
    for i, (length, max_tokens) in enumerate(zip(PROMPT_LENGTHS, MAX_TOKENS, strict=True)):
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
        params: dict[str, Any] = {"threshold": levels[i % len(levels)]}
        for key, value in overrides.items():
            (params if key in ExitParams.__slots__ else sampling)[key] = value
        state = make_state(prompt(i, length), **sampling)
        state.sequence_id, state.exits = f"s{i}", ExitParams(**params)
        made.append(state)
    return made


class Bench:
    """A prefill runner, a decode runner and its loop, and sequences that come and go."""

    def __init__(
        self,
        path: Path,
        *,
        mode: SkippedKV = "project",
        replay_newest: int = 0,
        compile: str = "off",
        exits: ExitSpec | None = None,
        depth: int = 0,
        policy: Callable[[SegmentCosts, ExitCounters], Rebatcher | None] | None = None,
    ) -> None:
        checkpoint = read_checkpoint(str(path))
        depth = depth or checkpoint.num_layers
        exits = (exits or checkpoint.exits).cut(depth)
        common = {"compile": compile, "depth": depth, "num_rows": NUM_ROWS}
        self.prefiller = NativeRunner.load(make_spec(path, exits=ExitSpec(), **common))
        self.runner = NativeRunner.load(
            make_spec(path, exits=exits, skipped_kv=mode, replay_newest=replay_newest, **common)
        )
        self.clock = ManualClock()
        self.counters = ExitCounters()
        costs = SegmentCosts(len(self.runner.segment_ends), NUM_ROWS)
        make = policy or deterministic
        self.slots = make_slots(NUM_ROWS, 96, NUM_ROWS * 96)
        self.loop = make_decode_loop(
            self.runner,
            self.slots,
            self.clock,
            rebatcher=make(costs, self.counters),
            counters=self.counters,
            criterion=exits.criterion,
            is_partial=depth < checkpoint.num_layers,
        )

    def join(self, state: SequenceState) -> None:
        """Prefill the prompt elsewhere and hand the sequence to the loop."""
        begin(self.loop, state, self.prefiller, self.runner)

    def step(self) -> list[EngineOutput]:
        self.clock.advance(0.001)
        emissions = [emission for _, emission in self.loop.step()]
        self.loop.check()
        return emissions

    def run(self, todo: Sequence[SequenceState], *, every: int = 2) -> list[EngineOutput]:
        """Run all to their ends, one joining every few steps while there is room."""
        waiting, emissions = list(todo), []
        for step in range(2000):
            if waiting and self.loop.num_running < NUM_ROWS and step % every == 0:
                self.join(waiting.pop(0))
            if not waiting and not self.loop.has_work:
                break
            emissions += self.step()
        assert not self.loop.has_work and not waiting and self.slots.num_held == 0
        return emissions


def deterministic(costs: SegmentCosts, counters: ExitCounters) -> Rebatcher:
    return DrexRebatcher(costs, counters=counters, deterministic=True)


def assert_equal(got: Sequence[SequenceState], wanted: Sequence[Generated]) -> None:
    """The same tokens at the same exits, up to the first choice that rounding could turn."""
    certain = sum(w.certain for w in wanted)
    assert certain >= 0.8 * sum(len(w.tokens) for w in wanted)
    for state, want in zip(got, wanted, strict=True):
        assert state.output_ids[: want.certain] == want.tokens[: want.certain]
        assert state.exit_layers[: want.certain] == want.depths[: want.certain]


every_family = pytest.mark.parametrize("family", list(KINDS), indirect=True)


@every_family
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_reference(family: Family, mode: SkippedKV, compile_mode: str) -> None:
    bench = Bench(family.path, mode=mode, compile=compile_mode)
    got = states(family.exits)
    bench.run(got)
    wanted = family.expected(mode)
    assert_equal(got, wanted)
    used = {depth for w in wanted for depth in w.depths[1:]}
    every = {*family.exits.layers, LAYERS}
    assert used == every or (mode == "linear" and len(used) > 1), "every exit is put to the test"
    assert bench.counters.involuntary_exits == bench.counters.involuntary_stays == 0
    assert bench.counters.breaches == 0
    assert sum(bench.counters.tokens.values()) == sum(len(s.output_ids) - 1 for s in got)


@pytest.mark.parametrize("family", ["llama", "opt-pre-norm"], indirect=True)
@pytest.mark.parametrize("mode", ["project", "linear"])
@pytest.mark.parametrize("newest", [1, 3])
def test_the_newest_skipped_positions_are_replayed(
    family: Family, mode: SkippedKV, newest: int, compile_mode: str
) -> None:
    bench = Bench(family.path, mode=mode, compile=compile_mode, replay_newest=newest)
    got = states(family.exits)
    bench.run(got)
    wanted = family.expected(mode, replay_newest=newest)
    assert_equal(got, wanted)
    without = family.expected(mode)
    assert [w.tokens for w in wanted] != [w.tokens for w in without], "it makes a difference"


@pytest.mark.parametrize("family", ["llama", "mistral-window"], indirect=True)
def test_the_other_criterion(family: Family, compile_mode: str) -> None:
    other = "top" if family.exits.criterion == "margin" else "margin"
    exits = replace(family.exits, criterion=other)
    swapped = Family(family.model, family.path, exits, {})
    bench = Bench(family.path, compile=compile_mode, exits=exits)
    got = states(exits)
    bench.run(got)
    assert_equal(got, swapped.expected("project"))


@every_family
def test_never_leaving_is_the_full_model(family: Family, compile_mode: str) -> None:
    bench = Bench(family.path, compile=compile_mode)
    got = states(family.exits, threshold=NEVER)
    bench.run(got)
    for state in got:
        wanted = generate(family.model, state.prompt_ids, state.sampling.max_tokens)
        assert state.output_ids == wanted
        assert set(state.exit_layers) == {LAYERS}
    assert bench.counters.breaches == 0


def kv_after(bench: Bench, state: SequenceState, cut: int) -> torch.Tensor:
    """KV in every layer, once the sequence's last token was made to run them all."""
    bench.join(state)
    while len(state.output_ids) < cut:
        bench.step()
    row = 0
    bench.runner.advance([row], 0, len(bench.runner.segment_ends))
    return bench.runner.read_kv(row, 0, LAYERS, 0, state.num_tokens)


@every_family
def test_alias_is_copy_to_the_bit(family: Family, compile_mode: str) -> None:
    """Confidences and logits, not only tokens: what is read where it lies is what is copied."""
    seen = []
    for mode in ("copy", "alias"):
        bench = Bench(family.path, mode=mode, compile=compile_mode)
        got = states(family.exits, num_logprobs=3)
        emissions = bench.run(got)
        seen.append([(e.sequence_id, e.token_ids, e.exit_layers, e.logprobs) for e in emissions])
    assert seen[0] == seen[1]


@every_family
def test_replay_restores_the_full_models_kv(family: Family, compile_mode: str) -> None:
    bench = Bench(family.path, mode="replay", compile=compile_mode)
    state = states(family.exits, max_tokens=40, threshold=LEVELS[family.exits.criterion][0])[1]
    kv = kv_after(bench, state, 24)
    assert min(state.exit_layers) < LAYERS
    full = NativeRunner.load(make_spec(family.path, compile=compile_mode))
    full.attach(0, state)
    full.prefill([whole_prompt(0, state)])
    wanted = full.read_kv(0, 0, LAYERS, 0, state.num_tokens)
    torch.testing.assert_close(kv, wanted, atol=1e-4, rtol=0)


@every_family
@pytest.mark.parametrize("max_depth", [1, 4, 5])
def test_max_depth(family: Family, max_depth: int) -> None:
    """A limit leaves at the deepest exit within it, the first at least, and counts breaches."""
    bench = Bench(family.path, compile="wait")
    limited = [replace(s.exits, max_depth=max_depth) for s in states(family.exits)]
    got, again = states(family.exits), states(family.exits)
    reference, wanted = family.reference("project"), list(family.expected("project"))
    for i in range(0, len(got), 2):  # the others go as deep as they like
        got[i].exits = again[i].exits = limited[i]
        wanted[i] = reference.generate(again[i])
    bench.run(got)
    assert_equal(got, wanted)
    exits = family.exits.layers
    deepest = max([k for k in exits if k <= max_depth], default=exits[0])
    assert max(max(s.exit_layers[1:]) for s in got[::2]) == deepest
    assert max(max(s.exit_layers[1:]) for s in got[1::2]) == LAYERS
    if all(w.certain == len(w.tokens) for w in wanted):
        assert bench.counters.breaches == sum(w.breaches for w in wanted) > 0


def test_an_exit_behind_every_layer(compile_mode: str, tmp_path: Path) -> None:
    """LayerSkip: "all"."""
    exits = ExitSpec(tuple(range(1, LAYERS)), "shared", "top")
    model = build_deep("llama", seed=3)
    path = save_with_exits(model, tmp_path, exits, all_layers=True)
    assert read_checkpoint(str(path)).exits.layers == exits.layers
    bench = Bench(path, compile=compile_mode)
    got = states(exits)
    bench.run(got)
    reference = EarlyExitReference(model, path, exits, "project")
    wanted = [reference.generate(s) for s in states(exits)]
    assert_equal(got, wanted)
    assert len({depth for w in wanted for depth in w.depths}) >= 4


@every_family
@pytest.mark.parametrize("deepest", ["an exit", "no exit"])
def test_partial_depth(family: Family, deepest: str, compile_mode: str) -> None:
    """The deepest head loaded is final; tokens it does not convince are breaches."""
    depth = family.exits.layers[1] + (deepest == "no exit")
    if depth == LAYERS:
        depth -= 2  # between the two exits
    bench = Bench(family.path, compile=compile_mode, depth=depth)
    got = states(family.exits, policy="bounded")
    bench.run(got)
    wanted = family.expected("project", depth)
    assert_equal(got, wanted)
    assert bench.runner.segment_ends[-1] == depth
    if all(w.certain == len(w.tokens) for w in wanted):
        assert bench.counters.breaches == sum(w.breaches for w in wanted) > 0
    assert bench.counters.involuntary_exits == 0


@pytest.mark.parametrize("family", ["llama", "opt-pre-norm"], indirect=True)
def test_sampled_tokens_penalties_and_bias(family: Family, compile_mode: str) -> None:
    """Confidence and token are taken from the processed logits; draws follow the position."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 5},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.7, "presence_penalty": 0.5},
        {"logit_bias": ((17, 4.0), (40, 3.0), (41, -100.0))},
        {},
        {"temperature": 1.3, "seed": 9, "logit_bias": ((20, 2.0),), "repetition_penalty": 0.8},
        {"num_logprobs": 2},
    ]

    def mixed() -> list[SequenceState]:
        return [states(family.exits, **way)[i] for i, way in enumerate(ways)]

    bench = Bench(family.path, compile=compile_mode)
    got = mixed()
    bench.run(got)
    reference = family.reference("project")
    wanted = [reference.generate(s) for s in mixed()]
    assert_equal(got, wanted)
    plain = family.expected("project")
    differ = [i for i, way in enumerate(ways) if wanted[i].tokens != plain[i].tokens]
    assert differ == [0, 1, 2, 3, 5], "each extra shows"


@pytest.mark.parametrize("family", ["llama", "opt-pre-norm"], indirect=True)
def test_what_a_row_is_sure_of_does_not_depend_on_its_company(family: Family) -> None:
    """Not by a bit, on the kernels: penalties beside it are the neighbour's alone."""
    confidences = []
    for company in ({}, {"repetition_penalty": 1.5}, {"temperature": 0.7, "num_logprobs": 2}):
        bench = Bench(family.path, compile="wait")
        bench.join(states(family.exits)[1])
        for state in states(family.exits, **company)[2:4] if company else ():
            bench.join(state)
        rows = list(range(bench.loop.num_running))
        confidences.append([bench.runner.advance(rows, i, i + 1)[0] for i in range(3)])
    assert confidences[0] == confidences[1] == confidences[2]


def test_logprobs_are_those_of_the_exit(compile_mode: str, tmp_path: Path) -> None:
    exits = KINDS["llama"]
    model = build_deep("llama")
    path = save_with_exits(model, tmp_path, exits)
    bench = Bench(path, compile=compile_mode)
    got = states(exits, num_logprobs=2)
    reports: dict[str, list[Any]] = {s.sequence_id: [] for s in got}
    for emission in bench.run(got):
        reports[emission.sequence_id] += emission.logprobs or []
    reference = EarlyExitReference(model, path, exits, "project")
    for state, again in zip(got, states(exits), strict=True):
        want = reference.generate(again)
        report = reports[state.sequence_id]
        assert [r.token_id for r in report] == state.output_ids[1:]
        for found, logprob, _ in zip(report, want.logprobs[1:], range(want.certain), strict=False):
            assert math.isclose(found.logprob, logprob, abs_tol=1e-3)
            assert found.top[0] == (found.token_id, found.logprob) and len(found.top) == 2


POLICIES: dict[str, Any] = {
    "drex": lambda costs, counters: DrexRebatcher(costs, counters=counters),
    "surveyed": lambda costs, counters: DrexRebatcher(costs, counters=counters, survey_every=2),
    "lazy": lambda costs, _: LazyExits(costs),
    "eager": lambda costs, _: EagerExits(costs),
    "majority": lambda costs, _: MajorityExits(costs),
    "none": lambda _costs, _counters: None,
}


@every_family
@pytest.mark.parametrize("asks", ["strict", "bounded"])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_whoever_decides_the_tokens_are_right(
    family: Family, policy: str, asks: ExitPolicy
) -> None:
    """Every token is the best at the exit on its record, with the KV that record implies; a strict
    one is sure there, whoever else leaves."""
    for mode in ("project", "alias"):
        bench = Bench(family.path, mode=mode, compile="wait", policy=POLICIES[policy])
        got = states(family.exits, policy=asks)
        bench.run(got)
        below = asks == "bounded" and policy in ("eager", "majority")
        reference = family.reference(mode)
        ties = sum(reference.check(s, may_be_below=below) for s in got)
        assert ties <= 1
        depths = {depth for s in got for depth in s.exit_layers[1:]}
        if policy == "none":
            assert depths == {LAYERS}
        if not below:
            assert bench.counters.involuntary_exits == 0


def test_a_pass_is_of_one_decoder_and_an_exit_of_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that become ready while layers are made up for; a prompt between an exit and emit."""
    path = save_with_exits(build_deep("llama"), tmp_path, KINDS["llama"])
    spec = make_spec(path, compile="wait", num_rows=2, skipped_kv="project")
    runner = NativeRunner.load(replace(spec, exits=spec.checkpoint.exits))
    model = runner.model
    start_row(runner, 0, make_state([5, 6, 7]))
    kernels = iter([model._eager, model.fastest()])

    def fastest() -> Any:
        model.decoder = next(kernels, model.decoder)
        return model.decoder

    monkeypatch.setattr(type(model), "fastest", lambda _: fastest())
    monkeypatch.setattr(runner.skipped, "may_owe", True)
    monkeypatch.setattr(NativeRunner, "_repay_before", lambda *_: fastest())
    assert len(runner.decode([0])) == 1
    runner.advance([0], 0, 1)
    start_row(runner, 1, make_state([9]))
    with pytest.raises(InvariantViolation, match="not all at the exit"):
        runner.emit([0])
