"""The stand-ins for skipped K and V: least squares, and a file that the engine reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quadriga.checkpoint.exits import SKIPPED_KV_WEIGHTS
from quadriga.tasks import make_example
from quadriga.training.checkpoint_io import save_checkpoint
from quadriga.training.cli import main
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe.family import FAMILY, ModelShape
from quadriga.training.skipped_kv import _kv, _LeastSquares, _unit, fit
from quadriga.training.tokenizer import build_tokenizer

SHAPE = ModelShape(hidden=32, layers=5, heads=4, kv_heads=2, head_dim=8, ff=48, exits=(1, 3))
PAIRS = {(1, 2), (1, 3), (1, 4), (3, 4)}


def sure_model() -> EarlyExitLlama:
    """A random model whose every token is sure at every exit."""
    model = EarlyExitLlama(SHAPE, build_tokenizer().get_vocab_size(), seed=5)
    with torch.no_grad():
        model.head.mul_(2000)
    return model


def test_least_squares_finds_the_line_and_what_it_leaves() -> None:
    g = torch.Generator().manual_seed(1)
    least = _LeastSquares(4, 3)
    weight, bias = torch.randn(3, 4, generator=g), torch.randn(3, generator=g)
    for _ in range(20):
        x = torch.randn(500, 4, generator=g)
        least.add(x, x @ weight.T + bias + 0.1 * torch.randn(500, 3, generator=g))
    found, constant, share = least.solve()
    noise = 0.03 / (float(weight.square().sum()) + 0.03)
    torch.testing.assert_close(found, weight, atol=0.01, rtol=0.01)
    torch.testing.assert_close(constant, bias, atol=0.01, rtol=0.01)
    assert share == pytest.approx(noise, rel=0.1)


def test_the_maps_guess_better_than_the_layers_own_projections() -> None:
    model, tokenizer = sure_model(), build_tokenizer()
    maps, unexplained = fit(
        model, tokenizer, [make_example("copy", seed=3, index=i) for i in range(150)]
    )
    names = {f"exits.{depth}.kv.{layer}" for depth, layer in PAIRS}
    assert set(unexplained) == names
    assert set(maps) == {f"{name}.{part}" for name in names for part in ("weight", "bias")}
    held_out = torch.tensor(tokenizer.encode(make_example("copy", seed=4, index=0).prompt).ids)
    every = torch.arange(len(held_out))
    with torch.no_grad():
        states = model(held_out, every, [(1, len(held_out))], every, depths=(1, 2, 3, 4, 5))
        for depth, layer in PAIRS:
            name = f"exits.{depth}.kv.{layer}"
            true = _kv(model, states[layer - 1], layer)
            own = _kv(model, states[depth - 1], layer)
            made = _unit(states[depth - 1], SHAPE.norm_eps) @ maps[f"{name}.weight"].T
            made += maps[f"{name}.bias"]
            assert (made - true).square().sum() < (own - true).square().sum()


def test_the_command_stores_them_beside_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "toy"
    member = dataclasses.replace(FAMILY["quadriga-s"], shape=SHAPE)
    save_checkpoint(sure_model(), member, folder, facts={"steps": 1, "tokens": 1})
    assert main(["fit-kv", "--models", str(folder)]) == 0
    assert "exits.1.kv.4" in capsys.readouterr().out
    stored = load_file(folder / SKIPPED_KV_WEIGHTS)
    assert {tuple(int(p) for p in name.split(".")[1:4:2]) for name in stored} == PAIRS
    assert stored["exits.1.kv.2.weight"].shape == (2 * 16, 32)
    assert all(t.dtype == torch.float16 and t.isfinite().all() for t in stored.values())
    assert not list(folder.glob(".*"))
