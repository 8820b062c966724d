"""A decoder-only model over a KV cache: embed, run a range of layers, apply the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from quadriga.engine.kv_cache import RowKVCache
from quadriga.engine.models.config import ModelConfig
from quadriga.engine.models.layers import Pass, Span, layer_forward, norm
from quadriga.engine.models.rope import rope_table
from quadriga.engine.weights import ModelWeights


class AnyDecoder(Protocol):
    """What the runner needs of an implementation; `Decoder` says what each part does.

    A pass is planned by the implementation that runs it: its layout is nobody else's business.
    """

    @property
    def num_layers(self) -> int: ...

    def plan(self, spans: Sequence[Span]) -> Any: ...

    def embed(self, token_ids: Sequence[int], batch: Any) -> torch.Tensor: ...

    def run_layers(self, x: torch.Tensor, batch: Any, first: int, stop: int) -> torch.Tensor: ...

    def logits(self, x: torch.Tensor) -> torch.Tensor: ...

    def best(self, x: torch.Tensor) -> list[int]: ...


class Decoder:
    """The eager implementation, in plain torch; also the reference for every faster one.

    Any range of layers can be run by itself, so that a segment between two exits is a call.

    Args:
        cache: Holds at least as many layers as `weights`.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, cache: RowKVCache) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None
        if config.rope is not None:
            self.cos, self.sin = rope_table(
                config.rope, config.head_dim, cache.capacity, weights.embed.dtype
            )

    @property
    def num_layers(self) -> int:
        return len(self.weights.layers)

    def plan(self, spans: Sequence[Span]) -> Pass:
        """Lay out one pass over the spans' tokens, in their order."""
        rows = torch.tensor([s.row for s in spans for _ in range(s.begin, s.end)])
        positions = torch.tensor([p for s in spans for p in range(s.start, s.stop)])
        cos = None if self.cos is None else self.cos[positions, None]
        sin = None if self.sin is None else self.sin[positions, None]
        return Pass(
            rows=rows,
            positions=positions,
            spans=list(spans),
            cos=cos,
            sin=sin,
            is_decode=all(s.end - s.begin == 1 for s in spans),
            context=max(s.stop for s in spans),
        )

    def embed(self, token_ids: Sequence[int], batch: Pass) -> torch.Tensor:
        """Token ids, T of them → hidden states [T, hidden]."""
        w = self.weights
        x = w.embed[torch.tensor(token_ids)]
        if w.project_in is not None:
            x = F.linear(x, w.project_in)
        return x if w.positions is None else x + w.positions[batch.positions]

    def run_layers(self, x: torch.Tensor, batch: Pass, first: int, stop: int) -> torch.Tensor:
        """Run layers [first, stop) on hidden states [T, hidden], storing their K and V."""
        for i in range(first, stop):
            x = layer_forward(
                x,
                self.weights.layers[i],
                self.cache.keys[i],
                self.cache.values[i],
                batch,
                self.config,
                self.config.windows[i],
            )
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [n, hidden] → float32 [n, vocab]."""
        w = self.weights
        if w.final_norm is not None:
            x = norm(x, w.final_norm, self.config)
        if w.project_out is not None:
            x = F.linear(x, w.project_out)
        return F.linear(x, w.head).float()

    def best(self, x: torch.Tensor) -> list[int]:
        """Ids of the largest logits: [n, hidden] → n ids; the first of equals."""
        ids: list[int] = self.logits(x).argmax(dim=-1).tolist()
        return ids
