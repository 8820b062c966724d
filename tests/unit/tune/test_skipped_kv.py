"""The stand-ins for skipped K and V: least squares, and a file that the engine reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quadriga.checkpoint.exits import EXITS_FILE, SKIPPED_KV_WEIGHTS, ExitSpec, to_json
from quadriga.engine.model_runner import NativeRunner
from quadriga.training.checkpoint_io import save_checkpoint
from quadriga.training.heads import fit_folder
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe.family import FAMILY, ModelShape
from quadriga.training.tokenizer import build_tokenizer
from quadriga.tune.answers import OwnAnswer
from quadriga.tune.skipped_kv import LeastSquares, fit_maps, own_kv, unit
from quadriga.tune.states import run_passes
from tests.equivalence.models import make_spec
from tests.unit.tune.models import VOCAB, save_model

SHAPE = ModelShape(hidden=32, layers=5, heads=4, kv_heads=2, head_dim=8, ff=48, exits=(1, 3))
PAIRS = {(1, 2), (1, 3), (1, 4), (3, 4)}


def sure_model() -> EarlyExitLlama:
    """A random model whose every token is sure at every exit."""
    model = EarlyExitLlama(SHAPE, build_tokenizer().get_vocab_size(), seed=5)
    with torch.no_grad():
        model.head.mul_(2000)
    return model


def test_least_squares_finds_the_lines_and_what_they_leave() -> None:
    """Two layers over the same inputs, each as if it were alone."""
    g = torch.Generator().manual_seed(1)
    least = LeastSquares(4, 3, (5, 6))
    lines = {k: (torch.randn(3, 4, generator=g), torch.randn(3, generator=g)) for k in (5, 6)}
    for _ in range(20):
        x = torch.randn(500, 4, generator=g)
        noise = 0.1 * torch.randn(500, 3, generator=g)
        least.add(x, {k: x @ weight.T + bias + noise for k, (weight, bias) in lines.items()})
    found = least.solve()
    assert found.keys() == {5, 6} and least.count == 10_000
    for layer, (weight, bias) in lines.items():
        mine, constant, share = found[layer]
        left = 0.03 / (float(weight.square().sum()) + 0.03)
        torch.testing.assert_close(mine, weight, atol=0.01, rtol=0.01)
        torch.testing.assert_close(constant, bias, atol=0.01, rtol=0.01)
        assert share == pytest.approx(left, rel=0.1)
    assert LeastSquares(4, 3, (5, 6)).solve() == {}


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_the_maps_guess_better_than_the_layers_own_projections(family: str, tmp_path: Path) -> None:
    exits = ExitSpec((1, 2), "shared", threshold=0.0)
    folder = save_model(family, tmp_path)
    (folder / EXITS_FILE).write_text(json.dumps(to_json(exits)))
    runner = NativeRunner.load(make_spec(folder, exits=exits))
    g = torch.Generator().manual_seed(2)
    rows = torch.randint(VOCAB, (60, 40), generator=g).tolist()
    answers = [OwnAnswer(str(i), row[:4], row[4:], True) for i, row in enumerate(rows)]
    maps, unexplained = fit_maps(runner, exits, answers)
    names = {f"exits.{depth}.kv.{layer}" for depth, layer in ((1, 2), (1, 3), (2, 3))}
    assert set(unexplained) == names
    assert set(maps) == {f"{name}.{part}" for name in names for part in ("weight", "bias")}
    held_out = torch.randint(VOCAB, (40,), generator=g).tolist()
    (seen,) = run_passes(runner, [held_out], (1, 2, 3))
    config, layers = runner.model.config, runner.weights.layers
    for depth, layer in ((1, 2), (1, 3), (2, 3)):
        name = f"exits.{depth}.kv.{layer}"
        true = own_kv(seen.states[layer], layers[layer], config)
        own = own_kv(seen.states[depth], layers[layer], config)
        made = unit(seen.states[depth], config) @ maps[f"{name}.weight"].T
        made += maps[f"{name}.bias"]
        assert (made - true).square().sum() < (own - true).square().sum()


def test_the_maps_of_a_bundled_model_are_stored_beside_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    member = dataclasses.replace(FAMILY["quadriga-s"], shape=SHAPE)
    save_checkpoint(sure_model(), member, folder, facts={"steps": 1, "tokens": 1})
    assert "exits.1.kv.4" in fit_folder(folder, prompts_per_task=2, max_tokens=12)
    stored = load_file(folder / SKIPPED_KV_WEIGHTS)
    assert {tuple(int(p) for p in name.split(".")[1:4:2]) for name in stored} == PAIRS
    assert stored["exits.1.kv.2.weight"].shape == (2 * 16, 32)
    assert all(t.dtype == torch.float16 and t.isfinite().all() for t in stored.values())
    assert not list(folder.glob(".*"))
