"""What is asked of flash-attn and CuPy exists there, of which tests have stand-ins alone.

The tables are facts of the releases that the extras pin: the names and order of parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from quadriga.kv_transport.nccl_library import NcclEnd
from tests.fake_nccl import FakeCommunicator, FakeNccl
from tests.unit.engine.cuda.test_attention import FlashStandIn

FLASH_ATTN = {
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
        "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
        "num_splits return_softmax_lse"
    ),
    "flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
        "window_size softcap alibi_slopes deterministic return_attn_probs block_table"
    ),
}
"""Source: flash_attn/flash_attn_interface.py of the source packages 2.8.3 to 2.8.3.post2, alike."""
CUPY_COMMUNICATOR = {
    "send": "sendbuf count datatype peer stream",
    "recv": "recvbuf count datatype peer stream",
    "check_async_error": "",
    "abort": "",
}
CUPY_MODULE = {"get_unique_id": "", "groupStart": "", "groupEnd": ""}
"""Source: cupy.cuda.nccl of the wheel cupy-cuda13x 14.2.0, imported with NCCL 2.32."""


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", FLASH_ATTN)
def test_the_stand_in_for_flash_attn_takes_a_part_of_what_flash_attn_takes(name: str) -> None:
    """The stand-in refuses every other keyword, so our calls are among these too."""
    taken = inspect.signature(getattr(FlashStandIn(), name)).parameters.values()
    theirs = FLASH_ATTN[name].split()
    by_place = [p.name for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place == theirs[: len(by_place)]
    assert {p.name for p in taken} <= set(theirs)


@pytest.mark.parametrize("name", CUPY_COMMUNICATOR)
def test_the_stand_in_for_cupys_communicator_takes_what_cupys_takes(name: str) -> None:
    assert parameters(getattr(FakeCommunicator, name)) == CUPY_COMMUNICATOR[name].split()
    assert parameters(getattr(NcclEnd, name)) == CUPY_COMMUNICATOR[name].split()


@pytest.mark.parametrize("name", CUPY_MODULE)
def test_the_stand_in_for_cupys_module_takes_what_cupys_takes(name: str) -> None:
    assert parameters(getattr(FakeNccl, name)) == CUPY_MODULE[name].split()
