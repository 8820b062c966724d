"""The interface of attention over paged KV, and the runs of queries that a pass gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quadriga.engine.models.layers import TokenSpan
from quadriga.engine.transfers import to_device


@dataclass(frozen=True, slots=True)
class Runs:
    """Queries in runs, each of consecutive positions of one sequence, up to its newest.

    Attributes:
        spans: On the host; the runs lie one behind the other.
        begins: First query of each run, and one past the last: int32 [runs + 1].
        lengths: Positions to read, the run's own included: int32 [runs].
        length_sums: Of the runs before: int32 [runs + 1].
        longest_run, longest: Of the queries, of the positions.
        block_runs, block_begins: The queries in blocks of the size that the kernel wants; each
            block's run and first query: int32 [blocks].
    """

    spans: Sequence[TokenSpan]
    begins: torch.Tensor
    lengths: torch.Tensor
    length_sums: torch.Tensor
    longest_run: int
    longest: int
    block_runs: torch.Tensor
    block_begins: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[TokenSpan], block_queries: int, device: torch.device) -> Runs:
        """Lay the spans' queries out; one copy to the device."""
        ends = np.array([s.end for s in spans], dtype=np.int32)
        begins = np.concatenate([[0], ends]).astype(np.int32)
        lengths = np.array([s.stop for s in spans], dtype=np.int32)
        sums = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        counts = -(-np.diff(begins) // block_queries)
        block_runs = np.repeat(np.arange(len(spans), dtype=np.int32), counts)
        within = np.arange(block_runs.size) - np.repeat(np.cumsum(counts) - counts, counts)
        block_begins = (begins[block_runs] + within * block_queries).astype(np.int32)
        parts = [begins, lengths, sums, block_runs, block_begins]
        # Each begins at a multiple of 16 bytes: kernels are compiled anew for other alignments.
        padded = [np.pad(p, (0, -p.size % 4)) for p in parts]
        packed = to_device(np.concatenate(padded), device)
        pieces = torch.split(packed, [p.size for p in padded])
        on_device = [piece[: p.size] for piece, p in zip(pieces, parts, strict=True)]
        return cls(
            spans=spans,
            begins=on_device[0],
            lengths=on_device[1],
            length_sums=on_device[2],
            longest_run=int(np.diff(begins).max()),
            longest=int(lengths.max()),
            block_runs=on_device[3],
            block_begins=on_device[4],
        )


class PagedKV(NamedTuple):
    """KV of one layer in pages, and whose they are.

    Attributes:
        keys, values: The pools [pages, page_tokens, num_kv_heads, head_dim].
        table: The layer's pages, int32 [sequences, num_blocks].
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor


class PagedAttention(Protocol):
    """Mixes the values that queries see.

    Everywhere q is [T, num_heads, head_dim], rotated and not scaled; `window` is how many positions
    a query sees, itself included, 0 is all. The result is [T, num_heads · head_dim].
    """

    name: str
    block_queries: int
    """Queries in a block of `Runs`."""
    in_graphs: bool
    """Its cost does not grow with the `longest` that a graph must assume."""

    def each(
        self, q: torch.Tensor, kv: PagedKV, lengths: torch.Tensor, longest: int, window: int
    ) -> torch.Tensor:
        """One query of each sequence, at the end of the positions it sees.

        Args:
            lengths: How many positions those are, without the window: int32 [T].
            longest: None is greater.

        Nothing on the host depends on what is on the device: it may be recorded into a graph.
        """

    def runs(self, q: torch.Tensor, kv: PagedKV, runs: Runs, window: int) -> torch.Tensor:
        """Runs of queries; `kv.table` has a row a run."""
