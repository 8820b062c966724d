"""Products of a few tokens with a matrix in Triton, with what stands before and behind them.

A step of few sequences reads all weights and computes next to nothing: its floor is the memory's
bandwidth. What keeps a layer above it are kernels that start one after the other and each move a
few kilobytes. Here the sum with what precedes, the norm, and the activation are parts of the
product: a program computes some numbers of the result of every token, and each makes the norm anew.
What is rounded between operations of plain torch is rounded here too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.weights.checkpoint_weights import Linear, Norm

MOST_TOKENS = {torch.float32: 2}
"""4 else; of float32 more do not fit the registers. From more on a library's product is taken."""
_MOST_INPUTS = 1024
"""Of a row that a program multiplies at a time."""


@triton.jit
def _scale(x, more, added, row, eps, IN: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr):
    """The factor of one token's norm; the first program stores the sum that is normed."""
    at = tl.arange(0, WIDTH)
    is_in = at < IN
    value = tl.load(x + row * IN + at, mask=is_in, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(more + row * IN + at, mask=is_in, other=0.0).to(tl.float32)
        rounded = value.to(added.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(added + row * IN + at, rounded, mask=is_in)
        value = rounded.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(value * value, 0) / IN + eps)


@triton.jit
def _inputs(
    x, more, norm, row, scale, at, is_in, IN: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr
):
    """Some of one token's inputs, float32."""
    read = tl.load(x + row * IN + at, mask=is_in, other=0.0)
    value = read.to(tl.float32)
    if ADDS:
        value += tl.load(more + row * IN + at, mask=is_in, other=0.0).to(tl.float32)
        value = value.to(read.dtype).to(tl.float32)
    if NORMS:
        value = value * scale * tl.load(norm + at, mask=is_in, other=0.0).to(tl.float32)
        value = value.to(read.dtype).to(tl.float32)
    return value


@triton.jit
def _store(out, bias, row, lane, is_out, sums, gates, OUT: tl.constexpr, BIASED: tl.constexpr,
           GATED: tl.constexpr):  # fmt: skip
    """Some of one token's results."""
    own = out.dtype.element_ty
    total = tl.sum(sums, 1)
    if BIASED:
        total += tl.load(bias + lane + (OUT if GATED else 0), mask=is_out, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.sum(gates, 1)
        if BIASED:
            gate += tl.load(bias + lane, mask=is_out, other=0.0).to(tl.float32)
        gate = gate.to(own).to(tl.float32)
        opened = (gate / (1.0 + tl.exp(-gate))).to(own).to(tl.float32)
        total = opened * total.to(own).to(tl.float32)
    tl.store(out + row * OUT + lane, total.to(own), mask=is_out)


@triton.jit
def _product(
    x,
    more,
    norm,
    by,
    bias,
    added,
    out,
    eps,
    TOKENS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    LANES: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """LANES of [TOKENS, OUT]; GATED: of silu(first OUT rows of `by`) times its other OUT rows."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_out = lane < OUT
    row_of = lane.to(tl.int64)[:, None] * IN
    s0 = 0.0
    s1 = 0.0
    s2 = 0.0
    s3 = 0.0
    if NORMS:
        s0 = _scale(x, more, added, 0, eps, IN, WIDTH, ADDS)
        if TOKENS > 1:
            s1 = _scale(x, more, added, 1, eps, IN, WIDTH, ADDS)
        if TOKENS > 2:
            s2 = _scale(x, more, added, 2, eps, IN, WIDTH, ADDS)
        if TOKENS > 3:
            s3 = _scale(x, more, added, 3, eps, IN, WIDTH, ADDS)
    sum0 = tl.zeros([LANES, INPUTS], dtype=tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    gate0, gate1, gate2, gate3 = sum0, sum0, sum0, sum0
    for begin in range(0, IN, INPUTS):
        at = begin + tl.arange(0, INPUTS)
        is_in = at < IN
        there = is_out[:, None] & is_in[None, :]
        if GATED:
            g = tl.load(by + row_of + at[None, :], mask=there, other=0.0).to(tl.float32)
            w = tl.load(by + OUT * IN + row_of + at[None, :], mask=there, other=0.0).to(tl.float32)
        else:
            w = tl.load(by + row_of + at[None, :], mask=there, other=0.0).to(tl.float32)
            g = w
        h = _inputs(x, more, norm, 0, s0, at, is_in, IN, ADDS, NORMS)[None, :]
        sum0 += w * h
        if GATED:
            gate0 += g * h
        if TOKENS > 1:
            h = _inputs(x, more, norm, 1, s1, at, is_in, IN, ADDS, NORMS)[None, :]
            sum1 += w * h
            if GATED:
                gate1 += g * h
        if TOKENS > 2:
            h = _inputs(x, more, norm, 2, s2, at, is_in, IN, ADDS, NORMS)[None, :]
            sum2 += w * h
            if GATED:
                gate2 += g * h
        if TOKENS > 3:
            h = _inputs(x, more, norm, 3, s3, at, is_in, IN, ADDS, NORMS)[None, :]
            sum3 += w * h
            if GATED:
                gate3 += g * h
    _store(out, bias, 0, lane, is_out, sum0, gate0, OUT, BIASED, GATED)
    if TOKENS > 1:
        _store(out, bias, 1, lane, is_out, sum1, gate1, OUT, BIASED, GATED)
    if TOKENS > 2:
        _store(out, bias, 2, lane, is_out, sum2, gate2, OUT, BIASED, GATED)
    if TOKENS > 3:
        _store(out, bias, 3, lane, is_out, sum3, gate3, OUT, BIASED, GATED)


def takes(x: torch.Tensor, by: Linear) -> bool:
    """Whether these are few tokens, and a matrix of plain numbers."""
    form = by.weight.form
    is_plain = form.block is None and not form.is_interleaved
    return is_plain and len(x) <= MOST_TOKENS.get(x.dtype, 4)


def product(
    config: ModelConfig,
    x: torch.Tensor,
    by: Linear,
    *,
    more: torch.Tensor | None = None,
    norm: Norm | None = None,
    is_gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + more, both [T, in], and that times `by`: [T, out].

    Args:
        norm: The sum's RMSNorm is multiplied; without it there is no `more`.
        is_gated: The result is silu of its first half times its second.
    """
    x = x.contiguous()
    rows, inputs = by.weight.shape
    outputs = rows // 2 if is_gated else rows
    out = x.new_empty(len(x), outputs)
    added = x if more is None else torch.empty_like(x)
    options = shape_of(len(x), inputs, outputs, is_gated=is_gated)
    _product[(triton.cdiv(outputs, options["LANES"]),)](
        x,
        x if more is None else more,
        x if norm is None else norm.weight,
        by.weight.rows,
        x if by.bias is None else by.bias,
        added,
        out,
        config.norm_eps,
        ADDS=more is not None,
        NORMS=norm is not None,
        GATED=is_gated,
        BIASED=by.bias is not None,
        **options,
    )
    return added, out


def shape_of(tokens: int, inputs: int, outputs: int, *, is_gated: bool) -> dict[str, int]:
    """Sizes that `_product` is compiled for."""
    width = triton.next_power_of_2(inputs)
    lanes = 8 // (2 if is_gated else 1) // (1 if tokens == 1 else 2)
    return {
        "TOKENS": tokens,
        "IN": inputs,
        "OUT": outputs,
        "WIDTH": width,
        "INPUTS": min(_MOST_INPUTS, width),
        "LANES": lanes,
    }
