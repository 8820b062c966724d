"""`loadgen profile` on a bundled model: the figures are real, and the catalogue can be read."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from loadgen import profile
from loadgen.__main__ import EXIT_USAGE, main
from loadgen.load.task_suite import TaskSuite
from loadgen.model_costs import depth
from loadgen.model_costs.depth import DepthJob, generate, spec_of, unchanged_share
from quadriga import engine
from quadriga.catalogue.files import read_catalogue
from quadriga.catalogue.records import DepthRecord
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.engine import compiled, load_runner
from quadriga.errors import ConfigError
from quadriga.llm import LLM


def test_two_depths_are_measured_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "catalogue.yaml"
    words = ["profile", "quadriga-s", "--depth", "2", "8", "--batches", "2", "1", "--examples", "4"]
    assert main([*words, "--repeats", "2", "--no-progress", "--output", str(path)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["machine"]
    (model,) = read_catalogue(str(path)).models
    shallow, full = model.depths
    assert (shallow.depth, full.depth) == (2, 8)
    for record in (shallow, full):
        assert [batch for batch, _ in record.step_s] == [1, 2]
        assert record.load_s is not None
        assert record.perplexity is not None
        assert record.perplexity >= 1.0
        assert record.energy_source in ("rapl", "estimate")
    assert shallow.step_s[0][1] < full.step_s[0][1], "two layers take less than eight"
    assert (shallow.ttft_s or 0) < (full.ttft_s or 0)
    assert (full.accuracy or 0) >= (shallow.accuracy or 0)
    assert full.unchanged is None
    assert shallow.unchanged is not None
    assert 0.3 < shallow.unchanged < 1.0
    assert full.coverage is None, "all have left at the last layer"
    assert shallow.coverage is not None
    assert 0.3 < shallow.coverage < 1.0
    assert full.token_s is not None and shallow.token_s is not None
    assert shallow.token_s < full.token_s, "a token that leaves early takes less"


def test_a_depth_says_its_own_answers_again() -> None:
    """Read teacher-forced, full depth agrees with itself, and not with altered answers."""
    checkpoint = read_checkpoint("quadriga-s")
    job = DepthJob(checkpoint.id, 8, (4,), 8, 1, 1, 1.0, 1, "")
    llm = LLM.over(load_runner(spec_of(checkpoint, job)))
    suite = TaskSuite.make(checkpoint, 8, seed=1)
    said: list[dict[str, int]] = []
    answers = generate(llm, suite.prompts, said.append)
    assert len(said) == 8
    assert sum(suite.right(dict(enumerate(answers.token_ids)))) >= 5
    assert unchanged_share(llm, suite.prompts, answers.token_ids) > 0.995
    wrong = [[(t + 1) % checkpoint.vocab_size for t in ids] for ids in answers.token_ids]
    assert unchanged_share(llm, suite.prompts, wrong) < 0.2


def test_bad_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "quadriga-s", "--depth", "3"]) == EXIT_USAGE
    assert "3 is none of quadriga-s's exits (2, 4, 8)" in capsys.readouterr().err
    assert main(["profile", "nobody"]) == EXIT_USAGE
    assert "nobody" in capsys.readouterr().err


def test_depths_are_kept_though_a_later_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "catalogue.yaml").write_text("earlier")
    found = [(DepthRecord(2, step_s=((1, 0.5),)), {}), ConfigError("the process ended")]
    monkeypatch.setattr(profile, "_measure", Mock(side_effect=found))
    assert main(["profile", "quadriga-s", "--output", str(path)]) == EXIT_USAGE
    (model,) = read_catalogue(str(tmp_path / "catalogue.partial.yaml")).models
    assert [(one.depth, one.step_s) for one in model.depths] == [(2, ((1, 0.5),))]
    assert path.read_text() == "earlier"


def test_kernels_are_compiled_before_the_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(compiled, "find_kernels", lambda spec: order.append("kernels"))
    monkeypatch.setattr(depth, "resident_bytes", lambda: order.append("load") or 0)
    monkeypatch.setattr(engine, "load_runner", Mock(side_effect=ConfigError("seen")))
    with pytest.raises(ConfigError, match="seen"):
        depth.measure(DepthJob("quadriga-s", 2, (1,), 0, 1, 1, 1.0, 1, ""), lambda line: None)
    assert order == ["kernels", "load"]
