"""One product for all layers that a token skipped gives what a product for each of them gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.engine.cuda.decoder import PagedDecoder
from quadriga.engine.cuda.folded_maps import folded_maps
from quadriga.engine.cuda.paged_cache import PagedKVCache
from tests.equivalence.models import build, make_spec, save
from tests.equivalence.paged import cache_of, load_on_pages

EXITS = '{"kind": "shared", "layers": [1, 2], "criterion": "margin", "threshold": 0.2}'


def load(variant: str, folder: Path) -> tuple[PagedDecoder, PagedKVCache]:
    path = save(build(variant), folder)
    (path / "exits.json").write_text(EXITS)
    spec = make_spec(path, skipped_kv="project", num_rows=3)
    spec = make_spec(path, skipped_kv="project", num_rows=3, exits=spec.checkpoint.exits)
    runner = load_on_pages(spec)
    decoder = runner._decoder
    assert isinstance(decoder, PagedDecoder)
    return decoder, cache_of(runner)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_one_product_gives_what_one_for_each_layer_gives(
    variant: str, depth: int, tmp_path: Path
) -> None:
    decoder, cache = load(variant, tmp_path)
    assert set(decoder.folded) == {1, 2}
    generator = torch.Generator().manual_seed(depth)
    # As after training: of other layers, other norms.
    for layer in decoder.weights.layers:
        assert layer.attn_norm.weight is not None
        layer.attn_norm.weight.uniform_(0.5, 1.5, generator=generator)
    decoder.folded = folded_maps(decoder.weights, decoder.config)
    x = torch.randn(5, decoder.config.hidden_size, generator=generator)
    batch = decoder.plan_tokens(np.array([0, 0, 1, 2, 2]), np.array([0, 17, 5, 30, 31]))
    found = []
    for folded in (decoder.folded, {}):
        decoder.folded = folded
        cache.keys.zero_()
        cache.values.zero_()
        with torch.inference_mode():
            decoder.project_kv(x, batch, depth, decoder.num_layers, depth)
        found.append(torch.stack([cache.keys, cache.values]).clone())
    assert found[0].any()
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_exits_with_the_same_maps_share_the_matrix(tmp_path: Path) -> None:
    decoder, _ = load("llama", tmp_path)
    first, second = (decoder.folded[depth].weight.rows for depth in (1, 2))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


@pytest.mark.parametrize("variant", ["qwen3", "opt-pre-norm"])
def test_families_whose_norms_do_not_fold_have_no_such_matrix(variant: str, tmp_path: Path) -> None:
    assert not load(variant, tmp_path)[0].folded
