"""The acceptance of a GPU, rehearsed: every stage, and what one that fails does to the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.bench import gpu_acceptance
from loadgen.bench.gpu_acceptance import RESULT, ROOT, STAGES, AcceptanceStage
from loadgen.bench.gpu_stages import MODES

ABSENT = ("ray", "pydantic", "llguidance", "xxhash", "hypothesis")
"""Beside flash-attn, which is nowhere in tests."""
LIMIT_S = 900
"""Of a rehearsal on a busy machine; alone it takes a minute or two."""


def report_of(folder: Path) -> Any:
    return json.loads((folder / RESULT).read_text())


@pytest.mark.timeout(LIMIT_S + 60)
def test_stages_are_rehearsed_where_torch_transformers_and_pytest_are_alone(
    tmp_path: Path,
) -> None:
    """Of the suites one; `make test-gpu` runs them all."""
    names = [stage.name for stage in STAGES if stage.tests is None or stage.name == "test_nccl"]
    stubs, out = tmp_path / "stubs", tmp_path / "out"
    stubs.mkdir()
    for name in ABSENT:
        (stubs / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')\n")
    command = [sys.executable, "-m", "loadgen.bench.gpu_acceptance", "--out", str(out)]
    ran = subprocess.run(
        [*command, "--rehearse", "--budget-s", str(LIMIT_S), "--only", *names],
        cwd=ROOT,
        # pytest alone, without what this environment adds to it.
        env=os.environ | {"PYTHONPATH": str(stubs), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    report = report_of(out)
    assert ran.returncode == 0, (ran.stdout, report)
    stages = report["stages"]
    assert list(stages) == names
    for name, found in stages.items():
        assert found["outcome"] == "done"
        assert "passed" in found["said"] if name == "test_nccl" else found["results"], name
    [graphs] = stages["graphs"]["results"]
    assert graphs["is_same"]
    assert stages["logits"]["results"][-1]["is_right"]
    # Of four rows two leave early at each step, so that one is filled in for the two it left at.
    filled = [(r["mode"], r["left_early"], r["filled"]) for r in stages["exits"]["results"]]
    shares = ((0.0, 0), (0.5, 2), (1.0, 0))
    assert filled == [(mode, share, count) for mode in MODES for share, count in shares]


def test_stages_that_fail_or_hang_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = tmp_path / "test_skipped.py"
    skipped.write_text("import pytest\n\n@pytest.mark.skip\ndef test_it(): ...\n")
    stages = (
        AcceptanceStage("absent", 300),
        AcceptanceStage("ceilings", 0.01),
        AcceptanceStage("environment", 300),
        AcceptanceStage("test_skipped", 300, ("none",), (str(skipped),)),
    )
    monkeypatch.setattr(gpu_acceptance, "STAGES", stages)
    assert gpu_acceptance.main(["--out", str(tmp_path), "--rehearse", "--budget-s", "600"]) == 1
    found = report_of(tmp_path)["stages"]
    assert found["absent"]["outcome"] == "failed with 1" and "KeyError" in found["absent"]["said"]
    assert found["ceilings"]["outcome"] == "stopped after 0 s"
    assert found["environment"]["outcome"] == "done"
    assert found["test_skipped"]["outcome"] == "nothing was judged"
    assert "torch" in found["environment"]["results"][0]["versions"]
    monkeypatch.setattr(gpu_acceptance, "_CLAIMING", ("environment",))
    gpu_acceptance.main(["--out", str(tmp_path), "--rehearse", "--only", "environment"])
    assert report_of(tmp_path)["stages"]["environment"]["outcome"] == "nothing was judged"


def test_a_budget_that_is_used_up_is_told(tmp_path: Path) -> None:
    assert gpu_acceptance.main(["--out", str(tmp_path), "--rehearse", "--budget-s", "1"]) == 1
    found = report_of(tmp_path)["stages"]
    assert len(found) == len(STAGES)
    assert {stage["outcome"] for stage in found.values()} == {"not started: the budget is used up"}
