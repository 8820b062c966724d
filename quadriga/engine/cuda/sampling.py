"""Draws on a GPU: parameters that stay there, and top-p without a sort of the vocabulary.

The tokens are those that `engine.sampler` draws on hosts. Only torch is used: CPUs test all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quadriga.core.request import SamplingParams
from quadriga.engine.random import LEAST_DIVISOR, uniforms
from quadriga.engine.transfers import to_device

FIRST_RANKED = 1024
"""So many tokens are ranked at first, then eight times as many, until top-p is reached."""
NOT_REACHED = -1


class SamplingTensors:
    """Temperature, min-p, top-k and top-p of an engine's rows, on their device.

    A row's change when a sequence takes it: no step copies them.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._of_rows = torch.zeros(num_rows, 4, dtype=torch.float64, device=device)

    def attach(self, row: int, p: SamplingParams) -> tuple[torch.Tensor, int]:
        """Note what the sequence in a row asks; returns the place, for its sampler."""
        self._of_rows[row] = to_device(np.array(_asked(p)), self._of_rows.device)
        return self._of_rows, row


def _asked(p: SamplingParams) -> list[float]:
    """What a row of `SamplingTensors` says of a sequence."""
    return [max(p.temperature, LEAST_DIVISOR), p.min_p, p.top_k or math.inf, p.top_p]


def draw_into(
    best: torch.Tensor, logits: torch.Tensor, rows: Sequence[Any], drawn: Sequence[int]
) -> torch.Tensor:
    """Draw for some of the rows, in the place of their best tokens: int64 [n], on the host.

    Waits for the device, and once more whenever top-p takes more tokens than were ranked.

    Args:
        best: int64 [n], on the device.
        logits: float32 [n, vocab]; kept.
        rows: Their samplers (`sampler.Sampler`), all with a place or none: then what they ask is
            copied with every call.
    """
    num_ranked, tokens = FIRST_RANKED, best
    while drawn:
        some = [rows[i] for i in drawn]
        u = uniforms(*zip(*((r.params.seed, r.choice, r.position) for r in some), strict=True))
        of_rows, _ = some[0].place or (None, 0)
        places = drawn if of_rows is None else [r.place[1] for r in some]
        here = to_device(np.array([drawn, places, u]), logits.device)
        at, place = here[:2].long()
        if of_rows is None:
            asked = to_device(np.array([_asked(r.params) for r in some]), logits.device)
        else:
            asked = of_rows.index_select(0, place)
        own = logits if len(drawn) == len(rows) else logits.index_select(0, at)
        # The maximum goes first, so that a tiny temperature gives -inf, not inf - inf.
        scaled = (own - own.max(dim=-1, keepdim=True).values) / asked[:, :1].float()
        scaled, is_reached = truncate(scaled, some, asked, num_ranked)
        chosen = invert_cdf_on_device(torch.softmax(scaled, dim=-1).double(), here[2])
        best.index_copy_(0, at, chosen.masked_fill(~is_reached, NOT_REACHED))
        tokens = best.cpu()
        drawn = [i for i in drawn if tokens[i] == NOT_REACHED]
        num_ranked *= 8
    return tokens


def invert_cdf_on_device(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """`invert_cdf` where the probabilities are: float64 [n, vocab] and [n] → int64 [n].

    Both searches pass by all that is not a number, so such a row gives the vocabulary's size too.
    A device sums in another order: where a target lies within rounding, 1e-16 or so, of a border,
    it may choose the neighbour.
    """
    cumulative = probs.cumsum(dim=1)
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, u[:, None] * total, right=True)
    return torch.minimum(found, torch.searchsorted(cumulative, total))[:, 0]


def truncate(
    scaled: torch.Tensor, rows: Sequence[Any], asked: torch.Tensor, num_ranked: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set what min-p, top-k and top-p exclude to -inf; [n, vocab], row maximum 0.

    The values of the best tokens say where a row is cut; among those that equal the last one the
    ids decide. Returns bool [n] too: whether top-p was reached among those ranked.
    """
    vocab = scaled.shape[-1]
    min_p, top_k, top_p = (asked[:, i : i + 1] for i in (1, 2, 3))
    if any(r.params.min_p > 0 for r in rows):
        scaled = scaled.masked_fill(scaled < min_p.float().log(), -math.inf)
    most = max((k for r in rows if (k := r.params.top_k) < vocab), default=0)
    if not most and all(r.params.top_p >= 1.0 for r in rows):
        return scaled, asked[:, 0] > 0
    values = torch.topk(scaled, min(vocab, max(most, num_ranked))).values
    is_inside = torch.arange(values.shape[1], device=scaled.device) < top_k
    weights = values.double().exp() * is_inside
    inside, whole = (w.sum(dim=-1, keepdim=True) for w in (weights, scaled.double().exp()))
    probs = weights / torch.where(top_k < vocab, inside, whole)
    # A top_p of 1 keeps all: rounding must not cut the tail of rows that did not ask.
    is_inside &= (probs.cumsum(dim=-1) - probs < top_p) | (top_p >= 1.0)
    is_inside[:, 0] = True  # top_p may be 0: the best token always stays
    count = is_inside.sum(dim=-1, keepdim=True)
    asks_nothing = (top_k >= vocab) & (top_p >= 1.0)
    least = values.gather(1, count - 1).masked_fill(asks_nothing, -math.inf)
    is_tied = scaled == least
    num_tied = count - (values > least).sum(dim=-1, keepdim=True)
    is_kept = (scaled > least) | (is_tied & (is_tied.cumsum(-1, dtype=torch.int32) <= num_tied))
    is_reached = (count < values.shape[1]) | (top_k.clamp(max=vocab) <= values.shape[1])
    return scaled.masked_fill(~is_kept, -math.inf), (is_reached | asks_nothing)[:, 0]
