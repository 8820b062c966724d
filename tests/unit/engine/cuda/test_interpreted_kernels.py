"""The Triton kernels compute what they should: their tests, where Triton interprets kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("interpreted_kernels.py")
LIMIT_S = 900


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_are_right_in_a_process_whose_kernels_are_interpreted(which: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", which, str(TESTS)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr
    assert re.search(r"\d+ passed", ran.stdout) and "skipped" not in ran.stdout
