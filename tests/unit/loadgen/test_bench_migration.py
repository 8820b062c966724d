"""The migration benchmark ends where no stream can be moved, or none is kept going."""

from __future__ import annotations

import argparse
import asyncio
import sys
from unittest.mock import AsyncMock, Mock

import pytest

from loadgen.__main__ import main
from loadgen.bench.cluster import migration


def test_a_gap_that_outlasts_its_move_is_felt() -> None:
    flow = migration.Flow(Mock(), "a", arrivals_s=[0.0, 5.0, 5.1, 5.2, 6.2, 6.3])
    assert flow.gaps_s(5.15, 5.5) == pytest.approx([0.1, 1.0])


def test_a_move_that_failed_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    felt = migration.Felt(1, 1.0, 1.0, 1.0)
    done = migration.PaceOutcome("", 1.0, 9, 1, felt, felt, felt, 1.0, 1.0, 1.0)
    monkeypatch.setattr(migration._Bench, "run", AsyncMock(return_value=done))
    monkeypatch.setattr(migration, "os", Mock(environ={}))
    monkeypatch.setitem(sys.modules, "ray", Mock())
    assert main(["bench", "migration", "--quick", "--moves", "30"]) == 1
    assert '"moves": 30' in capsys.readouterr().out.splitlines()[-1], "as many as were asked for"


@pytest.mark.parametrize(("lasts_s", "message"), [(9.0, "no stream was moved"), (0.0, "its end")])
def test_it_does_not_wait_for_moves_that_cannot_come(
    lasts_s: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "PAUSE_S", 0.01)
    monkeypatch.setattr(migration, "STUCK_S", 0.2)

    async def keep_busy() -> None:
        await asyncio.sleep(lasts_s)
        raise RuntimeError("its end")

    async def make_moves() -> None:
        bench = migration._Bench(argparse.Namespace(seed=0, moves=1, output=400), None)
        await bench._make_moves(asyncio.create_task(keep_busy()))

    with pytest.raises(RuntimeError, match=message):
        asyncio.run(make_moves())
