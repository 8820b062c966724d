"""The ranks of one tensor-parallel engine, and how rank 0 tells the others what to do.

An order is a header of integers that rank 0 broadcasts, and, where the header says so, tokens
(rows and positions) and hidden states. Orders come from a fixed table and hold numbers alone;
nothing is unpickled. All ranks then meet in the order's own collectives, in the same order.

Every wait has a deadline. Rank 0 sends a pulse while it has nothing else to say, so that a silent
rank is told from an idle one; an operation that fails half-way leaves the ranks out of step, so the
first failure is the end of all of them.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

from quadriga.engine.kv_cache import Ints
from quadriga.process_groups import make_group

dist: Any = torch.distributed  # its classes are made in C++ and unknown to type checkers

SILENCE_TIMEOUT_S = 30.0
"""A rank that does not take part for so long is lost, and all others with it."""
PULSE_S = SILENCE_TIMEOUT_S / 6
NUM_ARGUMENTS = 6
_NUMBERS = 5 + NUM_ARGUMENTS


class Op(enum.IntEnum):
    """What rank 0 may order."""

    PULSE = 0
    END = 1
    EMBED = 2
    LAYERS = 3
    PROJECT_KV = 4
    LOGITS = 5
    COPY_LAYERS = 6
    READ = 7
    WRITE = 8
    RELEASE = 9
    KEEP = 10
    SHARE = 11
    FORGET = 12


class RanksLost(RuntimeError):
    """A rank died, fell silent or failed: this engine is of no more use."""


class Tokens:
    """The tokens of a pass.

    Attributes:
        rows, positions: int64 [T].
        plan: Of this rank's decoder; None until it is made.
    """

    def __init__(self, rows: Ints, positions: Ints) -> None:
        self.rows = rows
        self.positions = positions
        self.plan: Any = None


class Order:
    """An order as a rank hears it.

    Attributes:
        numbers: The operation's own.
        tokens, states: Of the order, or what was told or computed last; states [n, width].
    """

    __slots__ = ("numbers", "op", "states", "tokens")

    def __init__(
        self, op: Op, numbers: Sequence[int], tokens: Tokens | None, states: torch.Tensor | None
    ) -> None:
        self.op = op
        self.numbers = numbers
        self.tokens = tokens
        self.states = states


class Ranks:
    """This process's place among the ranks.

    Args:
        store: Where they meet.
        host: The address at which the others reach this rank.
        dtype: Of hidden states.

    Attributes:
        lost: Called once, from any thread, when the ranks are of no more use.
    """

    def __init__(self, store: Any, *, rank: int, size: int, host: str, dtype: torch.dtype) -> None:
        self.rank = rank
        self.size = size
        self.lost: Callable[[str], None] = lambda reason: None
        self._group = make_group(
            store, "ranks", rank=rank, size=size, host=host, timeout_s=SILENCE_TIMEOUT_S
        )
        self._timeout = timedelta(seconds=SILENCE_TIMEOUT_S)
        self._dtype = dtype
        self._lock = threading.RLock()
        self._reason: str | None = None
        self._is_over = threading.Event()
        # What all ranks have: it is not sent again.
        self._tokens: Tokens | None = None
        self._states: torch.Tensor | None = None
        if rank == 0:
            threading.Thread(target=self._pulse, name="ranks-pulse", daemon=True).start()

    # Collectives; inside an order only.

    def total(self, summands: torch.Tensor) -> torch.Tensor:
        """Add up in place numbers of which one rank at most has one that is not zero.

        The sum of others would depend on their order, which gloo chooses.
        """
        self._wait(self._group.allreduce([summands]))
        return summands

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        """The columns [T, n] that each rank has, side by side: [T, size · n], on each of them."""
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(self._group.allgather([found], [mine]))
        return torch.cat(found, dim=-1)

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has, of one shape: at rank 0; nothing elsewhere."""
        options = dist.GatherOptions()
        options.rootRank = 0
        found = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else []
        self._wait(self._group.gather([found] if found else [], [mine], options))
        return found

    def scatter(self, parts: Sequence[torch.Tensor], mine: torch.Tensor) -> torch.Tensor:
        """Fill `mine` with this rank's part of what rank 0 has; `parts` is empty elsewhere."""
        options = dist.ScatterOptions()
        options.rootRank = 0
        self._wait(self._group.scatter([mine], [list(parts)] if parts else [], options))
        return mine

    def broadcast(self, data: torch.Tensor) -> torch.Tensor:
        """Rank 0's data, in place."""
        self._wait(self._group.broadcast(data, 0))
        return data

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)

    # Rank 0.

    @contextmanager
    def order(
        self,
        op: Op,
        *numbers: int,
        tokens: Tokens | None = None,
        states: torch.Tensor | None = None,
    ) -> Iterator[None]:
        """Tell the others to do an operation; its context does rank 0's part.

        One order at a time, from whatever thread.

        Raises:
            RanksLost: It failed, or one before it. What interrupts it is raised as it is.
        """
        with self._lock:
            if self._reason is not None:
                raise RanksLost(self._reason)
            try:
                self._tell(op, numbers, tokens, states)
                yield
            except BaseException as exc:
                self._fail(f"{op.name.lower()}: {str(exc).splitlines()[0] if str(exc) else exc!r}")
                if not isinstance(exc, Exception):
                    raise
                raise RanksLost(self._reason) from exc

    def computed(self, states: torch.Tensor) -> torch.Tensor:
        """Note hidden states that an operation left on every rank."""
        self._states = states
        return states

    def close(self) -> None:
        """Let the other ranks end; may be repeated."""
        with self._lock:
            with suppress(RanksLost), self.order(Op.END):  # who is lost is over
                pass
            self._reason = self._reason or "closed"
            self._is_over.set()
            self._group = None  # its thread, which lets go of tensors, ends before Python does

    def _tell(
        self, op: Op, numbers: Sequence[int], tokens: Tokens | None, states: torch.Tensor | None
    ) -> None:
        news = tokens if tokens is not None and tokens is not self._tokens else None
        fresh = states if states is not None and states is not self._states else None
        header = torch.zeros(_NUMBERS, dtype=torch.int64)
        header[:5] = torch.tensor(
            (
                op,
                0 if news is None else len(news.rows),
                fresh is not None,
                *((0, 0) if fresh is None else fresh.shape),
            )
        )
        if numbers:
            header[5 : 5 + len(numbers)] = torch.tensor(numbers)
        self.broadcast(header)
        if news is not None:
            self.broadcast(torch.from_numpy(np.stack([news.rows, news.positions])))
            self._tokens = news
        if fresh is not None:
            self.broadcast(fresh.contiguous())
            self._states = fresh

    def _pulse(self) -> None:
        while not self._is_over.wait(PULSE_S):
            try:
                with self.order(Op.PULSE):
                    self.total(torch.zeros(1))
            except RanksLost:
                return

    def _fail(self, reason: str) -> None:
        self._reason = f"the ranks of this engine are out of step: {reason}"
        self._is_over.set()
        self.lost(self._reason)

    # The others.

    def hear(self) -> Order:
        """Wait for rank 0's next order. Raises: RuntimeError: It died or fell silent."""
        header = self.broadcast(torch.zeros(_NUMBERS, dtype=torch.int64)).tolist()
        op, num_tokens, has_states, num_states, width, *numbers = header
        if num_tokens:
            where = self.broadcast(torch.empty(2, num_tokens, dtype=torch.int64)).numpy()
            self._tokens = Tokens(where[0], where[1])
        if has_states:
            self._states = self.broadcast(torch.empty(num_states, width, dtype=self._dtype))
        return Order(Op(op), numbers, self._tokens, self._states)
