"""The operations of layers and exits agree with the reference, on the GPU and in its precisions."""

from __future__ import annotations

import pytest
import torch

from quadriga.engine.cuda.loading import operations_for
from tests.gpu.devices import DEVICE, HAS_GPU, gpu
from tests.unit.engine.cuda import layer_cases
from tests.unit.engine.cuda.layer_cases import TOLERANCE, config_of
from tests.unit.engine.cuda.test_attention import make_config

pytestmark = gpu


@pytest.mark.parametrize("shape", [(2, 3, 24), (8, 4, 128), (8, 8, 64), (1, 8, 256)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_operations_of_a_layer(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    config = config_of(*shape)
    operations = operations_for(config, DEVICE)
    assert type(operations).__name__ == ("TritonOperations" if HAS_GPU else "Operations")
    layer_cases.check_operations(operations, config, dtype, DEVICE)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_what_logits_say(dtype: torch.dtype) -> None:
    layer_cases.check_say(operations_for(config_of(1, 1, 16), DEVICE), dtype, DEVICE)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_products_with_what_stands_around_them(dtype: torch.dtype) -> None:
    layer_cases.check_products(operations_for(make_config(1, 1, 16), DEVICE), dtype, DEVICE)
