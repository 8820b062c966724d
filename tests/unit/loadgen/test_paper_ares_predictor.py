"""`paper ares-predictor`: answers are averaged as a decode replica averages them."""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from loadgen.__main__ import main
from loadgen.paper.ares import predictor
from loadgen.paper.ares.length_contest import (
    ASK_EVERY,
    TEST_EVERY,
    Contest,
    LengthPredictor,
    _once,
    averaged,
)
from loadgen.paper.ares.length_encoder import EncoderSize
from loadgen.paper.ares.predictor import by_scenario, gained
from quadriga.core.forecast import LengthPrediction
from quadriga.core.request import SamplingParams
from quadriga.errors import ConfigError
from quadriga.scheduling.forecasts import believed
from quadriga.tune.lengths import MEDIAN, QUANTILES, LengthData
from tests.sequences import make_sequence

TOTALS = (95, 7, 61)


def data() -> LengthData:
    """Three requests, each with a sample every 7 tokens."""
    where = [(i, at) for i, total in enumerate(TOTALS) for at in range(0, total, TEST_EVERY)]
    requests, generated = (torch.tensor(column) for column in zip(*where, strict=True))
    remaining = torch.tensor(TOTALS)[requests] - 1 - generated
    return LengthData(
        depths=(2,),
        states=lambda depth, which: torch.zeros(len(which), 4),
        which=np.arange(len(where)),
        generated=generated,
        remaining=remaining,
        prompt_lengths=torch.full((len(where),), 5),
        requests=requests,
        token_ids=[([1] * 5, [2] * total) for total in TOTALS],
        ids=[f"p{i}" for i in range(len(TOTALS))],
    )


def test_it_averages_what_a_replica_would_wherever_it_asks() -> None:
    """After the prompt, then 7, 14 or 21 tokens on, then every 21."""
    found = data()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(found.remaining), generator=generator)
    said = 100.0 * torch.rand(len(order), 1 + len(QUANTILES), generator=generator)
    outputs = averaged(said, found, order)
    at_of = found.generated[order]
    for request, begin in itertools.product(range(len(TOTALS)), (7, 14, 21)):
        state = make_sequence("s", [1], SamplingParams(max_tokens=100))
        is_asked = (at_of == 0) | ((at_of - begin) % ASK_EVERY == 0) & (at_of >= begin)
        mine = torch.nonzero((found.requests[order] == request) & is_asked).flatten()
        for i in sorted(mine.tolist(), key=lambda i: int(at_of[i])):
            at = int(at_of[i])
            mean, lower, _, upper = said[i].tolist()
            state.prediction = believed(state, LengthPrediction(mean, lower, upper), at)
            state.predicted_at = at
            assert outputs[i, 0].item() == pytest.approx(state.prediction.mean, rel=1e-5)
            assert outputs[i, 1].item() == pytest.approx(state.prediction.lower, rel=1e-5)
            assert outputs[i, 3].item() == pytest.approx(state.prediction.upper, rel=1e-5)


def test_what_is_asked_less_often_is_averaged_less_often() -> None:
    found = data()
    everybody = torch.arange(len(found.remaining))
    said = 100.0 + 100.0 * torch.rand(len(everybody), 1 + len(QUANTILES))
    often, seldom = (averaged(said, found, everybody, every=k) for k in (21, 63))
    for i in everybody.tolist():
        at = int(found.generated[i])
        assert torch.equal(often[i], said[i]) == (at == 0), "all have an answer before"
        assert torch.equal(often[i], seldom[i]) == (at <= 21), "then there are others in between"


def test_who_is_asked_once_is_counted_down() -> None:
    found = data()
    said = torch.rand(len(found.remaining), 1 + len(QUANTILES)) + torch.where(
        found.generated[:, None] == 0, 50.0, 0.0
    )
    outputs = _once(said, found, torch.arange(len(found.remaining)))
    for i, (request, at) in enumerate(zip(found.requests, found.generated, strict=True)):
        first = said[(found.requests == request) & (found.generated == 0)][0]
        torch.testing.assert_close(outputs[i], (first - at).clamp(min=0.0))


def contest(found: LengthData, errors: dict[str, float], on_validation: list[float]) -> Contest:
    """Predictors that say so many tokens too much, always."""
    truth = found.remaining.float()
    said = {
        name: LengthPredictor(name, truth[:, None].expand(-1, 1 + len(QUANTILES)) + error, 100)
        for name, error in errors.items()
    }
    ours, *encoders = said.values()
    return Contest(ours, ours, encoders, encoders, on_validation, [])


def test_what_is_gained_is_stated_against_each_encoder_and_the_best_on_validation() -> None:
    found = data()
    everybody = torch.arange(len(found.remaining))
    sizes = (EncoderSize(2, 64), EncoderSize(4, 128))
    held = contest(found, {"ours": 3.0, "small": 6.0, "large": 4.0}, [7.0, 8.0])
    assert gained(held, found, everybody, sizes) == {
        "ours": 3.0,
        "encoders": {"2 × 64": 6.0, "4 × 128": 4.0},
        "sizes": {"2 × 64": 0.5, "4 × 128": 0.25},
        "best_size": "2 × 64",
        "best": 0.5,
        "best_alone": 0.5,
    }


def test_errors_by_scenario_are_of_the_whole_length_and_of_what_remains() -> None:
    found = data()
    everybody = torch.arange(len(found.remaining))
    held = contest(found, {"ours": 0.0, "theirs": 2.0}, [2.0])
    late = found.generated > 0
    held.ours.outputs = held.ours.outputs.clone()
    held.ours.outputs[late, MEDIAN] += 10.0
    domains = {"p0": "math", "p1": "code", "p2": "math"}
    code, math, everything = by_scenario(held, found, everybody, domains)
    assert [row["scenario"] for row in (code, math, everything)] == ["code", "math", "all"]
    assert [row["requests"] for row in (code, math, everything)] == [1, 2, 3]
    assert math["mean_tokens"] == pytest.approx((94 + 60) / 2, abs=0.1)
    assert math["whole"] == {"ours": 0.0, "theirs": 2.0}
    assert code["remaining"] == {"ours": 0.0, "theirs": 2.0}
    share = float(late[found.requests != 1].float().mean())
    assert math["remaining"]["ours"] == pytest.approx(10.0 * share, abs=0.01)


def test_what_is_given_is_asked_though_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "read_prompts", read := Mock(side_effect=ConfigError("seen")))
    assert main(["paper", "ares-predictor", "--quick", "--requests", "50"]) == 2
    read.assert_called_once_with(f"{predictor.TASKS_NAME}50")
