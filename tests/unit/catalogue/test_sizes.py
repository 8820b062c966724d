"""Parameters counted from configurations equal what is published, and what files really hold."""

from __future__ import annotations

import json

import pytest

from loadgen.model_costs.published import PUBLISHED
from quadriga.catalogue.headers import read_checkpoint_headers
from quadriga.catalogue.sizes import sizes_of
from quadriga.checkpoint.exits import ExitSpec
from quadriga.checkpoint.folder import ASSETS, bundled_models
from quadriga.errors import ConfigError

TOTALS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "codellama-34b": 33_743_970_304,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
}
"""As the repositories state them."""


@pytest.mark.parametrize("model", sorted(PUBLISHED))
def test_counted_parameters_are_the_published_ones(model: str) -> None:
    assert sizes_of(PUBLISHED[model].config).total_params == TOTALS[model]


@pytest.mark.parametrize("model", bundled_models())
def test_counted_parameters_are_those_of_the_file(model: str) -> None:
    sizes = sizes_of(json.loads((ASSETS / model / "config.json").read_text()))
    held = sum(p.num_values for p in read_checkpoint_headers(ASSETS / model).values())
    assert sizes.total_params == held


def test_depth_adds_layer_by_layer_and_exits_count_where_they_are_loaded() -> None:
    config = PUBLISHED["llama-2-7b"].config
    plain = sizes_of(config)
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    assert plain.params(9) - plain.params(8) == layer
    own = sizes_of(config, ExitSpec((8, 16), kind="head"))
    head = 4096 + 32000 * 4096
    assert [own.params(d) - plain.params(d) for d in (7, 8, 16)] == [0, head, 2 * head]
    assert sizes_of(config, ExitSpec((8,), kind="shared")) == plain


def test_grouped_queries_shrink_the_cache() -> None:
    wide, narrow = (sizes_of(PUBLISHED[m].config) for m in ("llama-2-7b", "llama-3-8b"))
    assert wide.kv_bytes_per_token(32, 2) == 32 * 2 * 4096 * 2
    assert narrow.kv_bytes_per_token(32, 2) == 32 * 2 * 1024 * 2


@pytest.mark.parametrize("depth", [0, 33])
def test_a_depth_outside_the_model_is_refused(depth: int) -> None:
    with pytest.raises(ConfigError, match=r"1\.\.32"):
        sizes_of(PUBLISHED["llama-2-7b"].config).params(depth)


def test_unknown_families_and_missing_fields_are_named() -> None:
    with pytest.raises(ConfigError, match="FalconForCausalLM"):
        sizes_of({"architectures": ["FalconForCausalLM"]})
    config = dict(PUBLISHED["llama-2-7b"].config)
    del config["intermediate_size"]
    with pytest.raises(ConfigError, match="intermediate_size"):
        sizes_of(config)
    for field, value in (("num_attention_heads", 0), ("head_dim", -1), ("architectures", 5)):
        with pytest.raises(ConfigError, match="lacks or garbles the field"):
            sizes_of(PUBLISHED["llama-2-7b"].config | {field: value})
