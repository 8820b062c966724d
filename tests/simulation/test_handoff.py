"""Every way in which a hand-off can go wrong, up to a number of faults, with the code that ships.

`python -m tests.simulation.test_handoff 3` explores one fault more than the suite does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from actors.kv_transfer.handoff_sender import OutgoingTransfer
from actors.kv_transfer.sequence_handoff import PrefillHandoff
from actors.rpc import rpc_batcher
from quadriga.core.kv import TransferOffer
from quadriga.replica.handoff_receiver import HandoffReceiver
from quadriga.scheduling.transfer.handoff import LeaseState, LeaseTable
from tests.simulation.choices import Choices, FailedRun, explore
from tests.simulation.handoff import run
from tests.simulation.planted import settles_blindly

MAX_FAULTS = 2


pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.timeout(900),  # of thousands of runs, on a machine that does much else
]


def test_no_two_faults_lose_or_double_a_sequence() -> None:
    explored = explore(run, MAX_FAULTS)
    assert explored.num_runs > 500 and len(explored.states) > 50, explored


def test_a_run_is_the_same_when_it_is_repeated() -> None:
    faults = ((1, "is lost"), (6, "is cancelled by the client meanwhile"))
    histories = []
    for _ in range(2):
        choices = Choices(faults)
        run(choices)
        histories.append(choices.history())
    assert histories[0] == histories[1]


async def _aborts_without_waiting(
    self: HandoffReceiver, transfer_id: str, end: LeaseState = LeaseState.ABORTED
) -> LeaseState | None:
    """The row is given back without the lease knowing."""
    lease = self.leases.abort(transfer_id, end)
    return self.leases.state(transfer_id) if lease is None else None


async def _aborts_and_forgets(self: PrefillHandoff, transfer: OutgoingTransfer) -> None:
    await transfer.abort()


async def _claims_all(self: HandoffReceiver, offer: TransferOffer) -> int:
    """The source is told that positions are there which are not."""
    await _opened(self, offer)
    return len(offer.block_keys)


_opened = HandoffReceiver._open
PLANTED: dict[str, tuple[object, str, Callable[..., Any] | int]] = {
    "silence is taken for an abort": (OutgoingTransfer, "abort", settles_blindly),
    "an abort keeps the row": (HandoffReceiver, "abort", _aborts_without_waiting),
    "leases never lapse": (LeaseTable, "lapse", lambda self, *, now_s: []),
    "an offer that comes late is taken": (LeaseTable, "check_offer", lambda self, offer: []),
    "a commit that is cancelled is not taken back": (
        PrefillHandoff,
        "_abort_and_cancel",
        _aborts_and_forgets,
    ),
    "a cancellation is told once": (rpc_batcher, "TELL_TRIES", 1),
    "an offer is answered with more than is there": (HandoffReceiver, "_open", _claims_all),
    "a row is not released when the hand-off ends": (LeaseTable, "freed", lambda self, lease: None),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, instead = PLANTED[planted]
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(FailedRun) as failed:
        explore(run, MAX_FAULTS)
    print(f"{planted}: found after {failed.value.explored.num_runs} runs")
    assert len(failed.value.faults) <= MAX_FAULTS


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(explore(run, int(sys.argv[1]) if len(sys.argv) > 1 else MAX_FAULTS))
