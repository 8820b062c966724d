"""A decoder-only model over a KV cache: embed, run a range of layers, apply a head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.kv_cache import Ints, RowKVCache
from quadriga.engine.models.layers import (
    Gather,
    Pass,
    TokenSpan,
    apply_head,
    embed,
    layer_forward,
    project_kv,
    runs_of,
    tokens_of,
)
from quadriga.engine.models.rope import rope_table
from quadriga.engine.numerics import torch_code
from quadriga.engine.weights.checkpoint_weights import ModelWeights


@dataclass(slots=True)
class Candidates:
    """What an exit says of n hidden states.

    Attributes:
        logits: float32 [n, vocab].
        best: See `best_of`; int64 [n].
        probs: float32 [n, 2], the two largest probabilities.
    """

    logits: torch.Tensor
    best: Ints
    probs: npt.NDArray[np.float32]


def top_two(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """The two largest softmax probabilities of each row: [n, vocab] → [n, 2]."""
    values = torch.topk(torch.softmax(logits, dim=-1), min(2, logits.shape[-1]), dim=-1).values
    probs: npt.NDArray[np.float32] = F.pad(values, (0, 2 - values.shape[-1])).cpu().numpy()
    return probs


def best_of(logits: torch.Tensor) -> torch.Tensor:
    """Ids of the largest logits, the first of equals: [n, vocab] → int64 [n].

    The size of the vocabulary, which is no id, where that is no finite number.
    """
    if logits.device.type == "cpu":  # numpy's is eight times as fast as torch's
        ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
        values = logits.gather(-1, ids[:, None])[:, 0]
    else:
        values, ids = logits.max(dim=-1)
    return ids.masked_fill_(~values.isfinite(), logits.shape[-1])


class AnyDecoder(Protocol):
    """What the runner needs of an implementation; `Decoder` says what each part does.

    A pass is planned by the implementation that runs it, and its layout is private to that one.
    """

    config: ModelConfig

    @property
    def num_layers(self) -> int: ...

    @property
    def code(self) -> str:
        """Names what computes; see `quadriga.engine.numerics`."""

    @property
    def reads_depths(self) -> bool:
        """Whether attention reads skipped layers' KV through `depths` by itself."""

    def plan(self, spans: Sequence[TokenSpan]) -> Any:
        """Lay out one pass over the spans' tokens, in their order."""
        return self.plan_tokens(*tokens_of(spans))

    def plan_tokens(self, rows: Ints, positions: Ints) -> Any: ...

    def embed(self, token_ids: Sequence[int], batch: Any) -> torch.Tensor: ...

    def run_layers(self, x: torch.Tensor, batch: Any, first: int, stop: int) -> torch.Tensor: ...

    def begin(self, token_ids: Sequence[int], batch: Any, stop: int) -> torch.Tensor:
        """Embed tokens and run layers [0, stop); good until the next pass: [T, hidden]."""
        return self.run_layers(self.embed(token_ids, batch), batch, 0, stop)

    def project_kv(
        self, x: torch.Tensor, batch: Any, first: int, stop: int, depth: int
    ) -> None: ...

    def logits(self, x: torch.Tensor, depth: int) -> torch.Tensor: ...

    def best(self, x: torch.Tensor, depth: int) -> list[int]:
        """`best_of` the logits: [n, hidden] → n ids."""
        ids: list[int] = best_of(self.logits(x, depth)).tolist()
        return ids

    def candidates(self, x: torch.Tensor, depth: int) -> Candidates:
        """Logits, their first maxima and the two largest probabilities of each row."""
        logits = self.logits(x, depth)
        return Candidates(logits, best_of(logits).numpy(), top_two(logits))


class Decoder(AnyDecoder):
    """The eager implementation, in plain torch; also the reference for every faster one.

    Any range of layers can be run by itself, so that a segment between two exits is a call.

    Args:
        cache: Holds at least as many layers as `weights`.
        depths: uint8 [num_rows, positions], layers whose KV was computed; read by implementations
            that say so in `reads_depths`.

    Attributes:
        adapter_of: int64 [num_rows]: the adapter of each row's sequence, −1 for none; the runner
            sets it, every pass reads it. None where the model has no adapters.
        gather: Puts together what the ranks of a tensor-parallel engine have; None where there is
            one.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        cache: RowKVCache,
        depths: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.depths = depths
        self.adapter_of: Ints | None = None
        self.gather: Gather | None = None
        if weights.adapters:
            self.adapter_of = np.full(cache.num_rows, -1, dtype=np.int64)
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None
        if config.rope is not None:
            self.cos, self.sin = rope_table(
                config.rope, config.head_dim, cache.capacity, weights.dtype
            )

    def over(self, weights: ModelWeights, cache: RowKVCache) -> Decoder:
        """The same model with more or fewer layers."""
        other = copy.copy(self)
        other.weights, other.cache = weights, cache
        return other

    @property
    def num_layers(self) -> int:
        return len(self.weights.layers)

    @property
    def code(self) -> str:
        """See `AnyDecoder.code`."""
        return torch_code(self.weights.device)

    @property
    def reads_depths(self) -> bool:
        return False

    def plan_tokens(self, rows: Ints, positions: Ints) -> Pass:
        """Lay out one pass over tokens, each at its own (row, position)."""
        spans, at = runs_of(rows, positions), torch.from_numpy(positions)
        return Pass(
            rows=torch.from_numpy(rows),
            positions=at,
            spans=spans,
            cos=None if self.cos is None else self.cos[at, None],
            sin=None if self.sin is None else self.sin[at, None],
            is_decode=len({s.row for s in spans}) == len(rows),
            context=int(positions.max()) + 1,
            adapted=self._adapted(rows),
        )

    def _adapted(self, rows: Ints) -> dict[int, torch.Tensor]:
        """See `Pass.adapted`."""
        if self.adapter_of is None:
            return {}
        used = torch.from_numpy(self.adapter_of[rows])
        return {i: torch.nonzero(used == i)[:, 0] for i in set(used.tolist()) if i >= 0}

    def embed(self, token_ids: Sequence[int], batch: Pass) -> torch.Tensor:
        """Token ids, T of them → hidden states [T, hidden]."""
        return embed(self.weights, torch.tensor(token_ids), batch.positions)

    def run_layers(self, x: torch.Tensor, batch: Pass, first: int, stop: int) -> torch.Tensor:
        """Run layers [first, stop) on hidden states [T, hidden], storing their K and V."""
        loras = self.weights.adapters
        for i in range(first, stop):
            x = layer_forward(
                x,
                self.weights.layers[i],
                self.cache.keys[i],
                self.cache.values[i],
                batch,
                self.config,
                self.config.windows[i],
                loras[i] if batch.adapted else None,
                self.gather,
            )
        return x

    def project_kv(self, x: torch.Tensor, batch: Pass, first: int, stop: int, depth: int) -> None:
        """Store K and V of tokens that skipped layers [first, stop).

        They are made of the hidden states [T, hidden] with which the tokens left after `depth`
        layers, by that exit's map to each layer.
        """
        for i in range(first, stop):
            project_kv(
                x,
                self.weights.kv_maps[depth][i],
                self.weights.layers[i],
                self.cache.keys[i],
                self.cache.values[i],
                batch,
                self.config,
            )

    def logits(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        """The head of the exit behind `depth` layers: [n, hidden] → float32 [n, vocab]."""
        return apply_head(x, self.weights.heads[depth], self.config)
