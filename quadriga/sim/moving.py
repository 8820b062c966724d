"""Migrations in a simulation: reserve, copy while the source decodes on, stop, hand over.

What was generated during a copy is copied in another round, until the rest is little against the
round trip of the last one. One that is paused, from the start or meanwhile, generates nothing and
is handed over when its copy is there.

Two-phase as on the cluster: the destination holds room from the order on, the source keeps the
sequence until its last step, and a death before that, or a preemption that drops the KV, gives the
move up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quadriga.core.migration import MigrationOrder
from quadriga.policies.ares.settings import LinkMeter, TransferCosts
from quadriga.sim.board import Board
from quadriga.sim.config import SimConfig
from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.records import Sequence
from quadriga.sim.results import Moved, SimulatedRun

MAX_ROUNDS = 8
REST_SHARE = 0.1
"""Of the round trip: what the last copy, with the sequence at rest, may add to it."""


@dataclass(slots=True)
class Transfer:
    """A migration under way; `left_s` is set once the source let go."""

    order: MigrationOrder
    source: int
    destination: int
    copied_tokens: int
    started_s: float
    sending_s: float = 0.0
    rounds: int = 1
    left_s: float | None = None


class Moving:
    """All migrations under way.

    Args:
        changed: Notify the cluster that a replica's state changed.
        at: Have the cluster call something at a time.
    """

    def __init__(
        self,
        config: SimConfig,
        board: Board,
        replicas: list[SimulatedDecodeReplica],
        run: SimulatedRun,
        *,
        changed: Callable[[int], None],
        at: Callable[..., None],
    ) -> None:
        self._config, self._board, self._replicas, self._run = config, board, replicas, run
        self._changed, self._at = changed, at
        self._link = config.link
        self._meter = LinkMeter()
        self._index = {name: i for i, name in enumerate(board.names)}
        self._transfers: dict[int, Transfer] = {}

    @property
    def busy(self) -> frozenset[str]:
        """Names of the replicas that take part in a migration."""
        orders = [transfer.order for transfer in self._transfers.values()]
        return frozenset(name for order in orders for name in (order.source, order.destination))

    @property
    def costs(self) -> TransferCosts:
        """What a move is thought to cost."""
        if self._config.learns_link:
            return self._meter.costs(self._config.profile.kv_bytes_per_token)
        return self._link

    def is_moving(self, index: int) -> bool:
        """Whether a sequence is on its way."""
        return index in self._transfers

    def num_leaving(self, replica: int) -> int:
        """Sequences on their way from a replica."""
        return sum(t.source == replica for t in self._transfers.values())

    def start(self, now_s: float, order: MigrationOrder) -> None:
        """Reserve at the destination and begin to copy."""
        index = int(order.sequence_id)
        source, destination = self._index[order.source], self._index[order.destination]
        transfer = Transfer(order, source, destination, order.num_tokens, now_s)
        self._transfers[index] = transfer
        copy_s = self._link.seconds(order.num_tokens) - self._link.round_trip_s
        # Room for what it grows by meanwhile, too; the copy holds what there was at the start.
        growth = math.ceil(copy_s / self._config.profile.step.base_s)
        self._replicas[destination].promised[index] = order.num_tokens + growth
        self._changed(destination)
        if self._config.precopy:
            transfer.sending_s = copy_s
            self._at(now_s + copy_s, self._copied, index, transfer)
        else:
            transfer.copied_tokens = 0
            self._copied(now_s, index, transfer)

    def _copied(self, now_s: float, index: int, transfer: Transfer) -> None:
        """But for the last tokens all is there: the source stops at its next boundary."""
        if self._transfers.get(index) is not transfer:
            return
        source = self._replicas[transfer.source]
        if self._board.is_paused[index]:
            self.hand_over(now_s, source.release(index))
            self._changed(transfer.source)
            return
        if index not in source.running:
            self.give_up(index)  # on its way back from host memory
            return
        if self._config.precopy and transfer.rounds < MAX_ROUNDS:
            rest = self._tokens(now_s, index) - transfer.copied_tokens
            copy_s = self._link.seconds(rest) - self._link.round_trip_s
            if copy_s > REST_SHARE * self._link.round_trip_s:
                transfer.copied_tokens += rest
                transfer.rounds += 1
                transfer.sending_s += copy_s
                self._at(now_s + copy_s, self._copied, index, transfer)
                return
        source.leave(index, from_s=now_s)
        self._changed(transfer.source)

    def _tokens(self, now_s: float, index: int) -> int:
        """Size of a running sequence."""
        new_steps = self._board.new_steps(now_s)
        return int(self._board.tokens_of(np.array([index]), new_steps)[0])

    def hand_over(self, now_s: float, sequence: Sequence) -> None:
        """The source let go; what the copy lacks follows, then the destination goes on."""
        transfer = self._transfers[sequence.index]
        rest = max(0, sequence.tokens - transfer.copied_tokens)
        transfer.copied_tokens, transfer.left_s = sequence.tokens, now_s
        transfer.sending_s += self._link.seconds(rest) - self._link.round_trip_s
        board = self._board
        board.give(sequence.index, transfer.destination)
        board.is_running[sequence.index] = board.is_paused[sequence.index] = False
        board.base[sequence.index] = sequence.tokens
        board.moves[sequence.index] += 1
        board.moved_s[sequence.index] = now_s
        self._replicas[transfer.destination].join(
            sequence, ready_s=now_s + self._link.seconds(rest)
        )
        self._changed(transfer.destination)

    def joined(self, at_s: float, index: int) -> None:
        """A sequence runs again; if it was on its way, it has arrived."""
        transfer = self._transfers.get(index)
        if transfer is None or transfer.left_s is None:
            return
        del self._transfers[index]
        num_bytes = transfer.copied_tokens * self._config.profile.kv_bytes_per_token
        self._meter.moved(num_bytes, at_s - transfer.started_s, transfer.sending_s)
        self._run.migrations.append(
            Moved(
                request=index,
                source=transfer.source,
                destination=transfer.destination,
                cause=str(transfer.order.cause),
                started_s=transfer.started_s,
                stall_s=at_s - transfer.left_s,
                num_tokens=transfer.copied_tokens,
            )
        )

    def give_up(self, index: int) -> None:
        """End a migration whose source still has the sequence, or had it to its end."""
        transfer = self._transfers.get(index)
        if transfer is None or transfer.left_s is not None:
            return
        del self._transfers[index]
        self._run.num_cancelled += 1
        self._replicas[transfer.source].stay(index)
        self._changed(transfer.source)
        self._replicas[transfer.destination].promised.pop(index, None)
        self._changed(transfer.destination)

    def replica_died(self, replica: int) -> None:
        """Give up what it took part in and was not handed over; call before it is emptied."""
        for index, transfer in list(self._transfers.items()):
            if transfer.left_s is None and replica in (transfer.source, transfer.destination):
                self.give_up(index)

    def lost(self, index: int) -> None:
        """A sequence died with the replica that held it, perhaps just handed over."""
        if self._transfers.pop(index, None) is not None:
            self._run.num_cancelled += 1
