"""Decode passes as graphs: recorded once per range of segments and batch size, then replayed.

All are recorded before the first request. A pass's graph ends with the exit behind it: its logits
and what they say are in buffers when the pass is over.

On a GPU a decode pass of a small model is a few hundred launches of a few microseconds each; a
graph is one. It repeats what was recorded to the letter: the same kernels on the same addresses.
So a pass's inputs are copied into buffers that stay; a batch is padded to the next size (1, 2, 4,
8, … and the most) with tokens of a row that belongs to no sequence; and what embeds the tokens and
where they lie is looked up inside the graph: a step from layer 0 brings its rows, positions and
token ids in one copy, and launches nothing else.

All graphs share one memory pool. They may, because they run one after the other on one stream and
leave nothing in it: the result is copied to a buffer outside, which the next pass overwrites.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import numpy as np
import torch

from quadriga.engine.cuda.operations import SAYS
from quadriga.engine.kv_cache import Ints
from quadriga.engine.transfers import copy_over

logger = logging.getLogger(__name__)

MAX_GRAPHS = 1024


RunEach = Callable[[torch.Tensor | None, torch.Tensor, int, int, int], torch.Tensor]
"""`PagedDecoder.run_each`."""


Look = Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor], None]
"""`PagedDecoder.look`."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What an exit says of a pass's tokens; good until the next pass.

    Attributes:
        hidden: With which the tokens left, [n, hidden].
        depth: Layers run.
        logits: float32 [n, vocab].
        said: See `operations.SAYS`: float32 [n, SAYS].
    """

    hidden: torch.Tensor
    depth: int
    logits: torch.Tensor
    said: torch.Tensor


class GraphRecorder(Protocol):
    """Records work on fixed addresses."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work, record it, and return what repeats it."""

    def close(self) -> None:
        """Release everything recorded."""


