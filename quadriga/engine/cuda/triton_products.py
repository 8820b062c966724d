"""Products of one token with a matrix in Triton, with what stands before and behind them.

A step of one sequence reads all weights and computes next to nothing: its floor is the memory's
bandwidth. What keeps a layer above it are kernels that start one after the other, each of which
moves a few kilobytes or begins to read when the one before has ended. Here the sum with what
precedes, the norm and the activation are parts of the product, in which each program makes the norm
anew; and on GPUs that let a kernel start before the one in front of it ends (compute capability
9.0), its weights are on their way by then: they do not depend on it. What is rounded between
operations of plain torch is rounded here too.

From two tokens on a library's products are faster, which compute on tensor cores (measured:
docs/design/gpu.md).

Source: CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.weights.checkpoint_weights import Linear, Norm

_MOST_INPUTS, _MOST_NORMED = 16_384, 4096
"""A program has whole rows, and where there is a norm reads three vectors beside: more was not
measured."""
_WEIGHTS = 64  # of a thread
_PROGRAM_WEIGHTS, _WIDE_PROGRAM_WEIGHTS = 8192, 16_384
"""Of a program; more where rows are wide, as each program reads all inputs."""


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
    IN: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """LANES of [OUT]; GATED: of silu(first OUT rows of `by`) times its other OUT rows."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    at = tl.arange(0, WIDTH)
    is_out = lane < OUT
    is_in = at < IN
    there = is_out[:, None] & is_in[None, :]
    place = lane.to(tl.int64)[:, None] * IN + at[None, :]
    if GATED:
        gates = tl.load(by + place, mask=there, other=0.0)
        rows = tl.load(by + OUT * IN + place, mask=there, other=0.0)
    else:
        rows = tl.load(by + place, mask=there, other=0.0)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()  # from here on, what earlier kernels wrote can be read
    read = tl.load(x + at, mask=is_in, other=0.0)
    own = read.dtype
    value = read.to(tl.float32)
    if ADDS:
        value += tl.load(more + at, mask=is_in, other=0.0).to(tl.float32)
        if tl.program_id(0) == 0:
            tl.store(added + at, value.to(own), mask=is_in)
        value = value.to(own).to(tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / IN + eps)
        value = value * scale * tl.load(norm + at, mask=is_in, other=0.0).to(tl.float32)
        value = value.to(own).to(tl.float32)
    total = tl.sum(rows.to(tl.float32) * value[None, :], 1)
    if BIASED:
        total += tl.load(bias + lane + (OUT if GATED else 0), mask=is_out, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.sum(gates.to(tl.float32) * value[None, :], 1)
        if BIASED:
            gate += tl.load(bias + lane, mask=is_out, other=0.0).to(tl.float32)
        gate = gate.to(own).to(tl.float32)
        opened = (gate / (1.0 + tl.exp(-gate))).to(own).to(tl.float32)
        total = opened * total.to(own).to(tl.float32)
    tl.store(out + lane, total.to(own), mask=is_out)


def takes(x: torch.Tensor, by: Linear, *, is_normed: bool = True) -> bool:
    """Whether this is one token, and a matrix of plain numbers that are not too many a row."""
    form, most = by.weight.form, _MOST_NORMED if is_normed else _MOST_INPUTS
    is_plain = form.block is None and not form.is_interleaved
    return len(x) == 1 and is_plain and x.shape[1] <= most


def product(
    config: ModelConfig,
    x: torch.Tensor,
    by: Linear,
    *,
    more: torch.Tensor | None = None,
    norm: Norm | None = None,
    is_gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + more, both [1, in], and that times `by`: [1, out].

    Args:
        norm: The sum's RMSNorm is multiplied; without it there is no `more`.
        is_gated: The result is silu of its first half times its second.
    """
    x = x.contiguous()
    rows, inputs = by.weight.shape
    outputs = rows // 2 if is_gated else rows
    out = x.new_empty(1, outputs)
    added = x if more is None else torch.empty_like(x)
    options = shape_of(inputs, outputs, is_gated=is_gated)
    overlaps = can_overlap(x.device)
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
        OVERLAPS=overlaps,
        launch_pdl=overlaps,
        **options,
    )
    return added, out


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the one in front of it ends."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def shape_of(inputs: int, outputs: int, *, is_gated: bool) -> dict[str, int]:
    """Sizes that `_product` is compiled for."""
    width = triton.next_power_of_2(inputs)
    weights = _PROGRAM_WEIGHTS if width <= 2048 else _WIDE_PROGRAM_WEIGHTS
    rows = max(2 if is_gated else 1, weights // width)
    return {
        "IN": inputs,
        "OUT": outputs,
        "WIDTH": width,
        "LANES": rows // 2 if is_gated else rows,
        "num_warps": min(8, max(1, rows * width // (32 * _WEIGHTS))),
    }
