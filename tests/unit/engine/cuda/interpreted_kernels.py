"""The Triton kernels' own code, run by Triton's interpreter, which cannot multiply bfloat16.

Triton decides when it is imported: `test_interpreted_kernels.py` runs these in another process.
"""

from __future__ import annotations

import os

import pytest
import torch

from quadriga.engine.cuda.triton_attention import TritonAttention
from quadriga.engine.cuda.triton_operations import TritonOperations, fits
from tests.unit.engine.cuda import layer_cases
from tests.unit.engine.cuda.layer_cases import config_of
from tests.unit.engine.cuda.test_attention import CPU, SHAPES, WINDOWS, check, make_config

assert os.environ.get("TRITON_INTERPRET") == "1", "set it before Python starts"

pytestmark = pytest.mark.timeout(900)
QUICK = {
    (torch.float32, SHAPES[0], 0),
    (torch.float16, SHAPES[0], 290),
    (torch.float16, SHAPES[1], 7),
    (torch.float32, SHAPES[2], 7),
    (torch.float32, (2, 3, 20), 290),
}
"""Every shape and window, and both dtypes."""


@pytest.mark.parametrize(
    ("dtype", "shape", "window"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in (
            (dtype, shape, window)
            for dtype in (torch.float32, torch.float16)
            for shape in (*SHAPES, (2, 3, 20))
            for window in WINDOWS
        )
    ],
)
def test_attention(
    dtype: torch.dtype, shape: tuple[int, int, int], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(*shape)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    attention = TritonAttention(config, dtype)
    for splits in (1, 4):
        monkeypatch.setattr(attention, "_splits", lambda *_, n=splits: n)
        check(attention, config, dtype, window, tolerance)


@pytest.mark.parametrize("shape", [(2, 3, 24), (1, 8, 16), (5, 4, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_operations_of_a_layer(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    config = config_of(*shape)
    assert fits(config, CPU)
    layer_cases.check_operations(TritonOperations(config), config, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_logits_say(dtype: torch.dtype) -> None:
    layer_cases.check_say(TritonOperations(make_config(1, 1, 16)), dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_with_what_stands_around_them(dtype: torch.dtype) -> None:
    layer_cases.check_products(TritonOperations(make_config(1, 1, 16)), dtype, CPU)
