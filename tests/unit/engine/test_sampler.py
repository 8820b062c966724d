"""The batched sampler against one-row-at-a-time reference implementations in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.core.grammar import Grammar
from quadriga.core.request import SequenceState
from quadriga.engine import sampler
from quadriga.engine.kernels.build import build_library, has_compiler
from quadriga.engine.kernels.library import KernelLibrary
from quadriga.engine.random import uniforms
from quadriga.engine.sampler import (
    RowSampler,
    ban,
    choose,
    invert_cdf,
    process,
    sample,
    token_logprobs,
    unpacked,
)
from quadriga.files import cache_folder
from quadriga.text.grammar import allowed, grammars_of
from tests.equivalence.models import make_state

VOCAB = 60
EOS = (2, 5)


def row(prompt: list[int], output: list[int] | None = None, **sampling: Any) -> RowSampler:
    state = make_state(prompt, **sampling)
    state.output_ids = list(output or [])
    return RowSampler(state, VOCAB, EOS)


def logits_for(rows: int, *, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def reference_processed(logits: list[float], state: SequenceState) -> list[float]:
    p = state.sampling
    out = list(logits)
    for token, bias in p.logit_bias:
        out[token] += bias
    if len(state.output_ids) < p.min_tokens:
        for token in (*p.stop_token_ids, *(() if p.ignore_eos else EOS)):
            out[token] = -math.inf
    for token in range(VOCAB):
        if token in state.prompt_ids or token in state.output_ids:
            value = out[token]
            out[token] = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        count = state.output_ids.count(token)
        out[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return out


def reference_probs(processed: list[float], state: SequenceState) -> list[float]:
    p = state.sampling
    scaled = [x / p.temperature for x in processed]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    kept = {i for i, w in enumerate(weights) if w > 0 and w >= p.min_p}
    ranked = sorted(kept, key=lambda i: (-weights[i], i))
    if p.top_k:
        ranked = ranked[: p.top_k]
    total = sum(weights[i] for i in ranked)
    nucleus, mass = [], 0.0
    for i in ranked:
        if nucleus and mass >= p.top_p and p.top_p < 1:
            break
        nucleus.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(VOCAB)]


def reference_draw(probs: list[float], state: SequenceState) -> int:
    u = uniforms([state.sampling.seed], [state.choice], [state.num_tokens])[0]
    mass = 0.0
    for token, p in enumerate(probs):
        mass += p
        if mass > u:
            return token
    raise AssertionError("the probabilities do not sum to one")


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.0001},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.8, "repetition_penalty": 1.7},
    {"temperature": 1.1, "presence_penalty": 1.2, "frequency_penalty": 0.7},
    {"temperature": 1.0, "presence_penalty": -1.0, "repetition_penalty": 0.6},
    {"temperature": 1.0, "logit_bias": ((3, 4.0), (9, -100.0))},
    {"temperature": 1.0, "min_tokens": 50, "stop_token_ids": (11, 12)},
    {"temperature": 1.0, "min_tokens": 50, "ignore_eos": True, "stop_token_ids": (11,)},
    {"temperature": 1.0, "min_tokens": 2, "stop_token_ids": (11,)},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": ((3, 40.0),)},
    {"temperature": 0.0, "min_tokens": 50},
]


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_reference_in_one_mixed_batch(seed: int) -> None:
    """All parameter sets at once, over several positions, with outputs that grow."""
    rows = [
        row([1, 3, 3, 8 + i], [3, 4, 4], seed=1000 * seed + i, **parameters)
        for i, parameters in enumerate(PARAMETERS)
    ]
    for step in range(4):
        logits = logits_for(len(rows), seed=17 * seed + step)
        wanted = []
        for i, r in enumerate(rows):
            processed = reference_processed(logits[i].double().tolist(), r.state)
            if r.params.greedy:
                wanted.append(int(np.argmax(processed)))
            else:
                wanted.append(reference_draw(reference_probs(processed, r.state), r.state))
        got = [t.token_id for t in sample(logits, rows, 3)]
        assert got == wanted
        for r, token in zip(rows, got, strict=True):
            r.state.output_ids.append(token)


def test_a_seeded_draw_does_not_depend_on_the_batch() -> None:
    rows = [row([i, 2], seed=i, temperature=1.0, top_p=0.9) for i in range(12)]
    logits = logits_for(12, seed=5)
    together = [t.token_id for t in sample(logits.clone(), rows, 1)]
    backwards = [t.token_id for t in sample(logits.flip(0).clone(), rows[::-1], 1)][::-1]
    alone = [sample(logits[i : i + 1].clone(), [r], 1)[0].token_id for i, r in enumerate(rows)]
    assert together == backwards == alone


def test_choices_of_one_request_differ() -> None:
    rows = [row([1], seed=9, temperature=1.0) for _ in range(16)]
    for choice, r in enumerate(rows):
        r.state.choice = choice
    assert len({t.token_id for t in sample(torch.zeros(16, VOCAB), rows, 1)}) > 10


def test_draws_follow_the_distribution() -> None:
    n = 8000
    logits = logits_for(1, seed=2)
    rows = [row([1], seed=s, temperature=1.0) for s in range(n)]
    tokens = [t.token_id for t in sample(logits.repeat(n, 1), rows, 1)]
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = torch.softmax(logits[0].double(), -1).numpy() * n
    big = expected > 5
    chi2 = ((counts[big] - expected[big]) ** 2 / expected[big]).sum()
    assert chi2 < big.sum() + 4 * math.sqrt(2 * big.sum())


def test_plain_rows_take_the_raw_maximum() -> None:
    assert row([1]).is_plain
    assert not row([1], num_logprobs=0).is_plain
    assert not row([1], min_tokens=1).is_plain
    assert not row([1], temperature=0.5).is_plain


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-46, 1e-38, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    for seed in range(4):
        logits = logits_for(1, seed=seed)
        drawn = sample(logits.clone(), [row([1], temperature=temperature, seed=seed)], 1)
        assert drawn[0].token_id == int(logits.argmax())


@pytest.mark.parametrize("penalty", [1e-300, 5e-324, 1e-38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_a_float_cannot_hold_prefers_what_was_seen(
    penalty: float, temperature: float
) -> None:
    asked = row(
        [7, 9],
        [11],
        repetition_penalty=penalty,
        temperature=temperature,
        min_tokens=3,
        num_logprobs=2,
    )
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, [7, 9, 11]] = torch.tensor([3.0, 4.0, 2.0])
    logits[0, EOS[0]] = 9.0
    token = sample(logits, [asked], 1)[0]
    assert token.token_id == 9, "of those seen, the most probable"
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(0.0)
    assert all(math.isfinite(value) for _, value in token.logprob.top)


def truncated_rows(seed: int) -> tuple[list[RowSampler], torch.Tensor]:
    """Ties, cut-offs between them, and nuclei of nearly all tokens; [n, vocab], row maximum 0."""
    asked: list[dict[str, Any]] = [
        {"top_p": 0.4},
        {"top_p": 0.97},
        {"top_p": 1e-9},
        {"top_p": 1.0 - 1e-12},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 7, "top_p": 0.6},
        {"top_k": 59, "top_p": 0.99},
        {"min_p": 0.2, "top_p": 0.9},
        {"min_p": 1.0, "top_k": 5},
        {"min_p": 0.05},
        {},
    ]
    rows = [row([1], temperature=1.0, **more) for more in asked]
    logits = (logits_for(len(rows), seed=seed) * 2).round() / 2
    return rows, logits - logits.max(dim=-1, keepdim=True).values


@pytest.mark.parametrize("seed", range(6))
def test_the_best_alone_are_what_a_whole_sort_leaves(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "FIRST_RANKED", 4)
    rows, scaled = truncated_rows(seed)
    whole = sampler._truncate(scaled.clone(), rows)
    monkeypatch.setattr(sampler, "WHOLE_SORT", 0)
    assert torch.equal(sampler._truncate(scaled.clone(), rows), whole)


def test_many_biases_cost_a_token_no_more_than_one() -> None:
    """A request that names a thousand must not hold up the batch it is in."""
    r = row([1], [4], logit_bias=tuple((i, 0.5 if i != 7 else 9.0) for i in range(VOCAB)))
    logits = logits_for(1, seed=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        processed = logits.clone()
        assert process(processed, [r]) == [0]
    assert sum(event.count for event in profiler.key_averages()) < VOCAB
    wanted = logits + 0.5
    wanted[0, 7] = logits[0, 7] + 9.0
    torch.testing.assert_close(processed, wanted)


def test_logprobs_are_of_the_processed_distribution() -> None:
    r = row([1], [4], temperature=0.7, num_logprobs=3, presence_penalty=2.0, seed=4)
    logits = logits_for(1, seed=6)
    processed = torch.tensor(reference_processed(logits[0].double().tolist(), r.state))
    wanted = torch.log_softmax(processed, -1)
    token = sample(logits, [r], 1)[0]
    assert token.logprob is not None
    assert token.logprob.token_id == token.token_id
    assert token.logprob.logprob == pytest.approx(float(wanted[token.token_id]), abs=1e-5)
    best = torch.topk(wanted, 3)
    assert [i for i, _ in token.logprob.top] == best.indices.tolist()
    assert [v for _, v in token.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_without_alternatives() -> None:
    report = token_logprobs(logits_for(2, seed=1), [3, 4], 0)
    assert [r.top for r in report] == [(), ()]
    assert [r.token_id for r in report] == [3, 4]


def test_inverse_cdf_never_picks_what_has_no_probability() -> None:
    probs = np.array([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for u, wanted in [(0.0, 1), (0.2499, 1), (0.25, 3), (1 - 2**-53, 3)]:
        assert invert_cdf(probs, np.array([u])) == [wanted]


def test_bans_outlive_nothing() -> None:
    """With min_tokens reached, end tokens are possible again."""
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, EOS[0]] = 5.0
    early = row([1], [4], temperature=0.0, min_tokens=2)
    late = row([1], [4, 4], temperature=0.0, min_tokens=2)
    assert sample(logits.clone(), [early], 1)[0].token_id not in EOS
    assert sample(logits.clone(), [late], 1)[0].token_id == EOS[0]


@pytest.mark.parametrize("by", ["torch", "kernels"])
@pytest.mark.parametrize("vocab_size", [8, 37, 614])
def test_tokens_whose_bit_is_not_set_are_banned(
    vocab_size: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the bits are unpacked there, which this compares with what hosts do."""
    if by == "kernels" and not has_compiler():
        pytest.skip("no C++ compiler")
    library = KernelLibrary(build_library(cache_folder())) if by == "kernels" else None
    monkeypatch.setattr(KernelLibrary, "loaded", library)
    rng = np.random.default_rng(5)
    kept = rng.random((3, vocab_size)) < [[0.02], [0.5], [0.98]]
    bits = np.packbits(np.pad(kept, ((0, 0), (0, -vocab_size % 32))), axis=1, bitorder="little")
    logits = torch.from_numpy(rng.standard_normal((3, vocab_size), dtype=np.float32))
    wanted = torch.from_numpy(np.where(kept, logits.numpy(), -np.inf))
    assert torch.equal(unpacked(torch.from_numpy(bits), vocab_size), torch.from_numpy(kept))
    ban(logits, bits)
    assert torch.equal(logits, wanted)


