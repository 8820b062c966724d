"""Weights that are rounded while they load: compiled is plain torch, in any company and depth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from quadriga.checkpoint.exits import ExitParams
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.config.engine_spec import WeightForm
from quadriga.core.request import SamplingParams
from quadriga.engine import load_runner
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.weights.checkpoint_weights import ModelWeights
from quadriga.engine.weights.loading import FORM_OF_SETTING
from quadriga.engine.weights.matrix import Form, Matrix
from quadriga.llm import LLM
from tests.equivalence.models import assert_company_changes_nothing, make_spec, save
from tests.equivalence.test_gguf import SIZES, logits_of, made, some_ids

FORMS: list[WeightForm] = ["float16", "bfloat16", "int8"]
SIZES_HERE = SIZES | {"num_attention_heads": 8, "head_dim": 64, "vocab_size": 314}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(made(LlamaConfig(**SIZES_HERE)), tmp_path_factory.mktemp("model"))


def load(path: Path, **spec: object) -> NativeRunner:
    runner = load_runner(make_spec(path, compile="wait", **spec))
    assert isinstance(runner, NativeRunner)
    return runner


def matrices(weights: ModelWeights) -> list[Matrix]:
    layers = [linear.weight for w in weights.layers for linear in (w.qkv, w.out, w.up, w.down)]
    maps = [m.kv.weight for of_exit in weights.kv_maps.values() for m in of_exit]
    return [weights.embed, *layers, *maps, *(head.weight for head in weights.heads.values())]


@pytest.mark.parametrize("form", FORMS)
def test_every_matrix_has_the_form(folder: Path, form: WeightForm) -> None:
    weights = load(folder, weights=form).model.weights
    assert {m.form for m in matrices(weights)} == {FORM_OF_SETTING[form]}
    exits = load(read_checkpoint("quadriga-s").path, weights=form).model.weights
    assert {m.form for m in matrices(exits)} == {FORM_OF_SETTING[form]}
    assert len(exits.heads) > 1


@pytest.mark.parametrize("form", FORMS)
def test_compiled_is_plain_torch(folder: Path, form: WeightForm) -> None:
    """What both round to is the same, so they part by less than the form parts from float32."""
    ids = some_ids(300)
    whole = logits_of(folder, ids)
    plain = logits_of(folder, ids, weights=form)
    compiled = logits_of(folder, ids, weights=form, compile="wait")
    rounding = (plain - whole).abs().mean()
    assert 0 < rounding < 0.1 * whole.std()
    assert (compiled - plain).abs().mean() < 0.6 * rounding


@pytest.mark.parametrize("form", FORMS)
def test_company_and_threads_change_nothing(folder: Path, form: WeightForm) -> None:
    runner, alone = (load(folder, weights=form, threads=n) for n in (1, 3))
    prompts = [some_ids(300)[:n] for n in (1, 2, 3, 5, 7, 8, 9)]
    assert_company_changes_nothing(runner, alone, prompts)


@pytest.mark.parametrize("form", FORMS)
def test_replicas_of_a_node_share_them(folder: Path, form: WeightForm, tmp_path: Path) -> None:
    first, second = (
        load(folder, weights=form, shared_in=tmp_path / "shared").model.weights for _ in range(2)
    )
    other = load(folder, shared_in=tmp_path / "shared").model.weights
    for one, two in zip(matrices(first), matrices(second), strict=True):
        assert torch.equal(one.rows, two.rows)
    assert {m.form for m in matrices(other)} == {Form.FLOAT32}  # another form is another part


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_drafts_of_exits_change_no_token(form: WeightForm) -> None:
    """With exits the model still says what it says at full depth in the same form."""
    prompts = ["Sort: 42 7 19 3 88\n", "Reverse: 5 6 7\n", "Count from 3 to 20.\n"]
    params = SamplingParams(24, temperature=0.0)
    llm = LLM("quadriga-s", engine={"weights": form, "compile": "wait"}, decode={"max_slots": 4})
    try:
        lossless = llm.generate(prompts, params, progress=False)
        full = llm.generate(prompts, params, exits=ExitParams(threshold=1.0), progress=False)
    finally:
        llm.close()
    assert [o.token_ids for o in lossless] == [o.token_ids for o in full]
    assert "3 7 19 42 88" in lossless[0].text


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_more_layers_come_in_the_same_form(form: WeightForm) -> None:
    path = read_checkpoint("quadriga-s").path
    shallow, whole = (
        load(
            path,
            weights=form,
            depth=d,
            exits=read_checkpoint(str(path)).exits.cut(d),
            exit_plan=read_checkpoint(str(path)).exits,
        )
        for d in (4, 8)
    )
    with shallow.model.prepare_depth(8, timeout_s=60.0) as prepared:
        assert prepared.eager is not None
        for one, two in zip(
            matrices(prepared.eager.weights), matrices(whole.model.weights), strict=True
        ):
            assert one.form is two.form
            assert torch.equal(one.rows, two.rows)
