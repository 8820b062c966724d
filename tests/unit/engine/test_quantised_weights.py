"""Quantised checkpoints are read as their layouts say: the numbers, and what is refused.

The layouts are written here a weight at a time, by the words of their sources (see
`quadriga.checkpoint.quantisation`), beside the code that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from quadriga.catalogue.headers import SINGLE_FILE
from quadriga.catalogue.inspection import inspect
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.checkpoint.model_config import read_model_config
from quadriga.config.kv_memory import weight_bytes
from quadriga.engine.weights.loading import load_weights
from quadriga.engine.weights.matrix import Form
from quadriga.engine.weights.tensor_files import WeightSource
from quadriga.errors import ConfigError
from tests.equivalence.models import GATED, randomise, save

Tensors = dict[str, torch.Tensor]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
GROUP = 32


def draw(rows: int, columns: int, bits: int, groups: int) -> tuple[Tensors, torch.Tensor]:
    """Random counts, zero points and scales by group of columns, and the numbers they stand for."""
    counts = torch.randint(0, 1 << bits, (rows, columns))
    zeros = torch.randint(0, 1 << bits, (rows, groups))
    scales = (torch.rand(rows, groups) / 50 + 0.001).half()
    of = torch.arange(columns) // -(-columns // groups)
    values = (counts - zeros[:, of]) * scales.float()[:, of]
    return {"counts": counts, "zeros": zeros, "scales": scales, "of": of}, values


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, m] counts → int32 [n, m · bits / 32], the first in the lowest bits, one at a time."""
    per_word = 32 // bits
    rows, columns = values.shape
    out = torch.zeros(rows, -(-columns // per_word), dtype=torch.int64)
    for column in range(columns):
        out[:, column // per_word] |= values[:, column].long() << bits * (column % per_word)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int()


def gptq(rows: int, columns: int, *, bits: int = 4, one: int = 1, act: bool = False) -> Any:
    parts, values = draw(rows, columns, bits, columns // GROUP)
    of = parts["of"]
    if act:  # columns in another order belong to the groups
        of = of[torch.randperm(columns)]
        values = (parts["counts"] - parts["zeros"][:, of]) * parts["scales"].float()[:, of]
    stored = {
        "qweight": words(parts["counts"], bits).t(),
        "qzeros": words((parts["zeros"].t() - one) % (1 << bits), bits),
        "scales": parts["scales"].t(),
        "g_idx": of.int(),
    }
    return stored, values


def awq(rows: int, columns: int) -> Any:
    parts, values = draw(rows, columns, 4, columns // GROUP)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that goes into each nibble

    def packed(of_rows: torch.Tensor) -> torch.Tensor:
        eights = of_rows.t().reshape(of_rows.shape[1], -1, 8)[:, :, order]
        return words(eights.reshape(of_rows.shape[1], -1), 4)

    stored = {
        "qweight": packed(parts["counts"]),
        "qzeros": packed(parts["zeros"]),
        "scales": parts["scales"].t(),
    }
    return stored, values


def packed_tensors(rows: int, columns: int, *, bits: int, symmetric: bool) -> Any:
    parts, values = draw(rows, columns, bits, columns // GROUP)
    stored = {
        "weight_packed": words(parts["counts"], bits),
        "weight_scale": parts["scales"],
        "weight_shape": torch.tensor([rows, columns]),
    }
    if symmetric:
        half = 1 << (bits - 1)
        values = (parts["counts"] - half) * parts["scales"].float()[:, parts["of"]]
    else:
        stored["weight_zero_point"] = words(parts["zeros"].t(), bits).t()
    return stored, values


def int8(rows: int, columns: int, *, shape: str) -> Any:
    counts = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    scales = torch.rand(rows, 1) / 100 if shape == "channel" else torch.rand(1) / 100
    return {"weight": counts, "weight_scale": scales}, counts.float() * scales


def fp8(rows: int, columns: int, *, name: str, blocks: bool, high: int = 24) -> Any:
    stored = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    if not blocks:
        scales = torch.rand(rows, 1) / 10
        return {"weight": stored, name: scales}, stored.float() * scales
    scales = torch.rand(-(-rows // high), -(-columns // 40))
    each = [[scales[r // high, c // 40] for c in range(columns)] for r in range(rows)]
    return {"weight": stored, name: scales}, stored.float() * torch.tensor(each)


def groups_of(**weights: Any) -> dict[str, Any]:
    """What is said of weights, and beside it of KV, which has none."""
    scheme = {"targets": ["Linear"], "input_activations": None, "weights": weights}
    kv = {"targets": ["LlamaAttention"], "output_activations": {"num_bits": 8}, "weights": None}
    groups = {"group_0": scheme, "group_1": kv}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


PACKED = {"format": "pack-quantized"}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[int, int], Any]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq with columns in another order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda r, c: gptq(r, c, act=True),
    ),
    "gptq of 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
        lambda r, c: gptq(r, c, bits=8),
    ),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        lambda r, c: gptq(r, c, one=0),
    ),
    "gptq_v2 by the newer name of the field": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "format": "gptq_v2"},
        lambda r, c: gptq(r, c, one=0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "compressed-tensors, 4 bits": (
        groups_of(num_bits=4, type="int", strategy="group", group_size=GROUP) | PACKED,
        lambda r, c: packed_tensors(r, c, bits=4, symmetric=True),
    ),
    "compressed-tensors, 8 bits with zero points": (
        groups_of(num_bits=8, type="int", strategy="group", group_size=GROUP) | PACKED,
        lambda r, c: packed_tensors(r, c, bits=8, symmetric=False),
    ),
    "compressed-tensors, int8 by channel": (
        groups_of(num_bits=8, type="int", strategy="channel") | {"format": "int-quantized"},
        lambda r, c: int8(r, c, shape="channel"),
    ),
    "compressed-tensors, int8 by tensor": (
        groups_of(num_bits=8, type="int", strategy="tensor") | {"format": "int-quantized"},
        lambda r, c: int8(r, c, shape="tensor"),
    ),
    "compressed-tensors, FP8 by channel": (
        groups_of(num_bits=8, type="float", strategy="channel") | {"format": "float-quantized"},
        lambda r, c: fp8(r, c, name="weight_scale", blocks=False),
    ),
    "compressed-tensors, FP8 by block of more rows than there are": (
        groups_of(num_bits=8, type="float", strategy="block", block_structure=[10**30, 40])
        | {"format": "float-quantized"},
        lambda r, c: fp8(r, c, name="weight_scale", blocks=True, high=10**30),
    ),
    "compressed-tensors, FP8 by block, as older releases wrote it": (
        groups_of(num_bits=8, type="float", strategy="block", block_structure="24x40")
        | {"format": "float-quantized"},
        lambda r, c: fp8(r, c, name="weight_scale", blocks=True),
    ),
    "FP8 by block": (
        {"quant_method": "fp8", "weight_block_size": [24, 40]},
        lambda r, c: fp8(r, c, name="weight_scale_inv", blocks=True),
    ),
    "FP8 by block of one row": (
        {"quant_method": "fp8", "weight_block_size": [1, 40]},
        lambda r, c: fp8(r, c, name="weight_scale_inv", blocks=True, high=1),
    ),
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(**(GATED | SIZES))
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return save(randomise(auto.from_config(config)), tmp_path / "whole")


def quantise(folder: Path, layout: str) -> Tensors:
    """Put the layout's tensors into the place of the layers' matrices; return their numbers."""
    said, make = LAYOUTS[layout]
    tensors = load_file(folder / SINGLE_FILE)
    expected = {}
    for name in [n for n in tensors if "_proj.weight" in n]:
        stored, expected[name] = make(*tensors.pop(name).shape)
        base = name.removesuffix("weight")
        tensors |= {base + part: t.contiguous() for part, t in stored.items()}
    save_file(tensors, folder / SINGLE_FILE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_the_layout(whole: Path, layout: str) -> None:
    torch.manual_seed(2)
    expected = quantise(whole, layout)
    for form in ("stored", Form.INT8):
        source = WeightSource(whole, torch.float32, form=form)  # type: ignore[arg-type]
        weights = load_weights(source, read_model_config(whole), 2, 32)
        for index, layer in enumerate(weights.layers):
            at = f"model.layers.{index}."
            q, k, v = (expected[f"{at}self_attn.{n}_proj.weight"] for n in "qkv")
            gate, up = (expected[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up"))
            down = expected[f"{at}mlp.down_proj.weight"]
            for matrix, numbers in (
                (layer.qkv.weight, torch.cat((q, k, v))),
                (layer.up.weight, torch.cat((gate, up))),
                (layer.down.weight, down),
            ):
                values = matrix.values(torch.float32)
                if form is Form.INT8:
                    assert matrix.form is Form.INT8
                    steps = numbers.abs().amax(1, keepdim=True) / 127
                    assert ((values - numbers).abs() <= 0.5001 * steps).all()
                else:
                    assert matrix.form is Form.FLOAT32
                    torch.testing.assert_close(values, numbers, rtol=1e-6, atol=1e-7)
    (whole / "tokenizer.json").write_text("{}")
    assert inspect(str(whole)).sizes.num_layers == 2
    checkpoint = read_checkpoint(str(whole))
    assert weight_bytes(checkpoint, 4, matrices="stored") > 0


TURNED = {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "0 is no size"),
        ({"quant_method": "gptq"}, "KeyError 'bits'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (groups_of(num_bits=4, type="int") | {"format": "marlin-24"}, "format 'marlin-24'"),
        (groups_of(num_bits=3, type="int") | PACKED, "num_bits 3"),
        (groups_of(num_bits=4, type="float") | PACKED, "num_bits 4"),
        ({"quant_method": "fp8", "weight_block_size": 3}, "TypeError"),
        (groups_of(num_bits=4, type="int") | PACKED | TURNED, "transform_config 'input'"),
    ],
)
def test_what_is_not_understood_is_refused(whole: Path, said: Any, message: str) -> None:
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    with pytest.raises(ConfigError, match=message) as refused:
        read_model_config(whole)
    assert "quantised" in str(refused.value)


def halve(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: tensor.shape[0] // 2].contiguous()


MAY_BE_MISSING = ("g_idx", "weight_zero_point")


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        ("gptq", "qweight"),
        ("gptq", "qzeros"),
        ("gptq", "scales"),
        ("gptq", "g_idx"),
        ("awq", "qweight"),
        ("awq", "qzeros"),
        ("compressed-tensors, 4 bits", "weight_packed"),
        ("compressed-tensors, 4 bits", "weight_scale"),
        ("compressed-tensors, 8 bits with zero points", "weight_zero_point"),
        ("compressed-tensors, int8 by channel", "weight_scale"),
        ("FP8 by block", "weight_scale_inv"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(whole: Path, layout: str, part: str) -> None:
    quantise(whole, layout)
    tensors = load_file(whole / SINGLE_FILE)
    tensor = tensors.pop(f"model.layers.1.mlp.down_proj.{part}")
    name = f"model.layers.1.mlp.down_proj.{part}"
    for changed in ({name: halve(tensor)}, {}):
        if not changed and part in MAY_BE_MISSING:
            continue
        save_file(tensors | changed, whole / SINGLE_FILE)
        with pytest.raises(ConfigError, match="down_proj"):
            load_weights(WeightSource(whole, torch.float32), read_model_config(whole), 2, 32)


@pytest.mark.parametrize(
    ("layout", "part", "values", "message"),
    [
        ("gptq", "g_idx", [0] * 63 + [99], "do not fit 2 scales"),
        ("compressed-tensors, 4 bits", "weight_shape", [64, 10**6], "weight_packed holds"),
        ("compressed-tensors, 4 bits", "weight_shape", [float("inf")] * 2, "infinity"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    whole: Path, layout: str, part: str, values: Any, message: str
) -> None:
    quantise(whole, layout)
    tensors = load_file(whole / SINGLE_FILE)
    tensors[f"model.layers.0.self_attn.q_proj.{part}"] = torch.tensor(values)
    save_file(tensors, whole / SINGLE_FILE)
    with pytest.raises(ConfigError, match=f"q_proj.*{message}"):
        load_weights(WeightSource(whole, torch.float32), read_model_config(whole), 2, 32)
