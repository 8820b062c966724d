"""The Triton kernels compiled for the GPUs they are meant for, where there is none.

What a compiler tells without a device: that it takes the kernel, that registers and shared memory
suffice, that products run on the tensor cores, and that the next tile is loaded meanwhile.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quadriga.engine.cuda import triton_attention, triton_operations, triton_products
from quadriga.engine.cuda.operations import SAYS
from quadriga.engine.cuda.pages import PAGE_TOKENS
from tests.unit.engine.cuda.layer_cases import config_of
from tests.unit.engine.cuda.test_attention import make_config

pytestmark = [
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
SMALLEST = 120  # has the least shared memory
each_gpu = pytest.mark.parametrize(
    ("dtype", "architecture"),
    [
        pytest.param(
            dtype,
            architecture,
            marks=() if dtype == torch.bfloat16 or architecture == SMALLEST else pytest.mark.slow,
        )
        for dtype in POINTERS
        for architecture in ARCHITECTURES
    ],
    ids=str,
)
"""Every GPU with bfloat16, every type on the smallest; the other pairs are slow tests."""


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    architecture: int,
    *,
    unaligned: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """A kernel as a launch compiles it: pointers and sizes are multiples of 16 but for some."""
    aligned = [i for i, name in enumerate(types) if name not in unaligned]
    source = ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        constants,
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def compiled_attention(
    architecture: int, dtype: torch.dtype, shape: tuple[int, int, int], *, is_run: bool, splits: int
) -> Any:
    """`_attend` as `TritonAttention` launches it."""
    attention = triton_attention.TritonAttention(make_config(*shape), dtype)
    constants = attention.constants(dtype, PAGE_TOKENS, is_run=is_run, splits=splits)
    stages = constants.pop("num_stages")
    types = dict.fromkeys(NAMES, "*i32")
    types |= dict.fromkeys(("q", "keys", "values", "out"), POINTERS[dtype])
    types |= dict.fromkeys(("part_out", "part_max", "part_sum"), "*fp32")
    types |= {"table_stride": "i32", "scale": "fp32", "window": "i32"}
    return compiled(
        triton_attention._attend,
        types,
        constants,
        architecture,
        unaligned=("scale", "window"),
        num_stages=stages,
        num_warps=4,
    )


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


@each_gpu
@pytest.mark.parametrize("kind", ["decode", "prompt"])
def test_the_kernel_fits_each_gpu(
    kind: str, dtype: torch.dtype, architecture: int, tmp_path: Path
) -> None:
    is_run = kind == "prompt"
    splits = 1 if is_run else 4
    kernel = compiled_attention(architecture, dtype, (2, 4, 64), is_run=is_run, splits=splits)
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
        kernel = compiled_attention(90, torch.bfloat16, (2, 3, head_dim), is_run=is_run, splits=1)
        assert spilled_bytes(kernel, tmp_path) == 0
        assert kernel.metadata.shared <= SHARED_BYTES[90]


@each_gpu
def test_the_small_kernels_fit_each_gpu(
    dtype: torch.dtype, architecture: int, tmp_path: Path
) -> None:
    """What joins attention's splits, and the operations of a layer of 8B and of an exit."""
    own = POINTERS[dtype]
    config = replace(config_of(8, 4, 128), hidden_size=4096, ffn_size=14_336)
    operations = triton_operations.TritonOperations(config)
    parts = ("part_out", "part_max", "part_sum")
    rotation = [*("qkv", "q_norm", "k_norm", "cos", "sin"), *("q_out", "keys", "values")]
    rotated = dict.fromkeys(rotation[:5], own) | {"positions": "*i64", "slots": "*i64"}
    rotated |= dict.fromkeys(rotation[5:], own) | {"eps": "fp32"}
    names = ("x", "more", "weight", "added", "normed")
    kernels = [
        compiled(
            triton_attention._join,
            dict.fromkeys(parts, "*fp32") | {"out": own},
            {"HEAD": 128, "HEAD_PADDED": 128, "SPLITS": 16},
            architecture,
        ),
        compiled(
            triton_operations._add_norm,
            dict.fromkeys(names, own) | {"eps": "fp32"},
            {"HIDDEN": 4096, "WIDTH": 4096, "ADDS": True},
            architecture,
            unaligned=("eps",),
            num_warps=triton_operations._warps(4096),
        ),
        compiled(
            triton_operations._rotate_and_store,
            rotated,
            operations.rotation(norms=True, rotates=True),
            architecture,
            unaligned=("eps",),
        ),
        compiled(
            triton_operations._silu_mul,
            {"up": own, "out": own},
            {"FFN": 14_336, "BLOCK": triton_operations._INNER},
            architecture,
        ),
        compiled(
            triton_operations._say,
            {"logits": own, "wide": "*fp32", "parts": "*fp32"},
            {"VOCAB": 128_256, "SHARE": 8192, "BLOCK": triton_operations._LOGITS, "SHARES": 16},
            architecture,
            num_warps=8,
        ),
        compiled(
            triton_operations._say_joined,
            {"parts": "*fp32", "said": "*fp32"},
            {"SHARES": 16, "SAID": SAYS},
            architecture,
            num_warps=1,
        ),
    ]
    for kernel in kernels:
        assert spilled_bytes(kernel, tmp_path) == 0, kernel.name
        assert kernel.metadata.shared <= SHARED_BYTES[architecture]


@each_gpu
def test_products_of_one_token_read_weights_in_whole_words_and_early(
    dtype: torch.dtype, architecture: int, tmp_path: Path
) -> None:
    """Nothing but weights, 16 bytes at a time, before the wait for the kernel in front; no spills.

    What the kernel in front wrote must not be read before it, nor what it reads be written.
    """
    names = ("x", "more", "norm", "by", "bias", "added", "out")
    types = dict.fromkeys(names, POINTERS[dtype]) | {"eps": "fp32"}
    overlaps = architecture >= 90
    for inputs, outputs, is_gated in ((4096, 14_336, True), (14_336, 4096, False)):
        shape = triton_products.shape_of(inputs, outputs, is_gated=is_gated)
        warps = shape.pop("num_warps")
        flags = {"ADDS": is_gated, "NORMS": is_gated, "GATED": is_gated, "BIASED": False}
        kernel = compiled(
            triton_products._product,
            types,
            shape | flags | {"OVERLAPS": overlaps},
            architecture,
            unaligned=("eps",),
            num_warps=warps,
            launch_pdl=overlaps,
        )
        assert spilled_bytes(kernel, tmp_path) == 0
        before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
        assert bool(wait) == overlaps
        early = re.findall(r"ld\.global\S*", before)
        rows = shape["LANES"] * (2 if is_gated else 1)
        of_weights = rows * shape["WIDTH"] * dtype.itemsize // (16 * 32 * warps)
        assert all(".v4" in load for load in early)
        if overlaps:
            assert len(early) == of_weights
            assert "st.global" not in before
