"""A prefill pass in which every token goes as deep as it once went, and no deeper.

What a token skipped the first time is made up for as it was then (`engine/skipped_kv.py`), from the
same hidden state by the same map, only earlier: before the deeper tokens of the pass want it. A
token's stand-in depends on nothing but its own state, so when it is made does not matter, and the
KV is that of the sequence that was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quadriga.checkpoint.exits import SkippedKV
from quadriga.core.request import SequenceState
from quadriga.engine.early_exit.skipped_kv import SkippedKVStore
from quadriga.engine.kv_cache import Ints, KVCache
from quadriga.engine.models.decoder import AnyDecoder
from quadriga.engine.models.layers import TokenSpan, runs_of, tokens_of
from quadriga.engine.transfers import to_device
from quadriga.interfaces import LayersDone, PrefillChunk
from quadriga.scheduling.transfer.rebuild import Replays, depths_of


def recorded_depths(
    chunks: Sequence[PrefillChunk], ends: Sequence[int], mode: SkippedKV
) -> Ints | None:
    """Layers that each token of a prefill pass runs, chunk after chunk; None where all run all.

    A depth that is no exit here (the sequence comes from other exits) counts as the next deeper
    one. Replayed layers are the layers themselves: there is nothing to stand in for.

    Args:
        ends: Layers run at the end of each segment, ascending, the loaded depth last.
    """
    if mode == "replay" or len(ends) == 1 or all(c.depths is None for c in chunks):
        return None
    exits = np.asarray(ends, dtype=np.int64)
    full = exits[-1]
    recorded = np.concatenate(
        [np.full(len(c.token_ids), full) if c.depths is None else c.depths for c in chunks]
    )
    depths = exits[np.searchsorted(exits, np.minimum(recorded, full))]
    return None if (depths == full).all() else depths


class RecordedPass:
    """One pass over T tokens that stop at recorded depths.

    Args:
        spans: The tokens, sequence by sequence.
        depths: Layers each token runs: [T].
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        cache: KVCache,
        mode: SkippedKV,
        spans: Sequence[TokenSpan],
        depths: Ints,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._mode = mode
        self._depths = depths
        self._rows, self._positions = tokens_of(spans)

    def run(
        self, x: torch.Tensor, batch: Any, ends: Sequence[int], on_layers: LayersDone | None
    ) -> torch.Tensor:
        """Give all tokens their K and V in all layers.

        Args:
            x: The embedded tokens, [T, hidden]; overwritten.
            batch: The plan of a pass over all of them.
            ends: Layers run at the end of each segment; every depth is one of them.

        Returns:
            [T, hidden], each as it came out of the last layer it ran.
        """
        left = torch.empty_like(x)
        running = np.arange(len(self._depths))
        begin = 0
        for end in ends:
            goes_on = self._depths[running] > begin
            if not goes_on.all():
                _place(left, running[~goes_on], x, np.flatnonzero(~goes_on))
                x = x.index_select(0, _index(np.flatnonzero(goes_on), x))
                running = running[goes_on]
                if running.size:
                    runs = runs_of(self._rows[running], self._positions[running])
                    batch = self._decoder.plan(runs)
            # Before the layers run: tokens that go on attend to those that stopped.
            self._stand_in(left, begin, end)
            for layer in range(begin, end):
                if running.size:
                    x = self._decoder.run_layers(x, batch, layer, layer + 1)
                if on_layers is not None:
                    on_layers(layer, 1)
            begin = end
        _place(left, running, x, np.arange(len(running)))
        return left

    def _stand_in(self, left: torch.Tensor, first: int, stop: int) -> None:
        """Make up for K and V in layers [first, stop) of the tokens that stopped before them."""
        for depth in np.unique(self._depths[self._depths <= first]).tolist():
            of = np.flatnonzero(self._depths == depth)
            rows, positions = self._rows[of], self._positions[of]
            if self._mode in ("alias", "copy"):
                self._cache.copy_layers(rows, positions, depth - 1, first, stop)
                continue
            states = left.index_select(0, _index(of, left))
            plan = self._decoder.plan_tokens(rows, positions)
            self._decoder.project_kv(states, plan, first, stop, depth)


def _place(left: torch.Tensor, at: Ints, x: torch.Tensor, of: Ints) -> None:
    """Put states `of` x to where they belong in the whole pass."""
    left.index_copy_(0, _index(at, left), x.index_select(0, _index(of, x)))


def _index(of: Ints, like: torch.Tensor) -> torch.Tensor:
    return to_device(of, like.device)


def repay(
    decoder: AnyDecoder,
    cache: KVCache,
    store: SkippedKVStore,
    row: int,
    state: SequenceState,
    max_tokens: int,
    replays: Replays | None,
) -> int:
    """Run positions again that lack KV and left no state; return how many are still owed.

    The prompt goes through every layer. A token that was generated goes as deep as it once went,
    by itself or with a later one, and the layers behind are filled in as the store does it; under
    `replay` that is every layer.

    Args:
        max_tokens: Run no more positions than this, but for the newest, which are run together.
    """
    start, stop = store.owed(row)
    end = min(stop, start + max_tokens)
    if end <= start:
        return stop - start
    if replays is not None and stop - end <= replays.newest:
        end = stop
    token_ids = (state.prompt_ids + state.output_ids)[start:end]
    deepest = store.ends[-1]
    record = [*depths_of(state, deepest, replays), deepest]
    chunk = PrefillChunk(row, token_ids, start, is_last=False, depths=record[start:end])
    depths = recorded_depths([chunk], store.ends, store.mode)
    spans = [TokenSpan(row, 0, end - start, start)]
    batch = decoder.plan(spans)
    if depths is None:
        states = decoder.begin(token_ids, batch, deepest)
    else:
        x = decoder.embed(token_ids, batch)
        recorded = RecordedPass(decoder, cache, store.mode, spans, depths)
        states = recorded.run(x, batch, store.ends, None)
    store.paid(row, start, end, depths, states)
    return stop - end
