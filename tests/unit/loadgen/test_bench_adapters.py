"""`bench adapters`: it measures an adapter that changes the answer, and ends in its line."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from loadgen.__main__ import main
from loadgen.bench import adapters
from loadgen.bench.adapters import NAME, PROMPT, random_adapter
from quadriga import LLM, SamplingParams
from quadriga.checkpoint.folder import ASSETS


def test_the_adapter_is_one_and_fits_its_model(tmp_path: Path) -> None:
    size, floor = random_adapter(tmp_path / NAME, ASSETS / "quadriga-s", 4)
    stored = (tmp_path / NAME / "adapter_model.safetensors").stat().st_size
    assert size == pytest.approx(stored, rel=0.1), "all but the header"
    assert 0 < floor < 0.1
    params = SamplingParams(0, temperature=0.0, num_prompt_logprobs=1)
    with closing(LLM("quadriga-s", adapters=str(tmp_path), engine={"compile": "off"})) as llm:
        said = [
            llm.generate([PROMPT], params, progress=False, adapter=name)[0].prompt_logprobs
            for name in ("", NAME)
        ]
    assert said[0] != said[1]


def test_a_step_brings_a_token_behind_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    at_s = [0.0]  # ten for the prompts, one for a token
    llm: Any = Mock(generate=lambda _, p, **__: at_s.append(at_s[-1] + 10 + p.max_tokens))
    monkeypatch.setattr(adapters, "time", Mock(process_time=lambda: at_s[-1]))
    assert adapters._batch(llm, 2, 5, "")() == 1.0


def test_a_share_is_the_median_of_those_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_s = {("plain", ""): [0, 1, 4, 2], ("", ""): [0, 1, 1, 1], ("", NAME): [0, 3, 4, 8]}
    monkeypatch.setattr(adapters, "BATCHES", (1,))
    monkeypatch.setattr(adapters, "_batch", lambda llm, *_: iter(steps_s[llm, _[-1]]).__next__)
    plain: Any = "plain"
    adapted: Any = ""
    (cost,) = adapters.measure(plain, adapted, 4, 3)
    assert (cost.without_s, cost.with_s, cost.share) == (2, 4, 2)


def test_the_command_ends_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "adapters", "--model", "quadriga-s", "--tokens", "4", "--repeats", "1"]
    assert main(words) == 0
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["experiment"] == "adapters"
    assert set(line["headline"]) == {"cost_1", "cost_8", "cost_32"}
    assert [cost["rows"] for cost in line["costs"]] == [1, 8, 32]
    assert all(cost["with_s"] > 0 for cost in line["costs"])
