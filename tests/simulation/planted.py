"""Faults put into the product's code, each of which some run of the simulated cluster must find.

`python -m tests.simulation.planted` says after how many seeds each is found.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from actors.controller import placement_groups
from actors.controller.controller import Controller
from actors.controller.replica_manager import ReplicaManager
from actors.kv_transfer.handoff_sender import OutgoingTransfer
from actors.kv_transfer.migration import Migration
from actors.metrics.metrics_page import MetricsPage
from actors.replica.decode import DecodeReplica
from actors.replica.prefill import PrefillReplica
from actors.replica.replica import Replica
from actors.rpc import rpc_batcher
from actors.scheduler.scheduler import Scheduler
from quadriga.client.base import Deadline
from quadriga.errors import QuadrigaError
from quadriga.policies import inflight_tracker
from quadriga.policies.ares.orders import MoveTracker
from quadriga.policies.inflight_tracker import InflightTracker
from quadriga.policies.retry_reservations import RetryReservations
from quadriga.replica import handoff_receiver
from quadriga.replica.handoff_receiver import HandoffReceiver
from quadriga.scheduling import preemption
from quadriga.scheduling.output_dispatcher import OutputDispatcher
from quadriga.scheduling.transfer.handoff import LeaseState, LeaseTable
from quadriga.scheduling.transfer.placement_turns import PlacementTurns
from serve_app.auth.rate_limiter import RateLimiter
from serve_app.grpc import server
from serve_app.request import cluster_client, output_poller, request_manager
from serve_app.request.engine_client import EngineClient
from serve_app.request.request_manager import RequestManager
from serve_app.request.sequence_request import SequenceRequest


async def settles_blindly(self: OutgoingTransfer) -> LeaseState:
    """A destination that does not answer is thought to have nothing."""
    try:
        return await self.settle()
    except QuadrigaError:
        return LeaseState.ABORTED


async def _aborts_without_freeing(
    self: HandoffReceiver, transfer_id: str, end: LeaseState = LeaseState.ABORTED
) -> LeaseState | None:
    self.leases.abort(transfer_id, end)
    return self.leases.state(transfer_id)


_collect = OutputDispatcher.collect


def _collects_once(self: OutputDispatcher, ingress_id: str, ack: int, **only: bool) -> Any:
    reply = _collect(self, ingress_id, ack, **only)
    log = self._log_of(ingress_id)
    log.entries.clear()
    return reply


_accept = SequenceRequest.accept


def _believes_everybody(self: SequenceRequest, replica: str, output: Any) -> int:
    if not self.done and output.move is None and output.epoch == self.state.epoch:
        self.replica = replica
    return _accept(self, replica, output)


def _ignores_epochs(self: SequenceRequest, replica: str, output: Any) -> int:
    output.epoch = max(output.epoch, self.state.epoch)
    return _accept(self, replica, output)


def _nothing(*_: Any, **__: Any) -> None:
    pass


async def _no_task(*_: Any, **__: Any) -> None:
    pass


async def _forgets_what_runs(self: DecodeReplica, ids: Any, ingress_id: str | None) -> None:
    self.departed.cancel(ids)


async def _cancels_the_queue_alone(self: PrefillReplica, ids: Any, ingress_id: str | None) -> None:
    self.departed.cancel(ids)
    for sequence_id in ids:
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is not None and sequence.handoff is not None:
            sequence.handoff.task.cancel()
    await self.engine.call(lambda core: [core.loop.release(i) for i in ids])


_retire = RequestManager.retire


def _retires_without_freeing(self: RequestManager, sequence: Any, *, cancel: bool) -> None:
    _retire(self, sequence, cancel=False)


_rename = RequestManager._rename


def _renames_silently(self: RequestManager, sequence: Any, others: Any = ()) -> str:
    cancel, self.cancellations.cancel = self.cancellations.cancel, _nothing  # type: ignore[assignment]
    try:
        return _rename(self, sequence, others)
    finally:
        self.cancellations.cancel = cancel  # type: ignore[method-assign]


def _one_head_for_ever(self: PlacementTurns) -> None:
    for head in self._heads()[:1]:
        if head.turn is not None and head.order == 0:
            head.turn.set()


async def _lets_go_of_nothing(self: Migration, state: Any, transfer: Any) -> None:
    pass


async def _adopts_nothing(self: Controller) -> None:
    pass


async def _goes_on_beside(self: Migration, state: Any, transfer: Any) -> None:
    await self._go_on(state, transfer, None)
    self._conclude("moved", "")


def _collects_all(self: OutputDispatcher, ingress_id: str, ack: int, **only: bool) -> Any:
    return _collect(self, ingress_id, 0, **only)


_ask = RetryReservations.ask


def _knows_nobody(self: RetryReservations, visitor: str, *args: Any, **options: Any) -> Any:
    return _ask(self, "", *args, **options)


async def _restores_nothing(self: MetricsPage) -> None:
    self.is_restored.set()


def _never(self: ReplicaManager, key: Any) -> bool:
    return not self.num_respawns


def _first_cursor(message: Any, request: Any) -> list[int]:
    return [0] * len(request.sequences)


PLANTED: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "silence is taken for an abort": ((OutgoingTransfer, "abort", settles_blindly),),
    "an abort keeps the row": ((HandoffReceiver, "abort", _aborts_without_freeing),),
    "leases never lapse": ((LeaseTable, "lapse", lambda self, *, now_s: []),),
    "a cancellation is told once": ((rpc_batcher, "TELL_TRIES", 1),),
    "a row is not released when the hand-off ends": ((LeaseTable, "freed", _nothing),),
    "outputs are dropped when they are sent, not when they are acknowledged": (
        (OutputDispatcher, "collect", _collects_once),
    ),
    "an ingress believes every speaker of an epoch": (
        (SequenceRequest, "accept", _believes_everybody),
    ),
    "an ingress ignores epochs": ((SequenceRequest, "accept", _ignores_epochs),),
    "KV is not compared with its checksum": ((handoff_receiver, "checksum", lambda kv: 0),),
    "a decode replica cancels only what comes later": (
        (DecodeReplica, "_cancel", _forgets_what_runs),
    ),
    "a prefill replica does not pass a cancellation on": (
        (PrefillReplica, "_cancel", _cancels_the_queue_alone),
    ),
    "an ingress does not free what its clients have left": (
        (RequestManager, "retire", _retires_without_freeing),
    ),
    "the old name of a rebuilt sequence is not cancelled": (
        (RequestManager, "_rename", _renames_silently),
    ),
    "silent replicas are not given up": (
        (request_manager, "silent_replicas", lambda *_, **__: []),
    ),
    "silent sequences are not audited": ((request_manager, "AUDIT_AFTER_S", 1e9),),
    "a turn to ask for a place is not passed on": (
        (PlacementTurns, "call_heads", _one_head_for_ever),
    ),
    "the source of a move keeps its row": ((Migration, "_let_go", _lets_go_of_nothing),),
    "a new controller adopts nobody": ((Controller, "_adopt", _adopts_nothing),),
    "dead replicas are not replaced": ((ReplicaManager, "may_spawn", _never),),
    "a resumed stream begins anew": ((server, "_resume_cursors", _first_cursor),),
    "a gap between two owners is not closed": ((RequestManager, "_close_gap", _nothing),),
    "sequences of ingresses that are gone go on": ((Replica, "_cancel_abandoned", _no_task),),
    "a replica started anew is taken for the old one": (
        (output_poller.OutputPoller, "_give_up", _nothing),
    ),
    "a request nobody reads is kept": ((EngineClient, "leave", _nothing),),
    "the source of a move goes on beside its destination": (
        (Migration, "_let_go", _goes_on_beside),
    ),
    "the scheduler counts what is over as on its way": (
        (InflightTracker, "finished", _nothing),
        (InflightTracker, "reported", _nothing),
        (inflight_tracker, "UNSEEN_MAX_S", 1e9),
    ),
    "an order to move that is over is kept": ((MoveTracker, "ended", _nothing),),
    "acknowledged outputs are kept": ((OutputDispatcher, "collect", _collects_all),),
    "a request's place under its key is kept": ((RateLimiter, "end", _nothing),),
    "placement groups of dead replicas are kept": ((placement_groups, "_group", _nothing),),
    "the SDK does not keep deadlines": (
        (Deadline, "left_s", lambda self: 60.0),
        (Deadline, "allows", lambda self, pause_s: True),
    ),
    "a paused sequence does not come back": ((preemption, "choose_return", lambda *_: None),),
    "no place is kept for who is told to come back": ((RetryReservations, "ask", _knows_nobody),),
    "a new controller's counters begin at zero": ((MetricsPage, "restore", _restores_nothing),),
    "requests are sent to a replica whose engine has failed": (
        (Scheduler, "replica_died", _no_task),
        (cluster_client, "LOST_S", -1.0),
    ),
}
"""What is wrong, and what is put where: (owner, name, instead)."""

MAX_SEEDS = 5000


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Run the product with one of `PLANTED`; None: as it is."""
    with ExitStack() as stack:
        for where, attribute, instead in PLANTED[name] if name is not None else ():
            stack.enter_context(patch.object(where, attribute, instead))
        yield


def seeds_until_found(name: str, most: int = MAX_SEEDS) -> tuple[int, str] | None:
    """(number of seeds run until one failed, what broke); None where none did."""
    from tests.simulation.cluster import run
    from tests.simulation.plans import plan

    with planted(name):
        for seed in range(most):
            failures = run(plan(seed), lambda _: True).failures
            if failures:
                return seed + 1, failures[0]
    return None


def main(argv: Sequence[str] | None = None) -> None:
    """Look for each fault, or for those named."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a fault; all by default")
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS, help="at most so many of each")
    options = parser.parse_args(argv)
    for name in options.names or PLANTED:
        found = seeds_until_found(name, options.seeds)
        said = f"found after {found[0]}: {found[1][:150]}" if found else "NOT FOUND"
        print(f"{name}: {said}", flush=True)


if __name__ == "__main__":
    main()
