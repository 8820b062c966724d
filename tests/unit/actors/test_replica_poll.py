"""Whoever polls a replica whose engine has failed learns it at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.replica.replica import Replica
from quadriga.clock import SystemClock
from quadriga.core.output import EngineOutput
from quadriga.errors import InvariantViolation, QuadrigaError, ReplicaDied
from quadriga.scheduling.output_dispatcher import OutputDispatcher


def host(error: QuadrigaError | None) -> Any:
    """As much of a replica as a poll looks at."""
    mail = OutputDispatcher("a", SystemClock(), 0.05)
    return SimpleNamespace(name="r", mail=mail, engine=SimpleNamespace(error=error))


async def test_a_well_engine_answers_an_empty_poll() -> None:
    assert (await Replica.poll(host(None), "i", 0, 0.01)).emissions == []


@pytest.mark.parametrize(
    ("error", "said"),
    [(InvariantViolation("rows are mixed up"), "rows are mixed up"), (None, "ends")],
)
async def test_once_all_mail_is_out_a_replica_that_failed_or_ends_is_dead(
    error: QuadrigaError | None, said: str
) -> None:
    """It answers no empty polls at once, again and again: what it held is begun anew elsewhere."""
    ending = host(error)
    ending.mail.put([("i", EngineOutput("s", 0, 0, [5], [8]))])
    ending.mail.close()
    reply = await Replica.poll(ending, "i", 0, 1.0)
    assert [e.token_ids for e in reply.emissions] == [[5]]
    with pytest.raises(ReplicaDied, match=said):
        await Replica.poll(ending, "i", reply.last_seq, 1.0)
