"""All that can happen to a sequence between two destinations, within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from quadriga.scheduling.transfer.handoff import Lease, LeaseState, LeaseTable
from tests.simulation.leases import Bounds, BrokenPromise, Checker

pytestmark = pytest.mark.timeout(900)  # of many states, on a machine that does much else

LEAST_STATES = {
    # One destination after the other, or there and on.
    Bounds(2, lost=1, repeated=0, deaths=1): 10_000,
    Bounds(2, lost=1, repeated=1, deaths=0): 20_000,
    Bounds(1, lost=1, repeated=1, deaths=1): 1_000,
}
"""By bounds; with fewer, events are missing from the search."""


@pytest.mark.parametrize("bounds", LEAST_STATES, ids=str)
def test_no_order_of_events_makes_two_owners_or_keeps_a_lease(bounds: Bounds) -> None:
    checker = Checker(bounds)
    checker.run()
    print(f"{checker.num_states} states, {checker.num_events} events, {checker.depth} deep")
    assert checker.num_states >= LEAST_STATES[bounds]
    assert set(checker.ends) == {"over"}, "a transfer never ended"


def _aborts_what_is_committed(
    self: LeaseTable, transfer_id: str, state: LeaseState = LeaseState.ABORTED
) -> Lease | None:
    self._ended[transfer_id] = state
    return self._leases.get(transfer_id)


def _takes_every_offer(self: LeaseTable, offer: Any) -> list[str]:
    return []


PLANTED = {
    "a commit can be aborted": ("abort", _aborts_what_is_committed),
    "an offer that is over is taken again": ("check_offer", _takes_every_offer),
    "rows of lapsed leases are kept": ("lapse", lambda self, *, now_s: []),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, *PLANTED[name])
    with pytest.raises(BrokenPromise) as broken:
        Checker(Bounds(2, lost=1, repeated=0, deaths=1)).run()
    assert "arrives" in str(broken.value) or "promises a row" in str(broken.value)
