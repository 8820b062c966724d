"""Rank 0's side: a decoder and a KV cache that stand for all ranks.

A `NativeRunner` over them needs to know nothing of ranks: rows, sequences, samplers, exits and
drafts are rank 0's alone, and the others see tokens' rows and positions, hidden states and KV.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.kv_cache import Ints, check_range, check_shape
from quadriga.engine.models.decoder import AnyDecoder
from quadriga.engine.tensor_parallel.part import Part
from quadriga.engine.tensor_parallel.ranks import Op, Ranks, Tokens
from quadriga.engine.weights.checkpoint_weights import ModelWeights


class ParallelDecoder(AnyDecoder):
    """`Decoder`'s operations over all ranks.

    Args:
        config: The whole model's.
        part: Rank 0's.
        codes: Names of what computes on each rank.
        end: Lets the other ranks end; called once, by `close`, without the decoder, or at exit.
    """

    reads_depths = False

    def __init__(
        self,
        config: ModelConfig,
        part: Part,
        ranks: Ranks,
        codes: Sequence[str],
        end: Callable[[], None],
    ) -> None:
        self.config = config
        self.ranks = ranks
        self._part = part
        self._codes = codes
        self._end = weakref.finalize(self, end)

    @property
    def weights(self) -> ModelWeights:
        """Rank 0's part; norms and exits' MLPs are whole."""
        return self._part.eager.weights

    @property
    def num_layers(self) -> int:
        return self._part.eager.num_layers

    @property
    def code(self) -> str:
        """See `LoadedModel.numerics`; confidences of exits are plain torch's, whatever computes."""
        alike = len(set(self._codes)) == 1
        return (
            f"{self._codes[0]} over {self.ranks.size} ranks" if alike else " | ".join(self._codes)
        )

    def plan_tokens(self, rows: Ints, positions: Ints) -> Tokens:
        """See `Decoder.plan_tokens`."""
        return Tokens(rows, positions)

    def embed(self, token_ids: Sequence[int], batch: Tokens) -> torch.Tensor:
        """See `Decoder.embed`."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise IndexError(f"token ids must lie in 0..{self.config.vocab_size - 1}")
        with self.ranks.order(Op.EMBED, tokens=batch):
            return self._part.embed(self.ranks.broadcast(ids), batch)

    def run_layers(self, x: torch.Tensor, batch: Tokens, first: int, stop: int) -> torch.Tensor:
        """See `Decoder.run_layers`; may work in place."""
        with self.ranks.order(Op.LAYERS, first, stop, tokens=batch, states=x):
            return self._part.run_layers(x, batch, first, stop)

    def project_kv(self, x: torch.Tensor, batch: Tokens, first: int, stop: int, depth: int) -> None:
        """See `Decoder.project_kv`."""
        with self.ranks.order(Op.PROJECT_KV, first, stop, depth, tokens=batch, states=x):
            self._part.decoder.project_kv(x, self._part.plan(batch), first, stop, depth)

    def logits(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        """See `Decoder.logits`."""
        with self.ranks.order(Op.LOGITS, depth, states=x):
            return torch.cat(self._part.logits(x, depth), dim=-1)

    def close(self) -> None:
        """Let the other ranks end."""
        self._end()


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A block of KV that every rank keeps its heads of, under a number."""

    number: int


class ParallelCache:
    """`KVCache` over all ranks; what crosses it has all heads.

    Args:
        num_kv_heads: Of the whole model.
    """

    def __init__(self, num_kv_heads: int, part: Part, ranks: Ranks) -> None:
        self._num_kv_heads = num_kv_heads
        self._part = part
        self._own = part.cache
        self._ranks = ranks
        self._numbers = itertools.count()

    @property
    def num_layers(self) -> int:
        return self._own.num_layers

    @property
    def num_rows(self) -> int:
        return self._own.num_rows

    @property
    def capacity(self) -> int:
        return self._own.capacity

    @property
    def share_tokens(self) -> int:
        return self._own.share_tokens

    def read(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """See `KVCache.read`. Raises: InvariantViolation when out of range."""
        check_range(self, row, first_layer, num_layers, start, stop)
        where = (row, first_layer, num_layers, start, stop)
        with self._ranks.order(Op.READ, *where):
            return torch.cat(self._part.read(*where), dim=2)

    def write(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """See `KVCache.write`. Raises: InvariantViolation when out of range or misshapen."""
        check_shape(kv, self._num_kv_heads, self._part.eager.config.head_dim)
        count, num_tokens = kv.shape[0], kv.shape[3]
        check_range(self, row, first_layer, count, start, start + num_tokens)
        kv = kv.to(self._part.eager.weights.dtype)
        parts = [part.contiguous() for part in kv.chunk(self._ranks.size, dim=2)]
        where = (row, first_layer, count, start, num_tokens)
        with self._ranks.order(Op.WRITE, *where):
            self._part.write(*where, parts)

    def copy_layers(self, rows: Ints, positions: Ints, source: int, first: int, stop: int) -> None:
        """See `KVCache.copy_layers`."""
        tokens = Tokens(rows, positions)
        with self._ranks.order(Op.COPY_LAYERS, source, first, stop, tokens=tokens):
            self._own.copy_layers(rows, positions, source, first, stop)

    def release(self, row: int) -> None:
        """See `KVCache.release`."""
        with self._ranks.order(Op.RELEASE, row):
            self._own.release(row)

    def keep(self, row: int, start: int, over: object | None = None) -> KeptBlock:
        """See `KVCache.keep`."""
        check_range(self, row, 0, self.num_layers, start, start + self.share_tokens)
        kept = KeptBlock(next(self._numbers))
        where = (row, start, kept.number, over.number if isinstance(over, KeptBlock) else -1)
        with self._ranks.order(Op.KEEP, *where):
            self._part.keep(*where)
        return kept

    def blank(self) -> None:
        """See `KVCache.blank`: each rank keeps its own memory."""

    def share(self, row: int, start: int, kept: object) -> None:
        """See `KVCache.share`."""
        assert isinstance(kept, KeptBlock)
        with self._ranks.order(Op.SHARE, row, start, kept.number):
            self._part.share(row, start, kept.number)

    def forget(self, kept: object) -> None:
        """See `KVCache.forget`."""
        assert isinstance(kept, KeptBlock)
        with self._ranks.order(Op.FORGET, kept.number):
            self._part.forget(kept.number)
