"""Where the GPU's tests run. Marked `gpu`, and skipped where there is none.

`QUADRIGA_GPU_TESTS_ON_CPU=1` rehearses them on a CPU (`make test-gpu`): it checks the tests, not a
GPU. Plain torch stands for Triton's attention and a tape for CUDA graphs; those marked `gpu_itself`
are about streams and memory, for which nothing can stand.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from quadriga.config.engine_spec import Attention, EngineSpec
from quadriga.engine.cuda.graphs import GraphRecorder
from quadriga.engine.cuda.pages import PAGE_TOKENS
from quadriga.engine.model_runner import NativeRunner
from tests.equivalence.paged import load_on_pages
from tests.equivalence.recording import TapeRecorder

HAS_GPU = torch.cuda.is_available()
IS_REHEARSAL = not HAS_GPU and os.environ.get("QUADRIGA_GPU_TESTS_ON_CPU") == "1"
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")
ATTENTIONS: tuple[Attention, ...] = ("flash", "triton", "torch")

_REASON = "torch sees no GPU: run on a GPU machine, see docs/gpu.md"
gpu: list[Any] = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU and not IS_REHEARSAL, reason=_REASON),
    pytest.mark.timeout(600),
    # Of torch and Triton about themselves; the GPU machine's versions are not pinned.
    pytest.mark.filterwarnings("default"),
]
gpu_itself = pytest.mark.skipif(not HAS_GPU, reason=_REASON)


def load_on_gpu(spec: EngineSpec, recorder: GraphRecorder | None = None) -> NativeRunner:
    """A runner with the GPU's pages; the spec says whether graphs and which attention.

    Skips where the attention's library is not installed.
    """
    if IS_REHEARSAL:
        if spec.attention != "triton":
            pytest.skip("one attention is rehearsed")
        if recorder is None and spec.compile != "off":
            recorder = TapeRecorder()
        spec = replace(spec, attention="torch", compile="off")  # recorded when first needed
    if spec.attention == "flash":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    if spec.attention == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    return load_on_pages(spec, recorder, page_tokens=PAGE_TOKENS, device=DEVICE)
