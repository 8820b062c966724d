"""`paper ares-predictor`: answers are averaged as a decode replica averages them."""

from __future__ import annotations

import pytest
import torch

from loadgen.paper.ares.length_contest import averaged
from quadriga.core.forecast import LengthPrediction
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.scheduling.forecasts import believed
from quadriga.tune.lengths import QUANTILES, LengthData

TOTALS = (95, 7, 61)


def data() -> LengthData:
    """Three requests, each with a sample every 20 tokens."""
    where = [(i, at) for i, total in enumerate(TOTALS) for at in range(0, total, 20)]
    requests, generated = (torch.tensor(column) for column in zip(*where, strict=True))
    remaining = torch.tensor(TOTALS)[requests] - 1 - generated
    return LengthData(
        depths=(2,),
        states=[torch.zeros(len(where), 4)],
        generated=generated,
        remaining=remaining,
        prompt_lengths=torch.full((len(where),), 5),
        requests=requests,
        token_ids=[([1] * 5, [2] * total) for total in TOTALS],
    )


def test_it_averages_what_the_replica_would() -> None:
    found = data()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(found.remaining), generator=generator)
    said = 100.0 * torch.rand(len(order), 1 + len(QUANTILES), generator=generator)
    outputs = averaged(said, found, order)
    for request in range(len(TOTALS)):
        state = SequenceState(
            sequence_id="s", request_id="s", model="m", prompt_ids=[1],
            sampling=SamplingParams(max_tokens=100), ingress_id="i", arrival_unix_s=0.0,
            deadline_unix_s=1e9,
        )  # fmt: skip
        mine = [i for i in range(len(order)) if int(found.requests[order[i]]) == request]
        for i in sorted(mine, key=lambda i: int(found.generated[order[i]])):
            at = int(found.generated[order[i]])
            mean, lower, _, upper = said[i].tolist()
            state.prediction = believed(state, LengthPrediction(mean, lower, upper), at)
            state.predicted_at = at
            assert outputs[i, 0].item() == pytest.approx(state.prediction.mean, rel=1e-5)
            assert outputs[i, 1].item() == pytest.approx(state.prediction.lower, rel=1e-5)
            assert outputs[i, 3].item() == pytest.approx(state.prediction.upper, rel=1e-5)


def test_what_is_asked_less_often_is_averaged_less_often() -> None:
    found = data()
    everybody = torch.arange(len(found.remaining))
    said = torch.rand(len(everybody), 1 + len(QUANTILES))
    outputs = averaged(said, found, everybody, every=40)
    for i in everybody.tolist():
        is_asked_again = int(found.generated[i]) in (40, 80)
        assert torch.equal(outputs[i], said[i]) != is_asked_again
