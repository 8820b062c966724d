"""Weights that stay in the form they are stored in give what they give in float32: to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig

from quadriga.engine import load_runner
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.weights.matrix import Form
from quadriga.gguf.cache import converted_folder, plain_folder
from tests.equivalence.models import assert_company_changes_nothing, make_spec
from tests.equivalence.test_gguf import SIZES, logits_of, made, some_ids
from tests.gguf_files import write_model

KINDS = {
    Kind.F32: Form.FLOAT32,
    Kind.F16: Form.FLOAT16,
    Kind.BF16: Form.BFLOAT16,
    Kind.Q8_0: Form.Q8_0,
    Kind.Q4_0: Form.Q4_0,
    Kind.Q4_1: Form.Q4_1,
}
LENGTHS = [1, 2, 3, 5, 7, 8, 9, 48]
"""Each has other tiles, and other numbers of blocks of tokens."""


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param.name)
    heads = {"num_attention_heads": 8, "head_dim": 64}
    model = made(LlamaConfig(**(SIZES | heads)))
    return write_model(folder / f"{request.param.name}.gguf", model, kind=request.param)


@pytest.fixture(scope="module")
def folders(file: Path) -> tuple[Path, Path]:
    """As it is stored, and with every weight as float32."""
    stored = converted_folder(file, file.parent / "cache")
    plain = plain_folder(file, file.parent / "plain")
    return stored, plain


def test_kernels(file: Path, folders: tuple[Path, Path]) -> None:
    stored, plain = folders
    runner = load_runner(make_spec(stored, compile="wait"))
    assert isinstance(runner, NativeRunner)
    weights = runner.model.weights
    form = KINDS[Kind[file.stem]]
    assert {m.form for m in (weights.embed, weights.layers[0].qkv.weight)} == {form}
    ids = some_ids(320)
    for length in LENGTHS:
        ours = logits_of(stored, ids[:length], compile="wait")
        assert torch.equal(ours, logits_of(plain, ids[:length], compile="wait")), length


def test_plain_torch(folders: tuple[Path, Path]) -> None:
    stored, plain = folders
    assert torch.equal(logits_of(stored, some_ids(320)), logits_of(plain, some_ids(320)))


def test_company_changes_nothing(folders: tuple[Path, Path]) -> None:
    runner = load_runner(make_spec(folders[0], compile="wait"))
    assert_company_changes_nothing(runner, runner, [some_ids(320)[:n] for n in LENGTHS[:7]])
