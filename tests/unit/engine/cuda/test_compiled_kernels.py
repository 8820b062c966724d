"""The Triton kernels compiled for the GPUs they are meant for, where there is none.

What a compiler tells without a device: that it takes the kernel, that registers and shared memory
suffice, that products run on the tensor cores, and that the next tile is loaded meanwhile.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.cuda.test_attention import make_config

pytest.importorskip(
    "triton", reason="triton is not installed: kernels are not compiled; pip install '.[kernels]'"
)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quadriga.engine.cuda import triton_attention
from quadriga.engine.cuda.pages import PAGE_TOKENS

pytestmark = [
    pytest.mark.skipif(
        triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 leaves nothing to compile"
    ),
    # Of Triton about its own defaults.
    pytest.mark.filterwarnings("ignore::UserWarning:triton"),
    pytest.mark.timeout(600),
]
ARCHITECTURES = (80, 90, 100, 120)
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""The most that one block may have. Source: CUDA C++ programming guide, compute capabilities."""
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
NAMES = (
    *("q", "keys", "values", "table", "begins", "lengths", "block_runs", "block_begins"),
    *("out", "part_out", "part_max", "part_sum", "table_stride", "scale", "window"),
)


def compiled(
    architecture: int, dtype: torch.dtype, shape: tuple[int, int, int], *, is_run: bool, splits: int
) -> Any:
    """`_attend` as `TritonAttention` launches it."""
    attention = triton_attention.TritonAttention(make_config(*shape), dtype)
    constants = attention.constants(dtype, PAGE_TOKENS, is_run=is_run, splits=splits)
    options = {"num_stages": constants.pop("num_stages"), "num_warps": 4}
    own = POINTERS[dtype]
    types = dict.fromkeys(NAMES, "*i32")
    types |= dict.fromkeys(("q", "keys", "values", "out"), own)
    types |= dict.fromkeys(("part_out", "part_max", "part_sum"), "*fp32")
    types |= {"table_stride": "i32", "scale": "fp32", "window": "i32"}
    aligned = [i for i, name in enumerate(NAMES) if name not in ("scale", "window")]
    source = ASTSource(
        triton_attention._attend,
        types | dict.fromkeys(constants, "constexpr"),
        constants,
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def spilled_bytes(kernel: Any, folder: Path) -> int:
    """Memory of each thread beyond its registers, as the assembler's own tool says."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"STACK:(\d+).* LOCAL:(\d+)", said)
    assert found is not None, said
    return int(found[1]) + int(found[2])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["decode", "prompt"])
def test_the_kernel_fits_each_gpu(
    kind: str, dtype: torch.dtype, architecture: int, tmp_path: Path
) -> None:
    is_run = kind == "prompt"
    kernel = compiled(architecture, dtype, (2, 4, 64), is_run=is_run, splits=1 if is_run else 4)
    assert spilled_bytes(kernel, tmp_path) == 0
    assert kernel.metadata.shared <= SHARED_BYTES[architecture]
    if dtype == torch.float32:
        return  # in full precision, which no tensor core has
    assert re.search(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", kernel.asm["ptx"])
    if is_run:
        return
    constants = triton_attention.TritonAttention(make_config(2, 4, 64), dtype).constants(
        dtype, PAGE_TOKENS, is_run=False, splits=4
    )
    tile = f"{constants['TILE']}x{constants['HEAD_PADDED']}x"
    buffers = re.findall(r"local_alloc.*memdesc<(\d+)x" + tile, kernel.asm["ttgir"])
    assert buffers == ["2", "2"], "of keys and of values, the tile in use and the next"


@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
def test_the_kernel_takes_every_size_of_head(head_dim: int, tmp_path: Path) -> None:
    for is_run in (False, True):
        kernel = compiled(90, torch.bfloat16, (2, 3, head_dim), is_run=is_run, splits=1)
        assert spilled_bytes(kernel, tmp_path) == 0
        assert kernel.metadata.shared <= SHARED_BYTES[90]
