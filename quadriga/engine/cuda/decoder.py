"""The decoder over paged KV: the parts of `models.layers`, another way to store and to attend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.cuda.graphs import DecodeGraphs, Looked
from quadriga.engine.cuda.operations import SAYS, Operations, Store
from quadriga.engine.cuda.paged_attention import PagedAttention, PagedKV, Runs
from quadriga.engine.cuda.paged_cache import PagedKVCache
from quadriga.engine.kv_cache import Ints
from quadriga.engine.models.decoder import Candidates
from quadriga.engine.models.layers import (
    TokenSpan,
    apply_head,
    embed,
    last_states,
    linear,
    mapped_kv,
    run_layer,
    tokens_of,
)
from quadriga.engine.models.rope import rope_table
from quadriga.engine.numerics import torch_code
from quadriga.engine.transfers import to_device
from quadriga.engine.weights.checkpoint_weights import Linear, ModelWeights, Norm

_Mix = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(slots=True)
class PagedPass:
    """One pass over T tokens of S sequences.

    Attributes:
        tokens: Row, position and, once it is embedded, id of every token: on the host, [3, T].
        rows, stops: Of every sequence, and one past its last position: on the host, [S].
        spans: The tokens by sequence; None where each token is one of its own.
        on_device: `tokens` on the device; made when it is first asked for.
        runs: What attention wants to know of the spans; made when it is first asked for.
    """

    tokens: Ints
    rows: Ints
    stops: Ints
    spans: Sequence[TokenSpan] | None
    on_device: torch.Tensor | None = None
    runs: Runs | None = None


@dataclass(slots=True)
class _Bound:
    """Where a pass's tokens lie in some layers.

    Attributes:
        first: Of the layers.
        positions: int64 [T].
        slots: int64 [layers, T].
        tables: int32 [layers, S, num_blocks].
    """

    first: int
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor


class PagedDecoder:
    """`models.decoder.Decoder`'s operations on the device of its cache.

    Nothing waits for the device but `best` and `candidates`, once each.

    Attributes:
        graphs: Replays passes of single tokens; None runs them operation by operation.
        operations: What layers do between their products.
        folded: See `folded_maps`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        cache: PagedKVCache,
        attention: PagedAttention,
        operations: Operations | None = None,
        folded: Mapping[int, Linear] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.attention = attention
        self.operations = operations or Operations(config)
        self.folded = folded
        self.graphs: DecodeGraphs | None = None
        self._looked: Looked | None = None
        # Norms without a weight, and tokens without queries.
        self._unit = Norm(torch.ones(config.hidden_size, dtype=weights.dtype, device=cache.device))
        self._of_kv = type(self.operations)(replace(config, num_heads=0))
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
    def reads_depths(self) -> bool:
        return False

    def plan_tokens(self, rows: Ints, positions: Ints) -> PagedPass:
        """See `Decoder.plan_tokens`."""
        tokens = np.zeros((3, len(rows)), dtype=np.int64)
        tokens[0], tokens[1] = rows, positions
        return PagedPass(tokens, rows, positions + 1, None)

    def plan(self, spans: Sequence[TokenSpan]) -> PagedPass:
        """See `Decoder.plan`."""
        rows = np.array([s.row for s in spans], dtype=np.int64)
        stops = np.array([s.stop for s in spans], dtype=np.int64)
        counts = np.array([s.end - s.begin for s in spans], dtype=np.int64)
        if (counts == 1).all():
            return self.plan_tokens(rows, stops - 1)
        tokens = np.zeros((3, int(counts.sum())), dtype=np.int64)
        tokens[0], tokens[1] = tokens_of(spans)
        return PagedPass(tokens, rows, stops, spans)

    def embed(self, token_ids: Sequence[int], batch: PagedPass) -> torch.Tensor:
        """See `Decoder.embed`."""
        batch.tokens[2], batch.on_device = token_ids, None
        tokens = self._on_device(batch)
        return embed(self.weights, tokens[2], tokens[1])

    def begin(self, token_ids: Sequence[int], batch: PagedPass, stop: int) -> torch.Tensor:
        """See `AnyDecoder.begin`; a graph embeds as well."""
        batch.tokens[2] = token_ids
        x = self._replayed(None, batch, 0, stop)
        return self.run_layers(self.embed(token_ids, batch), batch, 0, stop) if x is None else x

    def run_layers(self, x: torch.Tensor, batch: PagedPass, first: int, stop: int) -> torch.Tensor:
        """See `Decoder.run_layers`; good until the next pass."""
        replayed = self._replayed(x, batch, first, stop) if first else None
        if replayed is not None:
            return replayed
        self.cache.prepare(batch.rows, batch.stops, first, stop)
        self._looked = None
        if batch.spans is not None:
            return self._run_spans(x, batch, batch.spans, first, stop)
        return self.run_each(x, self._on_device(batch), first, stop, int(batch.stops.max()))

    def _replayed(
        self, x: torch.Tensor | None, batch: PagedPass, first: int, stop: int
    ) -> torch.Tensor | None:
        """`DecodeGraphs.run`; None where no graph covers the pass."""
        graphs = self.graphs if batch.spans is None else None
        if graphs is None or not graphs.covers(first, stop, len(batch.rows)):
            return None
        self.cache.prepare(batch.rows, batch.stops, first, stop)
        x, self._looked = graphs.run(x, batch.tokens, first, stop)
        return x

    def _on_device(self, batch: PagedPass) -> torch.Tensor:
        """See `PagedPass.on_device`."""
        if batch.on_device is None:
            batch.on_device = to_device(batch.tokens, self._device)
        return batch.on_device

    def run_each(
        self, x: torch.Tensor | None, tokens: torch.Tensor, first: int, stop: int, longest: int
    ) -> torch.Tensor:
        """Layers [first, stop) for single tokens whose pages are there; what graphs record.

        Args:
            x: [T, hidden]; None: the tokens are embedded.
            tokens: Rows, positions and, for that, token ids: int64 [3, T].
            longest: No token sees more positions.
        """
        if x is None:
            x = embed(self.weights, tokens[2], tokens[1])
        lengths = (tokens[1] + 1).int()

        def mix(q: torch.Tensor, table: torch.Tensor, window: int) -> torch.Tensor:
            kv = PagedKV(self.cache.keys, self.cache.values, table)
            return self.attention.each(q, kv, lengths, longest, window)

        return self._through(x, first, stop, self._bind(tokens, tokens[0], first, stop), mix)

    def _run_spans(
        self, x: torch.Tensor, batch: PagedPass, spans: Sequence[TokenSpan], first: int, stop: int
    ) -> torch.Tensor:
        """Layers [first, stop) for runs of tokens."""
        runs = batch.runs
        if runs is None:
            runs = batch.runs = Runs.of(spans, self.attention.block_queries, self._device)

        def mix(q: torch.Tensor, table: torch.Tensor, window: int) -> torch.Tensor:
            kv = PagedKV(self.cache.keys, self.cache.values, table)
            return self.attention.runs(q, kv, runs, window)

        tokens = self._on_device(batch)
        rows = tokens[0].index_select(0, runs.begins[:-1])
        return self._through(x, first, stop, self._bind(tokens, rows, first, stop), mix)

    def _through(
        self, x: torch.Tensor, first: int, stop: int, bound: _Bound, mix: _Mix
    ) -> torch.Tensor:
        """`run_layer` over a range of layers; norms are made where what precedes them is added."""
        layers, operations = self.weights.layers, self.operations
        if not self.config.pre_norm:

            def attend(i: int, h: torch.Tensor) -> torch.Tensor:
                return self._attend(i, bound, mix, linear(h, layers[i].qkv))

            for i in range(first, stop):
                x = run_layer(x, layers[i], self.config, partial(attend, i))
            return x
        more: torch.Tensor | None = None
        for i in range(first, stop):
            layer = layers[i]
            x, qkv = operations.project(x, more, layer.attn_norm, layer.qkv)
            added = operations.linear(self._attend(i, bound, mix, qkv), layer.out)
            x, inner = operations.open_mlp(x, added, layer.mlp_norm, layer.up)
            more = operations.linear(inner, layer.down)
        return x if more is None else x + more

    def _attend(self, i: int, bound: _Bound, mix: _Mix, qkv: torch.Tensor) -> torch.Tensor:
        """Store layer i's K and V; mix what Q sees."""
        layer, cache = self.weights.layers[i], self.cache
        store = Store(
            cache.flat(cache.keys),
            cache.flat(cache.values),
            bound.slots[i - bound.first],
            bound.positions,
            self._cos,
            self._sin,
        )
        q = self.operations.rotate_and_store(qkv, layer, store)
        return mix(q, bound.tables[i - bound.first], self.config.windows[i])

    def project_kv(
        self, x: torch.Tensor, batch: PagedPass, first: int, stop: int, depth: int
    ) -> None:
        """See `Decoder.project_kv`."""
        self.cache.prepare(batch.rows, batch.stops, first, stop)
        rows, positions = self._on_device(batch)[:2]
        if depth in self.folded:
            self._project_together(x, rows, positions, first, stop, depth)
            return
        cos = sin = None
        if self._cos is not None and self._sin is not None:
            cos, sin = self._cos[positions, None], self._sin[positions, None]
        slots = self.cache.slots(first, stop, rows, positions)
        for i in range(first, stop):
            kv_map, layer = self.weights.kv_maps[depth][i], self.weights.layers[i]
            self.cache.store(slots[i - first], *mapped_kv(x, kv_map, layer, cos, sin, self.config))

    def _project_together(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        first: int,
        stop: int,
        depth: int,
    ) -> None:
        """`project_kv` as one product and one store: a layer of a token counts as a token."""
        cache, by, count = self.cache, self.folded[depth], stop - first
        width = 2 * self.config.kv_size
        some = slice((first - depth) * width, (stop - depth) * width)
        part = Linear(by.weight[some], None if by.bias is None else by.bias[some])
        _, h = self.operations.add_norm(x, None, self._unit)
        store = Store(
            cache.flat(cache.keys),
            cache.flat(cache.values),
            cache.slots(first, stop, rows, positions).t().reshape(-1),
            positions.repeat_interleave(count, output_size=count * len(x)),
            self._cos,
            self._sin,
        )
        kv = linear(h, part).view(len(x) * count, width)
        self._of_kv.rotate_and_store(kv, self.weights.layers[first], store)

    def logits(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        """See `Decoder.logits`; good until the next pass."""
        looked = self._found(x, depth)
        if looked is not None:
            return looked.logits[: len(x)]
        return apply_head(x, self.weights.heads[depth], self.config)

    def best(self, x: torch.Tensor, depth: int) -> list[int]:
        """See `Decoder.best`; waits for the device."""
        ids: list[int] = self.candidates(x, depth).best.tolist()
        return ids

    def candidates(self, x: torch.Tensor, depth: int) -> Candidates:
        """See `Decoder.candidates`; waits for the device, once. Good until the next pass."""
        looked = self._found(x, depth)
        if looked is None:
            logits = x.new_empty(len(x), self.config.vocab_size, dtype=torch.float32)
            said = x.new_empty(len(x), SAYS, dtype=torch.float32)
            self.look(x, depth, logits, said)
        else:
            logits, said = looked.logits[: len(x)], looked.said[: len(x)]
        says: npt.NDArray[np.float32] = said.cpu().numpy()
        best = np.where(np.isfinite(says[:, 1]), says[:, 0], self.config.vocab_size)
        return Candidates(logits, best.astype(np.int64), says[:, 1:].copy())

    def look(self, x: torch.Tensor, depth: int, logits: torch.Tensor, said: torch.Tensor) -> None:
        """The exit's logits, float32, and what they say of themselves; what graphs record."""
        head = self.weights.heads[depth]
        self.operations.say(head.weight.linear(last_states(x, head, self.config)), logits, said)

    def _found(self, x: torch.Tensor, depth: int) -> Looked | None:
        """What the pass that left these states, or more behind them, has looked up already."""
        looked = self._looked
        if looked is None or looked.depth != depth or looked.hidden.data_ptr() != x.data_ptr():
            return None
        return looked

    def close(self) -> None:
        """Give the graphs' memory back."""
        if self.graphs is not None:
            self.graphs.close()

    def _bind(self, tokens: torch.Tensor, rows: torch.Tensor, first: int, stop: int) -> _Bound:
        """Look the tokens' slots and the sequences' pages up, for all layers at once."""
        slots = self.cache.slots(first, stop, tokens[0], tokens[1])
        return _Bound(first, tokens[1], slots, self.cache.table[first:stop].index_select(1, rows))
