"""`paper draft-bound`: rounds are counted off the answers as a loop that drafts would make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.__main__ import main
from loadgen.paper.lossless.bound import ADAPTIVE, DRAFTS, bounds, chains, rounds


def test_answers_of_an_earlier_run_are_not_counted(tmp_path: Path, capsys: Any) -> None:
    words = ["paper", "draft-bound", "--checkpoint", "quadriga-s", "--limit", "1"]
    for tokens in (2, 3):
        assert main([*words, "--max-tokens", str(tokens), "--out", str(tmp_path)]) == 0
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert line["headline"]["tokens"] == tokens


def rounds_by_drafting(agrees: list[bool], most: int) -> list[int]:
    """One answer: draft, keep what agrees, and one token of the verification."""
    made, at = [], 0
    while at < len(agrees):
        drafted = min(most, len(agrees) - at - 1)
        made.append(drafted)
        kept = 0
        while kept < drafted and agrees[at + kept]:
            kept += 1
        at += kept + 1
    return made


def test_the_rounds_are_those_of_a_loop_that_drafts() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        answers = [(rng.random(rng.integers(1, 30)) < 0.7).tolist() for _ in range(3)]
        owners = np.repeat(np.arange(3), [len(a) for a in answers])
        follows = chains(np.array([v for a in answers for v in a]), owners)
        for most in DRAFTS:
            plain = [r for answer in answers for r in rounds_by_drafting(answer, most)]
            assert rounds(follows, owners, most) == plain


def test_chains_end_with_their_answer() -> None:
    agrees = np.array([True, True, False, True, True])
    assert chains(agrees, np.array([0, 0, 0, 0, 1])).tolist() == [2, 1, 0, 1, 1]


def test_perfect_drafts_gain_the_layers_behind_the_exit_and_wrong_ones_lose() -> None:
    owners, num = np.zeros(1_000, dtype=np.int64), 1_000
    perfect = bounds(10, 30, 0.0, np.ones(num, dtype=bool), owners)
    assert perfect["agreement"] == 1.0
    assert perfect["tokens_per_round"]["4"] == 5.0
    assert perfect["speedup"]["4"] == pytest.approx(5 * 30 / (5 * 10 + 20), rel=1e-3)
    assert perfect["speedup"][ADAPTIVE] == pytest.approx(3.0, rel=0.01)
    never = bounds(10, 30, 8.0, np.zeros(num, dtype=bool), owners)
    assert never["speedup"][ADAPTIVE] == never["free_test"] == 1.0
    assert never["best"] == pytest.approx(38 / (38 + 10 + 8), rel=0.01)
    assert never["best_drafts"] == 1


def test_a_test_that_costs_the_head_takes_the_gain() -> None:
    rng = np.random.default_rng(1)
    agrees, owners = rng.random(2_000) < 0.75, np.zeros(2_000, dtype=np.int64)
    dear, cheap = (bounds(20, 30, head, agrees, owners) for head in (8.0, 0.0))
    assert dear["free_test"] >= dear["speedup"][ADAPTIVE] >= dear["best"]
    assert cheap["best"] < 1.1, "two thirds of the layers before the exit leave little to save"


def test_smollm2s_last_exit_cannot_make_it_a_fifth_faster_however_its_drafts_agree() -> None:
    """docs/experiments/helios.md: thirty layers, and a head that costs eight."""
    owners, right = np.zeros(5_000, dtype=np.int64), np.ones(5_000, dtype=bool)
    most = {depth: bounds(depth, 30, 8.0, right, owners) for depth in (15, 20, 25)}
    assert [round(row["speedup"]["8"], 2) for row in most.values()] == [1.54, 1.31, 1.13]
    assert most[25]["speedup"][ADAPTIVE] < 1.2
