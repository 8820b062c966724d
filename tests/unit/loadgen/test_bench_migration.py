"""The migration benchmark ends where no stream can be moved, and where its streams have ended."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from loadgen.__main__ import main
from loadgen.bench.cluster import migration


async def make_moves(fault: Exception | None) -> None:
    """Moves of a cluster where none comes about; `fault` ends what keeps the streams going."""

    async def keep_busy() -> None:
        if fault is not None:
            raise fault
        await asyncio.sleep(60.0)

    bench = migration._Bench(argparse.Namespace(seed=0, moves=1, output=400), None)
    keeping = asyncio.create_task(keep_busy())
    try:
        await asyncio.wait_for(bench._make_moves(keeping), 10.0)
    finally:
        keeping.cancel()


@pytest.mark.parametrize(
    ("fault", "message"), [(None, "no stream was moved"), (OSError("admit"), "admit")]
)
def test_it_does_not_wait_for_moves_that_cannot_come(
    fault: Exception | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "PAUSE_S", 0.01)
    monkeypatch.setattr(migration, "STUCK_S", 0.1)
    with pytest.raises((RuntimeError, OSError), match=message):
        asyncio.run(make_moves(fault))


def test_streams_too_short_to_be_moved_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "migration", "--output", "63"])
    assert "--output: 63 must be at least 64" in capsys.readouterr().err
