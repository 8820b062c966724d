"""Whole clusters in virtual time under faults; `make simulate-faults SEEDS=0-99999` runs more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.planted import PLANTED

ROOT = Path(__file__).parents[2]
SEEDS = "0-49"
FOUND_SOON = (
    "an abort keeps the row",
    "a row is not released when the hand-off ends",
    "KV is not compared with its checksum",
    "dead replicas are not replaced",
)
"""Of `PLANTED`: within a few seeds. The others take up to thousands."""

pytestmark = pytest.mark.timeout(1800)  # of many runs, on a machine that does much else


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a module as its users do, with the order of sets that its seeds are meant for."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_no_fault_loses_doubles_or_stops_a_stream() -> None:
    ran = _run("tests.simulation", SEEDS, "--workers", "1")
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["failed"] == [], ran.stdout
    assert ran.returncode == 0 and report["runs"] == 50


def test_a_seed_is_the_same_run_each_time() -> None:
    first, second = (_run("tests.simulation", "7", "--history").stdout for _ in range(2))
    assert first == second and "got its" in first


@pytest.mark.parametrize("name", FOUND_SOON)
def test_a_fault_in_the_code_is_found(name: str) -> None:
    assert name in PLANTED
    ran = _run("tests.simulation.planted", name, "--seeds", "50")
    assert "found after" in ran.stdout, ran.stdout + ran.stderr
