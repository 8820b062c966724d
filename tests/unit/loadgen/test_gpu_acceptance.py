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
IN_ONE_PROCESS = """
import sys
from pathlib import Path
from loadgen.bench.gpu_stages import run
for name in sys.argv[2:]:
    run(name, Path(sys.argv[1], f"{name}.jsonl"), rehearse=True)
"""
LIMIT_S = 900
"""Of a rehearsal on a busy machine; alone it takes a minute or two."""


def report_of(folder: Path) -> Any:
    return json.loads((folder / RESULT).read_text())


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_stages_are_rehearsed_where_torch_transformers_and_pytest_are_alone(
    tmp_path: Path,
) -> None:
    """The command does one of its own and one suite, `make test-gpu` all suites; the others are
    called in one process, as each would first import torch for seconds."""
    stubs, out = tmp_path / "stubs", tmp_path / "out"
    stubs.mkdir()
    out.mkdir()
    for name in ABSENT:
        (stubs / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')\n")
    # pytest alone, without what this environment adds to it.
    environment = os.environ | {"PYTHONPATH": str(stubs), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "QUADRIGA_GPU_TESTS_ON_CPU": "1"}

    def run(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)

    command = ["-m", "loadgen.bench.gpu_acceptance", "--out", str(out), "--budget-s", str(LIMIT_S)]
    run(*command, "--rehearse", "--only", "graphs", "test_nccl")
    stages = report_of(out)["stages"]
    assert "passed" in stages["test_nccl"]["said"]
    [graphs] = stages["graphs"]["results"]
    assert graphs["is_same"]
    names = [stage.name for stage in STAGES if stage.tests is None and stage.name != "graphs"]
    run("-c", IN_ONE_PROCESS, str(out), *names)
    results = {name: gpu_acceptance._read(out / f"{name}.jsonl") for name in names}
    assert all(results.values()), results
    assert results["logits"][-1]["is_right"]
    # Of four rows two leave early at each step, so that one is filled in for the two it left at.
    filled = [(r["mode"], r["left_early"], r["filled"]) for r in results["exits"]]
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
    monkeypatch.setattr(gpu_acceptance, "_CLAIMING", ("environment",))
    assert gpu_acceptance.main(["--out", str(tmp_path), "--rehearse", "--budget-s", "600"]) == 1
    found = report_of(tmp_path)["stages"]
    assert found["absent"]["outcome"] == "failed with 1" and "KeyError" in found["absent"]["said"]
    assert found["ceilings"]["outcome"] == "stopped after 0 s"
    assert found["environment"]["outcome"] == "nothing was judged", "of what must claim something"
    assert found["test_skipped"]["outcome"] == "nothing was judged"
    assert "torch" in found["environment"]["results"][0]["versions"]


def test_a_budget_that_is_used_up_is_told(tmp_path: Path) -> None:
    assert gpu_acceptance.main(["--out", str(tmp_path), "--rehearse", "--budget-s", "1"]) == 1
    found = report_of(tmp_path)["stages"]
    assert len(found) == len(STAGES)
    assert {stage["outcome"] for stage in found.values()} == {"not started: the budget is used up"}
