"""The decoder over paged KV: the parts of `models.layers`, another way to store and to attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from quadriga.engine.cuda.graphs import DecodeGraphs
from quadriga.engine.cuda.paged_attention import PagedAttention, Runs
from quadriga.engine.cuda.paged_cache import PagedKVCache
from quadriga.engine.models.config import ModelConfig
from quadriga.engine.models.decoder import Candidates
from quadriga.engine.models.layers import (
    TokenSpan,
    apply_head,
    embed,
    mapped_kv,
    project_qkv,
    run_layer,
)
from quadriga.engine.models.rope import rope_table
from quadriga.engine.numerics import torch_code
from quadriga.engine.transfers import to_device
from quadriga.engine.weights.checkpoint_weights import ModelWeights

Ints = npt.NDArray[np.int64]
_Mix = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(slots=True)
class PagedPass:
    """One pass over T tokens of S sequences.

    Attributes:
        where: Row and position of every token: int64 [2, T], on the device.
        rows, stops: Of every sequence, and one past its last position: on the host, [S].
        spans: The tokens by sequence; None where each token is one of its own.
        longest: Most positions that a token sees.
        runs: What attention wants to know of the spans; made when it is first asked for.
    """

    where: torch.Tensor
    rows: Ints
    stops: Ints
    spans: Sequence[TokenSpan] | None
    longest: int
    runs: Runs | None = None


@dataclass(slots=True)
class _Bound:
    """Where a pass's tokens lie in some layers.

    Attributes:
        first: Of the layers.
        slots: int64 [layers, T].
        tables: int32 [layers, S, num_blocks].
        cos, sin: [T, 1, head_dim / 2]; None without RoPE.
    """

    first: int
    slots: torch.Tensor
    tables: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None


class PagedDecoder:
    """`models.decoder.Decoder`'s operations on the device of its cache.

    Nothing waits for the device but `best` and `candidates`, once each.

    Attributes:
        graphs: Replays passes of single tokens; None runs them operation by operation.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        cache: PagedKVCache,
        attention: PagedAttention,
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.attention = attention
        self.graphs: DecodeGraphs | None = None
        self._device = cache.device
        self._cos: torch.Tensor | None = None
        self._sin: torch.Tensor | None = None
        if config.rope is not None:
            cos, sin = rope_table(config.rope, config.head_dim, cache.capacity, weights.dtype)
            self._cos, self._sin = cos.to(self._device), sin.to(self._device)

    @property
    def num_layers(self) -> int:
        return len(self.weights.layers)

    @property
    def code(self) -> str:
        """See `AnyDecoder.code`."""
        return f"{torch_code(self._device)} {self.attention.name}"

    @property
    def is_compiled(self) -> bool:
        """Whether passes of single tokens run as graphs."""
        return self.graphs is not None

    @property
    def reads_depths(self) -> bool:
        return False

    def plan_tokens(self, rows: Ints, positions: Ints) -> PagedPass:
        """See `Decoder.plan_tokens`."""
        return PagedPass(
            where=to_device(np.stack([rows, positions]), self._device),
            rows=rows,
            stops=positions + 1,
            spans=None,
            longest=int(positions.max()) + 1,
        )

    def plan(self, spans: Sequence[TokenSpan]) -> PagedPass:
        """See `Decoder.plan`."""
        rows = np.array([s.row for s in spans], dtype=np.int64)
        stops = np.array([s.stop for s in spans], dtype=np.int64)
        counts = np.array([s.end - s.begin for s in spans], dtype=np.int64)
        if (counts == 1).all():
            return self.plan_tokens(rows, stops - 1)
        positions = np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in spans])
        return PagedPass(
            where=to_device(np.stack([np.repeat(rows, counts), positions]), self._device),
            rows=rows,
            stops=stops,
            spans=spans,
            longest=int(stops.max()),
        )

    def embed(self, token_ids: Sequence[int], batch: PagedPass) -> torch.Tensor:
        """See `Decoder.embed`."""
        ids = to_device(np.array(token_ids, dtype=np.int64), self._device)
        return embed(self.weights, ids, batch.where[1])

    def run_layers(self, x: torch.Tensor, batch: PagedPass, first: int, stop: int) -> torch.Tensor:
        """See `Decoder.run_layers`."""
        self.cache.prepare(batch.rows, batch.stops, first, stop)
        if batch.spans is not None:
            return self._run_spans(x, batch, batch.spans, first, stop)
        if self.graphs is not None and self.graphs.covers(first, stop, len(x)):
            return self.graphs.run(x, batch.where, first, stop)
        return self.run_each(x, batch.where, first, stop, batch.longest)

    def run_each(
        self, x: torch.Tensor, where: torch.Tensor, first: int, stop: int, longest: int
    ) -> torch.Tensor:
        """Layers [first, stop) for single tokens whose pages are there; what graphs record.

        Args:
            where: Rows and positions, int64 [2, T].
            longest: No token sees more positions.
        """
        lengths = (where[1] + 1).int()

        def mix(q: torch.Tensor, table: torch.Tensor, window: int) -> torch.Tensor:
            pools = self.cache.keys, self.cache.values
            return self.attention.each(q, *pools, table, lengths, longest, window)

        return self._through(x, first, stop, self._bind(where, where[0], first, stop), mix)

    def _run_spans(
        self, x: torch.Tensor, batch: PagedPass, spans: Sequence[TokenSpan], first: int, stop: int
    ) -> torch.Tensor:
        """Layers [first, stop) for runs of tokens."""
        runs = batch.runs
        if runs is None:
            runs = batch.runs = Runs.of(spans, self.attention.block_queries, self._device)

        def mix(q: torch.Tensor, table: torch.Tensor, window: int) -> torch.Tensor:
            pools = self.cache.keys, self.cache.values
            return self.attention.runs(q, *pools, table, runs, window)

        rows = batch.where[0].index_select(0, runs.begins[:-1])
        return self._through(x, first, stop, self._bind(batch.where, rows, first, stop), mix)

    def _through(
        self, x: torch.Tensor, first: int, stop: int, bound: _Bound, mix: _Mix
    ) -> torch.Tensor:
        for i in range(first, stop):
            attend = partial(self._attend, i, bound.slots[i - first], bound, mix)
            x = run_layer(x, self.weights.layers[i], self.config, attend)
        return x

    def _attend(
        self, i: int, slots: torch.Tensor, bound: _Bound, mix: _Mix, h: torch.Tensor
    ) -> torch.Tensor:
        """Project layer i's Q, K and V; store K and V; mix what Q sees."""
        q, k, v = project_qkv(h, self.weights.layers[i], bound.cos, bound.sin, self.config)
        self.cache.store(slots, k, v)
        return mix(q, bound.tables[i - bound.first], self.config.windows[i])

    def project_kv(
        self, x: torch.Tensor, batch: PagedPass, first: int, stop: int, depth: int
    ) -> None:
        """See `Decoder.project_kv`."""
        self.cache.prepare(batch.rows, batch.stops, first, stop)
        rows, positions = batch.where[0], batch.where[1]
        cos, sin = self._rotation(positions)
        slots = self.cache.slots(first, stop, rows, positions)
        for i in range(first, stop):
            kv_map, layer = self.weights.kv_maps[depth][i], self.weights.layers[i]
            self.cache.store(slots[i - first], *mapped_kv(x, kv_map, layer, cos, sin, self.config))

    def logits(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        """See `Decoder.logits`."""
        return apply_head(x, self.weights.heads[depth], self.config)

    def best(self, x: torch.Tensor, depth: int) -> list[int]:
        """See `Decoder.best`; waits for the device."""
        ids: list[int] = self.logits(x, depth).argmax(dim=-1).tolist()
        return ids

    def candidates(self, x: torch.Tensor, depth: int) -> Candidates:
        """See `Decoder.candidates`; waits for the device, once: one copy for all results."""
        logits = self.logits(x, depth)
        top = torch.topk(torch.softmax(logits, dim=-1), min(2, logits.shape[-1]), dim=-1).values
        packed = torch.cat([logits.argmax(dim=-1, keepdim=True).double(), top.double()], dim=1)
        found: npt.NDArray[np.float64] = packed.cpu().numpy()
        probs = np.zeros((len(found), 2), dtype=np.float32)
        probs[:, : found.shape[1] - 1] = found[:, 1:]
        return Candidates(logits, found[:, 0].astype(np.int64), probs)

    def close(self) -> None:
        """Give the graphs' memory back."""
        if self.graphs is not None:
            self.graphs.close()

    def _bind(self, where: torch.Tensor, rows: torch.Tensor, first: int, stop: int) -> _Bound:
        """Look the tokens' slots and the sequences' pages up, for all layers at once."""
        cos, sin = self._rotation(where[1])
        slots = self.cache.slots(first, stop, where[0], where[1])
        return _Bound(first, slots, self.cache.table[first:stop].index_select(1, rows), cos, sin)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self._cos is None or self._sin is None:
            return None, None
        return self._cos[positions, None], self._sin[positions, None]
