"""A campaign of hours may be done in pieces: what was found is kept, and only what lacks is run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from tests.reliability.chaos import command
from tests.reliability.chaos.cell_results import CellResult
from tests.reliability.chaos.fault_matrix import MATRIX
from tests.reliability.chaos.results_file import Ledger

CELL = "SIGKILL decode, mid-stream"
OTHER = "SIGKILL prefill, mid-stream"


class Service:
    """In the place of a service and its trials: each run says what happened.

    Attributes:
        ran: The cells in the order of their runs.
        script: What becomes of the next runs; "ok" when it is empty.
        path: Of the file; `kept` has what was in it when each run began.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.script: list[str] = []
        self.path: Path | None = None
        self.kept: list[int] = []
        self.service, self.is_choosing = None, False
        monkeypatch.setattr(command, "started_rig", self._started)
        monkeypatch.setattr(command, "clients_of", self._started)
        monkeypatch.setattr(command, "check_service", lambda *_: None)
        monkeypatch.setattr(command.Trials, "run", lambda _, result: self._run(result))

    def census(self) -> Counter[str]:
        return Counter()

    async def reference(self, specs: Any) -> list[list[int]]:
        return []

    @asynccontextmanager
    async def _started(self, *_: Any) -> AsyncIterator[Service]:
        yield self

    async def _run(self, result: CellResult) -> None:
        self.ran.append(str(result.cell))
        if self.path is not None:
            self.kept.append(sum(row["done"] for row in rows(self.path).values()))
        self._happen(result, self.script.pop(0) if self.script else "ok")

    def _happen(self, result: CellResult, what: str) -> None:
        if what == "missed":
            result.not_struck.append("nothing moved")
            return
        result.runs += 1
        result.done += 1
        result.streams += 12
        result.recovery_s.append(0.5)
        result.lost += what == "lost"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(monkeypatch)


def call(path: Path, *more: str, cells: tuple[str, ...] = (CELL,)) -> int:
    only = [word for cell in cells for word in ("--only", cell)]
    return main(["chaos", "--runs", "2", "--json", str(path), *only, *more])


def rows(path: Path) -> dict[str, Any]:
    return {row["cell"]: row for row in json.loads(path.read_text())["cells"]}


def test_a_second_call_runs_only_what_lacks(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "chaos.json"
    assert call(path) == 0
    assert call(path, "--resume", cells=(CELL, OTHER)) == 0
    assert service.ran == [CELL, CELL, OTHER, OTHER]
    assert call(path, "--resume", cells=(CELL,)) == 0
    assert len(service.ran) == 4
    assert {name: row["done"] for name, row in rows(path).items()} == {CELL: 2, OTHER: 2}
    assert rows(path)[CELL]["recovery_p50_s"] == 0.5
    assert call(path, cells=(OTHER,)) == 0, "anew, without --resume"
    assert list(rows(path)) == [OTHER]


def test_failures_stay_and_runs_that_were_not_struck_are_done_again(
    service: Service, tmp_path: Path
) -> None:
    path = tmp_path / "chaos.json"
    service.script = ["lost", "missed", "missed", "ok"]
    assert call(path, cells=(CELL, OTHER)) == 1
    assert rows(path)[OTHER]["not_struck"] == ["nothing moved"]
    assert call(path, "--resume", cells=(CELL, OTHER)) == 1, "a stream was lost"
    assert service.ran == [CELL, CELL, OTHER, OTHER, CELL, OTHER]
    found = rows(path)
    assert (found[CELL]["lost"], found[CELL]["is_ok"]) == (1, False)
    assert (found[OTHER]["done"], found[OTHER]["is_ok"]) == (2, True)


def test_what_there_was_no_time_for_has_failed(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    assert call(path, "--budget-s", "1e-9") == 1
    assert service.ran == []
    assert rows(path)[CELL]["not_struck"] == ["no time was left after 0 runs"]
    assert call(path, "--resume") == 0


def test_a_file_of_other_settings_is_not_gone_on_with(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chaos.json"
    assert call(path) == 0
    before = path.read_bytes()
    assert call(path, "--resume", "--seed", "7") == 2
    assert "was written with" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert main(["chaos", "--resume", "--only", CELL]) == 2
    assert "--json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("settings"),
        lambda d: d["cells"][0].pop("lost"),
        lambda d: d["cells"][0].update(lost="none"),
        lambda d: d["cells"][0].update(done=-1),
        lambda d: d.update(cells=3),
    ],
)
def test_a_broken_file_is_named(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any
) -> None:
    path = tmp_path / "chaos.json"
    assert call(path) == 0
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    assert call(path, "--resume") == 2
    assert "chaos.json cannot be gone on with" in capsys.readouterr().err


def test_each_run_is_in_the_file_before_the_next(service: Service, tmp_path: Path) -> None:
    service.path = tmp_path / "chaos.json"
    assert call(service.path, cells=(CELL, OTHER)) == 0
    assert service.kept == [0, 1, 2, 3]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    result = CellResult(MATRIX[0], runs=1, done=1)
    ledger = Ledger(path, {"seed": 0}, MATRIX)
    ledger.write([result, CellResult(MATRIX[1])], seconds=2.0)
    assert list(rows(path)) == [str(MATRIX[0])]
    again, fresh = Ledger(path, {"seed": 0}, MATRIX), CellResult(MATRIX[0])
    again.resume([fresh])
    assert fresh == result
    again.write([fresh], seconds=3.0)
    document = json.loads(path.read_text())
    assert document["seconds"] == 5.0 and len(document["commits"]) == 1
    assert len(document["not_run"]) == sum(c.why_not is not None for c in MATRIX)
