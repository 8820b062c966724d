"""What a device draws, against the sampler of hosts."""

from __future__ import annotations

import pytest
import torch

from quadriga.engine import sampler
from quadriga.engine.cuda import sampling
from quadriga.engine.cuda.sampling import SamplingTensors, truncate
from quadriga.engine.sampler import RowSampler, choose
from quadriga.engine.transfers import to_device
from tests.fake_gpu import FakeGpu
from tests.unit.engine.test_sampler import VOCAB, logits_for, row, truncated_rows


def attached(rows: list[RowSampler], gpu: FakeGpu) -> None:
    """Give every second row of an engine to a sequence."""
    tensors = SamplingTensors(2 * len(rows), gpu.device)
    for i, one in enumerate(rows):
        one.place = tensors.attach(2 * i, one.params)


@pytest.mark.parametrize("seed", range(6))
def test_a_device_keeps_what_a_host_keeps_and_says_where_it_ranked_too_few(seed: int) -> None:
    rows, scaled = truncated_rows(seed)
    wanted = sampler._truncate(scaled.clone(), rows)
    num_reached = []
    for some in (slice(0, None), slice(0, 4), slice(8, None)):  # with and without others' top-k
        for num_ranked in (4, 32, VOCAB):
            with FakeGpu() as gpu:
                attached(rows[some], gpu)
                asked = rows[some][0].place[0][::2]
                here = to_device(scaled[some].numpy(), gpu.device)
                gpu.waits.clear()
                kept, is_reached = truncate(here, rows[some], asked, num_ranked)
                assert not gpu.waits
                kept, reached = kept.cpu(), is_reached.cpu()
            num_reached.append(int(reached.sum()))
            assert torch.equal(kept[reached], wanted[some][reached])
        assert reached.all()
    assert num_reached[3] < num_reached[5] == 4


@pytest.mark.parametrize("first_ranked", [1, 1024])
def test_a_device_draws_what_a_host_draws(
    first_ranked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it ranks; greedy rows between, and rows of the engine that others have."""
    monkeypatch.setattr(sampling, "FIRST_RANKED", first_ranked)
    asked = [{}, {"top_p": 0.97}, {"min_p": 0.01}, {"top_k": 20}, {"temperature": 1e-46}, {}]
    rows = [row([1], seed=i, **({"temperature": 2.0} | a if a else a)) for i, a in enumerate(asked)]
    for seed in range(8):
        logits = logits_for(len(rows), seed=seed)
        wanted = choose(logits.clone(), rows, 1)
        with FakeGpu() as gpu:
            attached(rows, gpu)
            here = to_device(logits.numpy(), gpu.device)
            gpu.waits.clear()
            assert choose(here, rows, 1) == wanted
        assert len(gpu.waits) == 1 or first_ranked == 1
