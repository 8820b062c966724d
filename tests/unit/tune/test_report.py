"""The figures of a report, against known verdicts, a clock that is set, and answers by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.checkpoint.exits import EXITS_FILE, NEVER, ExitSpec, to_json
from quadriga.engine.model_runner import NativeRunner
from quadriga.llm import LLM
from quadriga.tune.answers import OwnAnswer
from quadriga.tune.outcome import by_domain, compare_answers, log_likelihood, measure_speed
from quadriga.tune.report import given_up, page_of
from quadriga.tune.states import run_passes
from quadriga.tune.thresholds import Verdicts
from tests.equivalence.models import make_spec
from tests.unit.tune.models import LAYERS, VOCAB, save_model


def test_tokens_are_counted_by_domain_and_threshold() -> None:
    """Four tokens and two exits; the second exit is as sure as .9 from .6 on."""
    verdicts = Verdicts(
        (2, 5),
        confidence=np.array([[0.95, 0.85, 0.2, 0.99], [0.1, 0.1, 0.7, 0.1]]),
        changed=np.array([[False, True, True, False], [True, True, True, False]]),
        lost=np.array([[0.0, 0.5, 9.0, 0.0], [9.0, 9.0, 2.0, 9.0]]),
    )
    spec = ExitSpec((2, 5), sure_from=((5, 0.6),), calibrated_at=0.9)
    rows = by_domain(verdicts, spec, ["a", "a", "b", "b"], ["b"])
    found = {(row["domain"], row["threshold"]): row for row in rows}
    assert len(found) == 9 and all(found["b", level]["held_back"] for level in (0.8, 0.9, 0.97))
    # At .8 the first exit keeps its own scale, and the second one's is 8/9 of .6.
    loose = found["all", 0.8]
    assert (loose["tokens"], loose["early"], loose["at"]) == (4, 1.0, {2: 0.75, 5: 0.25})
    assert (loose["agreement"], loose["changed"], loose["loss"]) == (0.5, 0.5, 2.5 / 4)
    usual = found["all", 0.9]
    assert (usual["early"], usual["at"]) == (0.75, {2: 0.5, 5: 0.25})
    assert usual["agreement"] == pytest.approx(2 / 3) and usual["loss"] == 0.5
    assert found["a", 0.9]["early"] == 0.5 and found["a", 0.9]["changed"] == 0.0
    # At .97 the second exit wants .6 + .7 × .4.
    assert found["b", 0.97]["at"] == {2: 0.5, 5: 0.0} and found["b", 0.97]["agreement"] == 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its exits are sure of anything: each token leaves at the first."""
    folder = save_model("llama", tmp_path_factory.mktemp("model"))
    exits = ExitSpec((1, 2), "shared", threshold=0.0)
    (folder / EXITS_FILE).write_text(json.dumps(to_json(exits)))
    return folder


def test_the_speed_is_what_the_clock_says(model: Path) -> None:
    """Each run reads the clock twice; leaving early takes 1 s, drafting 2 s, full depth 4 s."""
    llm = LLM(
        str(model),
        exits={"mode": "bounded"},
        engine={"compile": "off"},
        decode={"rebatching": "lazy", "max_slots": 4},
    )
    took = iter(2 * (1.0, 2.0, 4.0, 3.0, 6.0, 24.0, 1.0, 2.0, 4.0))  # a round of three is slower
    now, is_start = 0.0, True

    def clock() -> float:
        nonlocal now, is_start
        now, is_start = now + (0.0 if is_start else next(took)), not is_start
        return now

    runs: list[int] = []
    prompts = [[5, 6, 7], [8, 9]]
    rows, answers = measure_speed(
        llm, prompts, batches=(1, 2, 3), rounds=3, clock=clock, advance=runs.append
    )
    llm.close()
    assert [row["batch"] for row in rows] == [1, 2] and sum(runs) == 18
    assert answers.keys() == {"exits", "drafts", "full"}
    tokens = {way: sum(len(a.answer_ids) for a in said) for way, said in answers.items()}
    assert {way: rows[1][way] for way in tokens} == {
        "exits": tokens["exits"] / 1.0,
        "drafts": tokens["drafts"] / 2.0,
        "full": tokens["full"] / 4.0,
    }
    assert rows[1]["over_full"]["exits"] == pytest.approx(4 * tokens["exits"] / tokens["full"])
    # All but the first token of each answer, which the prompt's pass makes at full depth.
    assert rows[1]["early"] == pytest.approx(1 - 2 / tokens["exits"])
    assert [a.answer_ids for a in answers["drafts"]] == [a.answer_ids for a in answers["full"]]


