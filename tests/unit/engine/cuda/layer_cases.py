"""`Operations` of one layer against another's: what any form of them has to give."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quadriga.checkpoint.model_config import ModelConfig, RopeConfig
from quadriga.engine.cuda.operations import SAYS, Operations, Store
from quadriga.engine.models.rope import rope_table
from quadriga.engine.weights.checkpoint_weights import LayerWeights, Linear, Norm
from quadriga.engine.weights.matrix import FORM_OF_DTYPE, Matrix
from tests.unit.engine.cuda.test_attention import make_config

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TOKENS, POSITIONS, SLOTS = 5, 64, 20


def config_of(kv_heads: int, group: int, head_dim: int) -> ModelConfig:
    """Llama's, so small that no size is a power of two."""
    return replace(make_config(kv_heads, group, head_dim), hidden_size=48, ffn_size=88)


def drawing(dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """What draws random tensors of a shape, and what compares two."""
    generator, tolerance = torch.Generator().manual_seed(4), TOLERANCE[dtype]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return random, partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance)


def check_operations(
    got: Operations, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Each of them, on random numbers, in every form that layers have."""
    wanted = Operations(config)
    random, same = drawing(dtype, device)
    x, more, weights = random(TOKENS, 48), random(TOKENS, 48), Norm(random(48))
    for added in (None, more):
        sums, normed = got.add_norm(x, added, weights)
        right_sums, right_normed = wanted.add_norm(x, added, weights)
        same(sums, right_sums)
        same(normed, right_normed)
    up = random(TOKENS, 2 * 88)
    same(got.activate(up), wanted.activate(up))
    heads, size = config.num_heads + 2 * config.num_kv_heads, config.head_dim
    qkv = random(TOKENS, heads * size)
    norms = random(size), random(size)
    rope = RopeConfig(theta=1e4, kind="default")
    tables = [t.to(device) for t in rope_table(rope, size, POSITIONS, dtype)]
    slots = torch.tensor([7, 0, 19, 3, 8], device=device)
    positions = torch.tensor([63, 0, 12, 5, 6], device=device)
    for is_normed in (False, True):
        for turns in (tables, (None, None)):
            layer = _layer(*(norms if is_normed else (None, None)))
            found = []
            for operations in (got, wanted):
                pools = torch.zeros(2, SLOTS, config.num_kv_heads, size, dtype=dtype, device=device)
                store = Store(pools[0], pools[1], slots, positions, *turns)
                found.append((operations.rotate_and_store(qkv, layer, store), pools))
            same(found[0][0], found[1][0])
            same(found[0][1], found[1][1])


def check_products(got: Operations, dtype: torch.dtype, device: torch.device) -> None:
    """With what stands before and behind them: one token, and several."""
    wanted = Operations(make_config(1, 1, 16))
    random, same = drawing(dtype, device)
    cases = [(1, 0, 0), (1, 1, 1), (3, 1, 0), (5, 0, 1)]
    for inputs in (48, 1100):
        weights = Norm(random(inputs))
        for count, has_bias, adds in cases:
            rows = Matrix(FORM_OF_DTYPE[dtype], random(20, inputs) / inputs**0.5)
            by = Linear(rows, random(20) if has_bias else None)
            x, added = random(count, inputs), random(count, inputs) if adds else None
            same(got.linear(x, by), wanted.linear(x, by))
            for form in ("project", "open_mlp"):
                made = getattr(got, form)(x, added, weights, by)
                for one, right in enumerate(getattr(wanted, form)(x, added, weights, by)):
                    same(made[one], right)


def check_say(got: Operations, dtype: torch.dtype, device: torch.device) -> None:
    """Whole and half blocks and shares; equals; the largest first, last and behind a border."""
    wanted = Operations(make_config(1, 1, 16))
    generator = torch.Generator().manual_seed(5)
    for vocab in (1, 2, 300, 4096, 9001):
        logits = 4 * torch.randn(7, vocab, generator=generator).to(device, dtype)
        logits[1, vocab // 2] = logits[1, vocab - 1] = 30.0
        logits[2, 0] = 30.0
        logits[3, vocab - 1] = 30.0
        logits[4, : vocab - 1] = float("-inf")
        logits[5] = 1.0
        results = []
        for operations in (got, wanted):
            wide = torch.zeros(7, vocab, device=device)
            said = torch.full((7, SAYS), -1.0, device=device)
            operations.say(logits, wide, said)
            results.append((wide, said))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1][:, 0], results[1][1][:, 0]), vocab
        torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=1e-4)


def _layer(q_norm: torch.Tensor | None, k_norm: torch.Tensor | None) -> LayerWeights:
    layer = LayerWeights.__new__(LayerWeights)
    layer.q_norm, layer.k_norm = q_norm, k_norm
    return layer
