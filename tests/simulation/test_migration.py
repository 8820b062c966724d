"""Every way in which the moves of a running sequence can go wrong, up to a number of faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actors.kv_transfer.handoff_sender import OutgoingTransfer
from actors.kv_transfer.migration import Migration
from quadriga.errors import QuadrigaError
from quadriga.scheduling.transfer.handoff import LeaseState
from tests.simulation import migration
from tests.simulation.choices import FailedRun, explore

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.timeout(900),  # of hundreds of runs, on a machine that does much else
]


@pytest.mark.parametrize(("num_moves", "max_faults"), [(2, 1), (1, 2)])
def test_no_fault_loses_or_doubles_a_token(
    num_moves: int, max_faults: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "NUM_MOVES", num_moves)
    explored = explore(migration.run, max_faults)
    assert explored.num_runs > 50, explored


async def _settles_blindly(self: OutgoingTransfer) -> LeaseState:
    """A destination that does not answer is thought to have nothing."""
    try:
        return LeaseState(await self._call("abort", self.offer.transfer_id))
    except QuadrigaError:
        return LeaseState.ABORTED


async def _always_goes_on(self: Migration, state: Any, transfer: Any, reason: Any) -> None:
    """What became of the commit is not asked."""
    await self._go_on(state, transfer, None)
    self._conclude("failed", "it was not asked")


async def _never_goes_on(self: Migration, state: Any, transfer: Any, epoch: Any) -> None:
    """The sequence stands still for good."""


PLANTED: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "silence is taken for an abort": (OutgoingTransfer, "settle", _settles_blindly),
    "the fate of a commit is not asked": (Migration, "_settle", _always_goes_on),
    "a sequence that does not move stands still": (Migration, "_go_on", _never_goes_on),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, instead = PLANTED[planted]
    monkeypatch.setattr(where, name, instead)
    monkeypatch.setattr(migration, "NUM_MOVES", 1)
    with pytest.raises(FailedRun) as failed:
        explore(migration.run, 2)
    print(f"{planted}: found after {failed.value.explored.num_runs} runs")
