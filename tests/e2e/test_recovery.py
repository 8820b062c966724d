"""Processes are killed and stopped under load: every stream is the one of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

TIMEOUT_S = 500.0
CELLS = (
    "SIGKILL decode, mid-stream",
    "SIGKILL prefill, before first token",
    "SIGSTOP decode, mid-stream",
)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_no_stream_is_lost_doubled_or_changed() -> None:
    """At least thirty streams lose their replica; greedy and seeded, HTTP and gRPC, with exits."""
    words = [sys.executable, "-m", "loadgen", "chaos", "--streams", "24", "--runs", "2"]
    for cell in CELLS:
        words += ["--only", cell]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    last = json.loads(ran.stdout.strip().splitlines()[-1])
    assert ran.returncode == 0, ran.stdout
    bad = {name: last[name] for name in ("lost", "duplicated", "differing", "hung")}
    assert bad == dict.fromkeys(bad, 0)
    assert last["failed"] == []
    assert last["rebuilt"] >= 30
    assert np.percentile(last["recovery_s"], 99) < 30.0
