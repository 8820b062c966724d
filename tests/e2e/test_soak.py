"""The short form of `python -m loadgen soak --all-on`: everything at once, token for token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 480.0
HAPPENED = ("lowered", "moves", "pauses")


@pytest.mark.timeout(2 * TIMEOUT_S + 20)
def test_with_everything_on_no_answer_changes_and_nothing_stays_behind(tmp_path: Path) -> None:
    """It is shorter than what shows a leak of memory: files, slots, leases and processes count.

    Once more, for longer, where a slow machine has not come to all that must not harm. How fast it
    is with rescheduling and without is not judged in so short a time.
    """
    words = [sys.executable, "-m", "loadgen", "soak", "--all-on", "--warm-up-s", "6"]
    words += ["--turn-s", "5", "--every-s", "3", "--places", "6"]
    words += ["--max-tokens", "48", "--max-slope", "1e6", "--set", "engine.compile=off"]
    words += ["--out", str(tmp_path)]
    wanted = dict.fromkeys(("failed", "differing", "duplicated", "leaked"), 0)
    for minutes in ("1", "2"):
        ran = subprocess.run(
            [*words, "--minutes", minutes], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert ran.stdout.strip(), ran.stderr[-4000:]
        last = json.loads(ran.stdout.strip().splitlines()[-1])
        assert {name: last[name] for name in wanted} == wanted, last["failures"] + last["faults"]
        failures = [said for said in last["failures"] if not said.startswith("tokens/s with")]
        if not failures and all(last[name] > 0 for name in ("ok", *HAPPENED)):
            break
    assert not failures
    assert min(last[name] for name in ("ok", *HAPPENED)) > 0, last
    assert last["rescheduling_on_over_off"]["pairs"] > 0 and "resizes" in last
