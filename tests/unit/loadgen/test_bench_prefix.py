"""`bench prefix`: its answers are compared, and its line says what it found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from loadgen.__main__ import main
from loadgen.bench import prefix
from loadgen.bench.prefix import Round, is_same
from quadriga.core.request import TokenLogprob
from quadriga.core.request_output import RequestOutput


def test_answers_are_compared_to_the_bit() -> None:
    one = RequestOutput(0, token_ids=[3], logprobs=[TokenLogprob(3, -0.5)], ttft_s=1.0)
    assert is_same(one, RequestOutput(1, token_ids=[3], logprobs=[TokenLogprob(3, -0.5)]))
    assert not is_same(one, RequestOutput(0, token_ids=[3], logprobs=[TokenLogprob(3, -0.5000001)]))
    assert not is_same(one, RequestOutput(0, token_ids=[4], logprobs=[TokenLogprob(4, -0.5)]))


def test_the_command_ends_in_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of its first round, too, must be those without the cache."""
    measure, found = prefix.measure, list[Round]()

    def measured(*args: Any) -> Round:
        found.append(measure(*args))
        times = {"cold_s": (1.0, 1.0, 8.0)[len(found) - 1], "hit_s": 1.0}
        return replace(found[-1], is_identical=len(found) > 1, **times)

    monkeypatch.setattr(prefix, "measure", measured)
    words = ["bench", "prefix", "--model", "quadriga-s", "--tokens", "200", "--rounds", "2"]
    assert main(words) == 1
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["experiment"] == "prefix" and line["headline"]["identical"] is False
    assert all(one.is_identical for one in found)
    assert line["headline"]["ttft_ratio_shared_200"] == pytest.approx((1 + 1 / 8) / 2, abs=1e-3)
    assert line["headline"]["overhead_no_hits"] > 0
    assert line["computed_tokens_of_choices"] == 200 + 3 * 8
