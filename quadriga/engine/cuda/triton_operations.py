"""`Operations` in Triton: one kernel each, where plain torch launches two to ten.

They read and write every number once and compute in float32. What is rounded between two
operations of plain torch is rounded here too, so that both give nearly the same in half precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.cuda.operations import SAYS, Operations, Store
from quadriga.engine.cuda.triton_products import product, takes
from quadriga.engine.weights.checkpoint_weights import LayerWeights, Linear, Norm

_HEADS = 16  # of one program of `_rotate_and_store`
_INNER = 1024  # numbers of one program of `_silu_mul`
_LOGITS = 4096  # that a program of `_say` looks at together
_MAX_SHARES = 16


@triton.jit
def _add_norm(
    x,
    more,
    weight,
    added,
    normed,
    eps,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
):
    """One row of each: [T, HIDDEN]."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    at = tl.arange(0, WIDTH)
    is_in = at < HIDDEN
    value = tl.load(x + row + at, mask=is_in, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(more + row + at, mask=is_in, other=0.0).to(tl.float32)
        rounded = value.to(added.dtype.element_ty)
        tl.store(added + row + at, rounded, mask=is_in)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    wide = value * scale * tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(normed + row + at, wide.to(normed.dtype.element_ty), mask=is_in)


# One number is read of each: where it lies makes no other kernel of it.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotate_and_store(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    slots,
    q_out,
    keys,
    values,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Some heads of one token: of Q, of K, of V."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF_PADDED)
    is_dim = dim < HALF
    there = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & is_dim[None, :]
    at = ((token * (Q_HEADS + 2 * KV_HEADS) + head) * (2 * HALF))[:, None] + dim[None, :]
    a = tl.load(qkv + at, mask=there, other=0.0)
    b = tl.load(qkv + at + HALF, mask=there, other=0.0)
    is_q = (head < Q_HEADS)[:, None]
    is_qk = (head < Q_HEADS + KV_HEADS)[:, None]
    own = a.dtype
    if NORMS:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        squares = tl.sum(wide_a * wide_a, 1) + tl.sum(wide_b * wide_b, 1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        of_q_a = tl.load(q_norm + dim, mask=is_dim, other=0.0).to(tl.float32)
        of_q_b = tl.load(q_norm + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
        of_k_a = tl.load(k_norm + dim, mask=is_dim, other=0.0).to(tl.float32)
        of_k_b = tl.load(k_norm + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
        normed_a = wide_a * scale * tl.where(is_q, of_q_a[None, :], of_k_a[None, :])
        normed_b = wide_b * scale * tl.where(is_q, of_q_b[None, :], of_k_b[None, :])
        a = tl.where(is_qk, normed_a.to(own), a)
        b = tl.where(is_qk, normed_b.to(own), b)
    if ROTATES:
        turn = tl.load(positions + token) * HALF + dim
        c = tl.load(cos + turn, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + turn, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a = tl.where(is_qk, (wide_a * c - wide_b * s).to(own), a)
        b = tl.where(is_qk, (wide_b * c + wide_a * s).to(own), b)
    to_q = ((token * Q_HEADS + head) * (2 * HALF))[:, None] + dim[None, :]
    tl.store(q_out + to_q, a, mask=there & is_q)
    tl.store(q_out + to_q + HALF, b, mask=there & is_q)
    slot = tl.load(slots + token) * KV_HEADS
    to_k = ((slot + head - Q_HEADS) * (2 * HALF))[:, None] + dim[None, :]
    is_k = there & is_qk & (head >= Q_HEADS)[:, None]
    tl.store(keys + to_k, a, mask=is_k)
    tl.store(keys + to_k + HALF, b, mask=is_k)
    to_v = ((slot + head - Q_HEADS - KV_HEADS) * (2 * HALF))[:, None] + dim[None, :]
    is_v = there & (head >= Q_HEADS + KV_HEADS)[:, None]
    tl.store(values + to_v, a, mask=is_v)
    tl.store(values + to_v + HALF, b, mask=is_v)


@triton.jit
def _silu_mul(up, out, FFN: tl.constexpr, BLOCK: tl.constexpr):
    """Gate and up, [T, 2 · FFN] → [T, FFN]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < FFN
    gate = tl.load(up + row * (2 * FFN) + at, mask=is_in, other=0.0)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    value = tl.load(up + row * (2 * FFN) + FFN + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * FFN + at, (opened * value).to(gate.dtype), mask=is_in)


@triton.jit
def _say(
    logits,
    wide,
    parts,
    VOCAB: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
):
    """A share of one row: the largest, its place, the next, the sum of exp less the largest."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    best = tl.full([], float("-inf"), tl.float32)
    place = tl.full([], 0, tl.int32)
    second = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for begin in range(share * SHARE, share * SHARE + SHARE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        is_in = at < VOCAB
        some = tl.load(logits + row * VOCAB + at, mask=is_in, other=float("-inf")).to(tl.float32)
        tl.store(wide + row * VOCAB + at, some, mask=is_in)
        most = tl.max(some, 0)
        where = tl.min(tl.where((some == most) & is_in, at, VOCAB), 0)
        after = tl.max(tl.where(at == where, float("-inf"), some), 0)
        second = tl.maximum(tl.maximum(second, after), tl.minimum(best, most))
        place = tl.where(most > best, where, place)
        top = tl.maximum(best, most)
        base = tl.where(top == float("-inf"), 0.0, top)  # where all so far is banned
        total = total * tl.exp(best - base) + tl.sum(tl.exp(some - base), 0)
        best = top
    part = parts + (row * SHARES + share) * 4
    tl.store(part, best)
    tl.store(part + 1, place.to(tl.float32))
    tl.store(part + 2, second)
    tl.store(part + 3, total)


@triton.jit
def _say_joined(parts, said, SHARES: tl.constexpr, SAID: tl.constexpr):
    """The shares of one row → what it says."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, SHARES)
    part = parts + (row * SHARES + share) * 4
    best = tl.load(part)
    place = tl.load(part + 1)
    second = tl.load(part + 2)
    total = tl.load(part + 3)
    most = tl.max(best, 0)
    winner = tl.min(tl.where(best == most, share, SHARES), 0)
    after = tl.maximum(tl.max(second, 0), tl.max(tl.where(share == winner, float("-inf"), best), 0))
    base = tl.where(most == float("-inf"), 0.0, most)
    everything = tl.sum(total * tl.exp(best - base), 0)
    tl.store(said + row * SAID, tl.sum(tl.where(share == winner, place, 0.0), 0))
    tl.store(said + row * SAID + 1, tl.exp(most - base) / everything)
    tl.store(said + row * SAID + 2, tl.exp(after - base) / everything)


def fits(config: ModelConfig, device: torch.device) -> bool:
    """Whether these take the model: heads in two halves; on a GPU, or interpreted."""
    return config.head_dim % 2 == 0 and (device.type == "cuda" or triton.knobs.runtime.interpret)


class TritonOperations(Operations):
    """See `Operations`, whose forms stay for norms and activations that have no kernel."""

    def add_norm(
        self, x: torch.Tensor, more: torch.Tensor | None, weights: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operations.add_norm`."""
        c = self._config
        if c.norm != "rms" or weights.weight is None:
            return super().add_norm(x, more, weights)
        x = x.contiguous()
        normed = torch.empty_like(x)
        added = x if more is None else torch.empty_like(x)
        width = triton.next_power_of_2(x.shape[1])
        _add_norm[(x.shape[0],)](
            x,
            x if more is None else more,
            weights.weight,
            added,
            normed,
            c.norm_eps,
            HIDDEN=x.shape[1],
            WIDTH=width,
            ADDS=more is not None,
            num_warps=_warps(width),
        )
        return added, normed

    def project(
        self, x: torch.Tensor, more: torch.Tensor | None, weights: Norm, by: Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operations.project`."""
        if self._config.norm != "rms" or weights.weight is None or not takes(x, by):
            return super().project(x, more, weights, by)
        return product(self._config, x, by, more=more, norm=weights)

    def open_mlp(
        self, x: torch.Tensor, more: torch.Tensor | None, weights: Norm, up: Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operations.open_mlp`."""
        c = self._config
        is_known = c.norm == "rms" and c.gated and c.activation == "silu"
        if not is_known or weights.weight is None or not takes(x, up):
            return super().open_mlp(x, more, weights, up)
        return product(c, x, up, more=more, norm=weights, is_gated=True)

    def linear(self, x: torch.Tensor, by: Linear) -> torch.Tensor:
        """See `Operations.linear`."""
        if not takes(x, by, is_normed=False):
            return super().linear(x, by)
        return product(self._config, x, by)[1]

    def rotate_and_store(
        self, qkv: torch.Tensor, layer: LayerWeights, store: Store
    ) -> torch.Tensor:
        """See `Operations.rotate_and_store`."""
        c = self._config
        q = qkv.new_empty(qkv.shape[0], c.num_heads, c.head_dim)
        norms = layer.q_norm is not None
        rotates = store.cos is not None
        _rotate_and_store[(qkv.shape[0], triton.cdiv(c.num_heads + 2 * c.num_kv_heads, _HEADS))](
            qkv,
            layer.q_norm if norms else qkv,
            layer.k_norm if norms else qkv,
            store.cos if rotates else qkv,
            store.sin if rotates else qkv,
            store.positions,
            store.slots,
            q,
            store.keys,
            store.values,
            c.norm_eps,
            **self.rotation(norms=norms, rotates=rotates),
        )
        return q

    def rotation(self, *, norms: bool, rotates: bool) -> dict[str, int | bool]:
        """What `_rotate_and_store` is compiled for."""
        c = self._config
        return {
            "Q_HEADS": c.num_heads,
            "KV_HEADS": c.num_kv_heads,
            "HALF": c.head_dim // 2,
            "HALF_PADDED": triton.next_power_of_2(c.head_dim // 2),
            "HEADS": _HEADS,
            "NORMS": norms,
            "ROTATES": rotates,
        }

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        """See `Operations.activate`."""
        if not self._config.gated or self._config.activation != "silu":
            return super().activate(up)
        size = up.shape[1] // 2
        out = up.new_empty(up.shape[0], size)
        _silu_mul[(up.shape[0], triton.cdiv(size, _INNER))](up, out, FFN=size, BLOCK=_INNER)
        return out

    def say(self, logits: torch.Tensor, wide: torch.Tensor, said: torch.Tensor) -> None:
        """See `Operations.say`."""
        count, vocab = logits.shape
        shares = min(_MAX_SHARES, triton.next_power_of_2(triton.cdiv(vocab, _LOGITS)))
        share = triton.cdiv(triton.cdiv(vocab, shares), _LOGITS) * _LOGITS
        parts = torch.empty(count, shares, 4, dtype=torch.float32, device=logits.device)
        _say[(count, shares)](
            logits, wide, parts, VOCAB=vocab, SHARE=share, BLOCK=_LOGITS, SHARES=shares, num_warps=8
        )
        _say_joined[(count,)](parts, said, SHARES=shares, SAID=SAYS, num_warps=1)


def _warps(width: int) -> int:
    """Of a program for so many numbers: some 16 to 32 of them a thread."""
    return min(16, max(1, width // 512))