def test_the_best_token_that_a_form_allows_is_found_with_few_masks() -> None:
    """Of greedy rows the best token is looked at alone: the answer is that of masked logits."""
    grammars = grammars_of(read_checkpoint("quadriga-s"))
    item = {"type": "string", "maxLength": 3, "pattern": "^[a-z ]*$"}
    form = Grammar.json_schema({"type": "array", "items": {"anyOf": [item, {"enum": ["a", 7]}]}})
    (end,), vocab_size = grammars.end_ids, grammars.vocab_size
    rng, said, num_unmasked = np.random.default_rng(4), list[int](), 0
    for _ in range(40):
        logits = torch.from_numpy(rng.standard_normal((5, vocab_size), dtype=np.float32))
        bits, _ = allowed([(grammars.matcher(form), said)])
        may = np.flatnonzero(np.unpackbits(bits[0], count=vocab_size, bitorder="little"))
        logits[1, rng.choice(may)] = logits[2, end] = 9.0
        logits[3, int(rng.integers(vocab_size))] = math.nan
        logits[4] = math.inf
        state = make_state([1], temperature=0.0, grammar=form)
        state.output_ids = said
        rows, masked = (
            [RowSampler(state, vocab_size, [end], grammars.matcher(form)) for _ in logits]
            for _ in range(2)
        )
        expected = logits.clone()
        process(expected, masked)
        wanted, found = choose(expected, masked, 1), sample(logits, rows, 1)
        assert [t.token_id for t in found] == [t.token_id for t in wanted]
        codes = [[t.error and t.error.code for t in tokens] for tokens in (found, wanted)]
        assert codes[0] == codes[1]
        assert found[4].error is not None
        matcher = rows[1].matcher
        num_unmasked += matcher is not None and matcher._bits is None
        goes_on = may[may != end]
        said = [*said, int(rng.choice(goes_on))] if len(goes_on) else []
    assert num_unmasked > 20