def test_whole_answers_are_compared_under_full_depth(model: Path) -> None:
    runner = NativeRunner.load(make_spec(model, exits=ExitSpec()))
    prompt = [5, 6, 7]
    best: list[int] = []
    for _ in range(4):
        best.append(int(next_logits(runner, prompt + best).argmax()))
    other = [*best[:3], (best[3] + 1) % VOCAB]
    full = [OwnAnswer("a", prompt, best, True), OwnAnswer("b", prompt, best, True)]
    exits = [full[0], OwnAnswer("b", prompt, other, True)]
    found = compare_answers(runner, {"exits": exits, "drafts": full, "full": full})
    scores = [next_logits(runner, prompt + best[:i]).log_softmax(-1) for i in range(4)]
    known = [float(score[token]) for score, token in zip(scores, best, strict=True)]
    assert found["answers"] == 2 and found["same"] == 0.5
    assert found["loglik_full"] == pytest.approx(sum(known) / 4, abs=1e-4)
    lost = known[3] - float(scores[3][other[3]])
    assert found["loglik_full"] - found["loglik_exits"] == pytest.approx(lost / 8, abs=1e-4)
    assert log_likelihood(runner, []) == 0.0


def next_logits(runner: NativeRunner, ids: list[int]) -> torch.Tensor:
    """Of the token behind some, at full depth."""
    (seen,) = run_passes(runner, [ids], [LAYERS])
    return runner.model.decoder.logits(seen.states[LAYERS][-1:], LAYERS)[0]


FIGURES: dict[str, Any] = {
    "model": "m",
    "num_layers": 8,
    "exits": {
        "kind": "mlp",
        "layers": [2, 4],
        "threshold": 0.9,
        "sure_from": {"2": NEVER, "4": 0.5},
    },
    "maps": {"exits.2.kv.3": 0.1},
    "lengths": {
        "2": {"samples": 9, "mae": 5.0, "mae_of_median": 5.0, "mean_remaining": 20.0},
        "8": {"samples": 9, "mae": 4.0, "mae_of_median": 5.0, "mean_remaining": 20.0},
    },
    "cut": 0.25,
    "unanswered": 3,
    "speed_prompts": 10,
    "speed": [
        {"batch": 1, "full": 10.0, "exits": 9.0, "drafts": 12.0, "early": 0.5, "agreed": 0.75}
        | {"over_full": {"exits": 0.9, "drafts": 1.2}},
        {"batch": 8, "full": 10.0, "exits": 9.9, "drafts": 9.8, "early": 0.0, "agreed": None}
        | {"over_full": {"exits": 0.99, "drafts": 0.98}},
    ],
}


def test_what_is_given_up_is_named() -> None:
    assert given_up(FIGURES, (2, 4, 6)) == [
        "3 prompts: too long for the model with --max-tokens behind them, or their answers failed; "
        "nothing was learned of them",
        "exits after 6: too few tokens leave there within the budget",
        "exits after 2 are never left by default",
        "maps for exits after 4: not fitted, so the layers' own projections stand in; do the part "
        "maps",
        "length heads: 25% of the answers were cut at --max-tokens and count as ended there; allow "
        "more",
        "length heads behind 2 layers: no better than the answers' median length; give more "
        "prompts",
        "speed at batch 32: not measured, 10 prompts of the test part were used (--speed-prompts)",
        "exits at batch 8: the engine found that leaving early does not pay there, and no token "
        "did",
        "drafts at batch 8: the engine found that they do not pay there, and made none",
        "speed of leaving early at batch 1: full depth is faster",
    ]


def test_nothing_is_given_up_where_all_is_there() -> None:
    speed = [
        FIGURES["speed"][0] | {"batch": n, "over_full": {"exits": 2.0, "drafts": 2.0}}
        for n in (1, 8, 32)
    ]
    whole = FIGURES | {
        "exits": {"layers": [7], "sure_from": {"7": 0.5}},
        "maps": {},
        "lengths": {"8": FIGURES["lengths"]["8"]},
        "cut": 0.05,
        "unanswered": 0,
        "speed": speed,
        "speed_prompts": 32,
    }
    assert given_up(whole, (7,)) == []


def test_the_page_shows_all_speeds() -> None:
    page = page_of(FIGURES)
    assert "| 1 | 10.0 | 9.0 (0.90 ×) | 0.500 | 12.0 (1.20 ×) | 0.750 |" in page
    assert "| 2 | 9 | 5.00 | 5.00 | 20.0 |" in page
    assert "| 8 | 10.0 | 9.9 (0.99 ×) | 0.000 | 9.8 (0.98 ×) | no drafts |" in page
