"""What a device draws, against the sampler of hosts."""

from __future__ import annotations

import math

import pytest
import torch

from quadriga.engine import sampler
from quadriga.engine.cuda import sampling
from quadriga.engine.cuda.sampling import SamplingTensors, truncate
from quadriga.engine.sampler import RowSampler, choose, process
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


@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize("first_ranked", [1, 1024])
def test_a_device_draws_what_a_host_draws(
    first_ranked: int, is_attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it ranks; greedy rows between, and rows of the engine that others have."""
    monkeypatch.setattr(sampling, "FIRST_RANKED", first_ranked)
    asked = [{}, {"top_p": 0.97}, {"min_p": 0.01}, {"top_k": 20}, {"temperature": 1e-46}, {}]
    rows = [row([1], seed=i, **({"temperature": 2.0} | a if a else a)) for i, a in enumerate(asked)]
    for seed in range(8):
        logits = logits_for(len(rows), seed=seed)
        wanted = choose(logits.clone(), rows, 1)
        with FakeGpu() as gpu:
            if is_attached:
                attached(rows, gpu)
            here = to_device(logits.numpy(), gpu.device)
            gpu.waits.clear()
            assert choose(here, rows, 1) == wanted
        assert len(gpu.waits) == 1 or first_ranked == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_end_in_an_error_and_no_others(value: float) -> None:
    asked = [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1, "num_logprobs": 1}]
    asked.append({"temperature": 0.0, "num_logprobs": 0})
    rows = [row([1], **({"temperature": 1.0} | a)) for a in asked + asked]
    logits = logits_for(len(rows), seed=1)
    wanted = choose(logits, rows, 1)
    logits[:5] = value
    found = [choose(logits, rows, 1)]
    with FakeGpu() as gpu:
        attached(rows, gpu)
        found.append(choose(to_device(logits.numpy(), gpu.device), rows, 1))
    for tokens in found:
        assert all("are not finite" in str(token.error) for token in tokens[:5])
        assert all(token.token_id < VOCAB for token in tokens[:5])
        assert tokens[5:] == wanted[5:]


def test_the_tokens_of_an_answer_that_is_resumed_are_counted_at_once() -> None:
    kernels = []
    for count in (1, 500):
        output = [i * i % VOCAB for i in range(count)]
        resumed = row([1], output, frequency_penalty=0.5)
        with FakeGpu() as gpu:
            process(to_device(logits_for(1, seed=1).numpy(), gpu.device), [resumed])
            assert resumed._output_counts is not None
            counts = resumed._output_counts.cpu()
        assert counts.tolist() == torch.bincount(torch.tensor(output), minlength=VOCAB).tolist()
        kernels.append(gpu.kernels)
    assert kernels[0] == kernels[1]
