"""The attentions agree with the reference, on the GPU and with its own page size."""

from __future__ import annotations

import pytest
import torch

from quadriga.config.engine_spec import Attention
from quadriga.engine.cuda.attention import TorchAttention, choose_attention
from quadriga.engine.cuda.paged_attention import PagedKV, Runs
from quadriga.engine.cuda.pages import PAGE_TOKENS
from quadriga.engine.models.layers import TokenSpan
from quadriga.errors import ConfigError
from tests.gpu.devices import DEVICE, gpu
from tests.unit.engine.cuda.test_attention import make_config

pytestmark = gpu

BLOCKS, COUNT = 6, 48
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("window", [0, 1, 100, 700])
@pytest.mark.parametrize("shape", [(8, 4, 128), (2, 5, 32), (1, 8, 64), (4, 1, 256), (2, 3, 40)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", ["flash", "triton"])
def test_equals_the_reference(
    name: Attention, dtype: torch.dtype, shape: tuple[int, int, int], window: int
) -> None:
    config = make_config(*shape)
    try:
        attention = choose_attention(name, config, dtype, DEVICE)
    except ConfigError as exc:
        pytest.skip(str(exc))
    reference = TorchAttention(config)
    generator = torch.Generator().manual_seed(3)
    num_pages = 1 + BLOCKS * COUNT
    pools = torch.randn(
        (2, num_pages, PAGE_TOKENS, config.num_kv_heads, config.head_dim), generator=generator
    )
    keys, values = pools.to(DEVICE, dtype)
    table = 1 + torch.randperm(num_pages - 1, generator=generator).int().view(COUNT, BLOCKS)
    table = table.to(DEVICE)
    for count in (1, 7, COUNT):
        q = torch.randn(count, config.num_heads, config.head_dim, generator=generator)
        positions = torch.randint(0, BLOCKS * PAGE_TOKENS, (count,), generator=generator)
        positions[0] = BLOCKS * PAGE_TOKENS - 1
        q, lengths = q.to(DEVICE, dtype), (positions + 1).int().to(DEVICE)
        longest = BLOCKS * PAGE_TOKENS
        got, wanted = (
            a.each(q, PagedKV(keys, values, table[:count]), lengths, longest, window)
            for a in (attention, reference)
        )
        torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=0)
    spans = [TokenSpan(0, 0, 300, 1000), TokenSpan(1, 300, 301, 255), TokenSpan(2, 301, 340, 0)]
    q = torch.randn(340, config.num_heads, config.head_dim, generator=generator).to(DEVICE, dtype)
    got, wanted = (
        a.runs(
            q,
            PagedKV(keys, values, table[:3]),
            Runs.of(spans, a.block_queries, DEVICE),
            window,
        )
        for a in (attention, reference)
    )
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=0)
