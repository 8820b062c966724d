"""A replica's process ends, whatever fails on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import actors.replica.replica
from actors.replica.replica import Replica
from quadriga.clock import SystemClock
from quadriga.errors import MigrationFailed
from quadriga.scheduling.output_dispatcher import OutputDispatcher


@pytest.mark.parametrize(
    "failure", [None, MigrationFailed("the peer is gone"), KeyError("a bug"), OSError("disk full")]
)
async def test_a_replica_that_ends_frees_its_engine(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def step(name: str, raised: Exception | None = None) -> Any:
        async def run(*_: Any) -> None:
            done.append(name)
            if raised is not None:
                raise raised

        return run

    monkeypatch.setattr(actors.replica.replica, "end_this_actor", step("ended"))
    replica: Any = SimpleNamespace(
        name="r",
        mail=OutputDispatcher("a", SystemClock(), 0.05),
        is_ending=False,
        _close=step("closed", failure),
        transport=SimpleNamespace(close=step("transport")),
        _push_metrics=step("pushed"),
        engine=SimpleNamespace(stop=lambda: done.append("stopped"), join=step("joined")),
    )
    await Replica._end(replica, "told to")
    if failure is None:  # else the counts of its last second are lost
        assert done.pop(1) + done.pop(1) == "transportpushed"
    assert done == ["closed", "stopped", "joined", "ended"]
    await Replica._end(replica, "told again")
    assert done.count("ended") == 1
