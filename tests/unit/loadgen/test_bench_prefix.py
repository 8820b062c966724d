"""`bench prefix`: its answers are compared, and its line says what it found."""

from __future__ import annotations

import json

import pytest

from loadgen.__main__ import main
from loadgen.bench import prefix
from loadgen.bench.prefix import Round, is_same
from quadriga.core.output import RequestOutput
from quadriga.core.request import TokenLogprob


def test_answers_are_compared_to_the_bit() -> None:
    one = RequestOutput(0, token_ids=[3], logprobs=[TokenLogprob(3, -0.5)], ttft_s=1.0)
    assert is_same(one, RequestOutput(1, token_ids=[3], logprobs=[TokenLogprob(3, -0.5)]))
    assert not is_same(one, RequestOutput(0, token_ids=[3], logprobs=[TokenLogprob(3, -0.5000001)]))
    assert not is_same(one, RequestOutput(0, token_ids=[4], logprobs=[TokenLogprob(4, -0.5)]))


def test_the_command_ends_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "prefix", "--model", "quadriga-s", "--tokens", "200", "--rounds", "2"]
    assert main(words) == 0
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["experiment"] == "prefix"
    assert line["headline"]["identical"] is True
    assert line["headline"]["ttft_ratio_shared_200"] > 0
    assert line["headline"]["overhead_no_hits"] > 0
    assert line["computed_tokens_of_choices"] == 200 + 3 * 8


def test_a_first_round_that_differs_is_a_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: int) -> Round:
        return Round(1.0, 1.0, 1.0, 0.1, 0.1, 200, is_identical=args[-1] > 0)

    monkeypatch.setattr(prefix, "measure", measure)
    monkeypatch.setattr(prefix, "tokens_of_equal_prompts", lambda *_: 0)
    assert main(["bench", "prefix", "--model", "quadriga-s", "--tokens", "64"]) == 1
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["headline"]["identical"] is False
