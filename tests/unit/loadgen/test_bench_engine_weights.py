"""`bench engine --weights`: what a form costs is measured against float32, and told in lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.__main__ import main
from loadgen.bench.engines import quality
from loadgen.bench.engines.quality import measure_quality
from loadgen.bench.engines.workloads import Workload, WorkloadRequest
from quadriga.checkpoint.folder import read_checkpoint


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_NUM_EXAMPLES", 12)


def test_float32_agrees_with_itself_and_int8_nearly() -> None:
    found = measure_quality(read_checkpoint("quadriga-s"), ["float32", "int8"], 1)
    whole, rounded = found["float32"], found["int8"]
    assert whole.agreement == 1.0 and whole.num_tokens == rounded.num_tokens > 100
    assert 1.0 < whole.perplexity < 100.0, "it knows more than its vocabulary"
    assert 0.9 < rounded.agreement <= 1.0
    assert rounded.perplexity == pytest.approx(whole.perplexity, rel=0.05)
    assert rounded.perplexity != whole.perplexity, "int8 rounds"


def test_the_command_ends_in_what_the_form_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = tmp_path / "few.json"
    asked = [WorkloadRequest([5, 6, 7], 4), WorkloadRequest([8, 9], 4)]
    Workload("few", 2, asked).save(workload)
    words = ["bench", "engine", "--checkpoint", "quadriga-s", "--workload", str(workload)]
    assert main([*words, "--weights", "int8"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:1] == "{"]
    speed, whole, rounded = lines
    assert (speed["peer"], speed["workload"], speed["tokens"]) == ("quadriga", "few", 8)
    assert speed["tokens_per_s"] > 0
    assert (whole["weights"], whole["agreement"]) == ("float32", 1.0)
    assert rounded["weights"] == "int8"
    assert set(rounded) == {"weights", "perplexity", "agreement", "num_tokens"}