class CudaRecorder:
    """CUDA graphs.

    The first run, on the stream that records afterwards, compiles kernels and lets libraries make
    their handles and workspaces, which is not allowed under recording. `thread_local`: other
    threads, which copy KV, may allocate meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `GraphRecorder.record`. Raises: RuntimeError: CUDA or torch would not."""
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                work()
            current.wait_stream(self._stream)
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        finally:
            torch.cuda.set_stream(current)  # torch stays on the other one when a capture fails
        self._graphs.append(graph)
        return graph.replay

    def close(self) -> None:
        """See `GraphRecorder.close`."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


class DecodeGraphs:
    """Recorded passes of single tokens, and the buffers they work on.

    Args:
        run_each: Runs layers on (hidden, where, first, stop, longest); reads and writes nothing
            but device memory that stays where it is.
        look: Runs the exit behind a pass; None: nothing is looked up.
        segment_ends: Passes start and stop at these layers, or start at 0; no others are covered.
        max_rows: Most tokens of a pass that starts at 0, and of one whose exit is looked up.
        max_tokens: Most tokens of a pass through later segments alone, where skipped and drafted
            tokens go along.
        capacity: Most positions a token sees: a graph has to assume them.
        padding_row: Row of the tokens that fill a batch up.
    """

    def __init__(
        self,
        run_each: RunEach,
        recorder: GraphRecorder,
        *,
        look: Look | None = None,
        segment_ends: Sequence[int],
        max_rows: int,
        max_tokens: int = 0,
        hidden_size: int,
        vocab_size: int = 0,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int,
        padding_row: int,
    ) -> None:
        self._run_each = run_each
        self._recorder = recorder
        self._borders = frozenset((0, *segment_ends))
        self._max_rows = max_rows
        self._sizes = batch_sizes(max_rows, max(max_rows, max_tokens))
        self._size_of = [next(s for s in self._sizes if s >= n) for n in range(self._sizes[-1] + 1)]
        self._capacity = capacity
        self._padding_row = padding_row
        # The input is the output too: a pass may begin where the one before it ended.
        most = self._sizes[-1]
        self._hidden = torch.zeros(most, hidden_size, dtype=dtype, device=device)
        # Of each size, in one piece: [3, size].
        tokens = torch.zeros(3 * most, dtype=torch.int64, device=device)
        self._tokens = {size: tokens[: 3 * size].view(3, size) for size in self._sizes}
        self._look = look
        looked = max_rows if look is not None else 0
        self._logits = torch.zeros(looked, vocab_size, dtype=torch.float32, device=device)
        self._said = torch.zeros(looked, SAYS, dtype=torch.float32, device=device)
        self._replays: dict[tuple[int, int, int], Callable[[], None]] = {}
        self._may_record = True

    @property
    def num_recorded(self) -> int:
        return len(self._replays)

    def covers(self, first: int, stop: int, count: int) -> bool:
        """Whether a pass of `count` tokens through layers [first, stop) can run here."""
        if not 0 < count <= (self._sizes[-1] if first else self._max_rows):
            return False
        if first not in self._borders or stop not in self._borders:
            return False
        if (first, stop, self._size_of[count]) in self._replays:
            return True
        return self._may_record and len(self._replays) < MAX_GRAPHS

    def run(
        self, x: torch.Tensor | None, tokens: Ints, first: int, stop: int
    ) -> tuple[torch.Tensor, Looked | None]:
        """Run a pass that `covers`; the tokens' pages are there and in the device's table.

        The first of its kind is recorded, which takes about as long as a hundred others.

        Args:
            x: [n, hidden]; None where `first` is 0: the tokens are embedded.
            tokens: Rows, positions and token ids, int64 [3, n]; the ids count at layer 0.

        Returns:
            [n, hidden] and what the exit behind it says, both good until the next pass.
        """
        count = tokens.shape[1]
        size = self._size_of[count]
        if count < size:
            padded = np.zeros((3, size), dtype=np.int64)
            padded[0, count:] = self._padding_row
            padded[:, :count] = tokens
            tokens = padded
        copy_over(tokens, self._tokens[size])
        if x is not None:
            self._hidden[:count].copy_(x)
            if count < size:
                self._hidden[count:size].zero_()
        replay = self._replays.get((first, stop, size)) or self._record(first, stop, size)
        replay()
        x = self._hidden[:count]
        if not self._looks(size):
            return x, None
        return x, Looked(x, stop, self._logits[:count], self._said[:count])

    def _looks(self, size: int) -> bool:
        return self._look is not None and size <= self._max_rows

    def record_all(self) -> None:
        """Record every range of segments at every size: nothing is left for later.

        The largest first: what they leave in the memory that graphs share is enough for the others.
        """
        for first, stop in combinations(sorted(self._borders), 2):
            for size in reversed(self._sizes):
                if self.covers(first, stop, size):
                    padding = np.zeros((3, size), dtype=np.int64)
                    padding[0] = self._padding_row
                    x = torch.zeros_like(self._hidden[:size]) if first else None
                    self.run(x, padding, first, stop)

    def close(self) -> None:
        """Release the graphs; passes run without from now on."""
        self._may_record = False
        self._replays.clear()
        self._recorder.close()

    def _record(self, first: int, stop: int, size: int) -> Callable[[], None]:
        """Record a pass on the inputs that are in the buffers; return what runs it.

        A GPU that cannot record serves all the same, slower; the log says why.
        """
        hidden, tokens = self._hidden[:size], self._tokens[size]
        before = hidden.clone()

        def work() -> None:
            given = hidden if first else None
            x = self._run_each(given, tokens, first, stop, self._capacity)
            if self._look is not None and self._looks(size):
                self._look(x, stop, self._logits[:size], self._said[:size])
            hidden.copy_(x)

        replay = work
        try:
            replay = self._replays[first, stop, size] = self._recorder.record(work)
            logger.debug("recorded layers %d..%d for %d tokens", first + 1, stop, size)
        except RuntimeError as exc:  # what torch raises for all that CUDA refuses
            self._may_record = False
            logger.warning(
                "no more graphs: layers %d..%d for %d tokens could not be recorded: %s",
                first + 1,
                stop,
                size,
                exc,
            )
        # Recording ran the pass once, over its own input. What it stored of K and V will be stored
        # again, the same.
        hidden.copy_(before)
        return replay


def batch_sizes(*most: int) -> tuple[int, ...]:
    """Sizes that batches are padded to: powers of two, and each of the most."""
    powers = (1 << i for i in range(max(most).bit_length()))
    return tuple(sorted({*powers, *most}))
