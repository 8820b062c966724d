"""What a request may ask of early exits, and the errors where it may not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from quadriga.checkpoint.exits import EXITS_FILE, ExitParams
from quadriga.checkpoint.folder import ASSETS
from quadriga.checkpoint.tuned import TUNE_FILE, weights_hash
from quadriga.config.loader import load_config
from quadriga.errors import InvalidRequest
from serve_app.openai.models import ModelDirectory, ServedModel
from serve_app.openai.schema import CompletionBody
from serve_app.openai.validation import read_exit_fields


def served(**config: Any) -> ServedModel:
    options = {"decode.rebatching": "drex"} | config
    return ModelDirectory.load(load_config(options)).find("quadriga-s")


def read(model: ServedModel, **fields: Any) -> ExitParams:
    return read_exit_fields(CompletionBody(model="quadriga-s", prompt="a", **fields), model)


LOSSLESS = ExitParams(1.0, "lossless")


def test_by_default_answers_are_the_whole_models() -> None:
    model = served()
    assert read(model) == read(model, exit_threshold=1.0) == LOSSLESS
    assert read(model, sla_tbt_ms=20) == replace(LOSSLESS, sla_tbt_s=0.02)


def test_requests_may_use_the_exits_of_a_folder_apart_from_the_weights(tmp_path: Path) -> None:
    (tmp_path / TUNE_FILE).write_text(json.dumps({"weights": weights_hash(ASSETS / "quadriga-s")}))
    (tmp_path / EXITS_FILE).write_text(json.dumps({"layers": [5], "threshold": 0.8}))
    model = served(**{"exits.folder": str(tmp_path)})
    assert read(model, max_depth=5) == ExitParams(0.8, "bounded", 5)
    with pytest.raises(InvalidRequest, match=r"must be in 5\.\.8"):
        read(model, max_depth=4)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"exit_threshold": 0.7}, ExitParams(0.7, "bounded")),
        ({"exit_policy": "bounded"}, ExitParams(0.995, "bounded")),
        ({"exit_policy": "strict"}, ExitParams(0.995, "strict")),
        ({"exit_policy": "off"}, ExitParams(1.0, "off")),
        ({"max_depth": 4}, ExitParams(0.995, "bounded", 4)),
    ],
)
def test_a_request_that_allows_loss_may_leave_early(
    fields: dict[str, Any], wanted: ExitParams
) -> None:
    assert read(served(), **fields) == wanted


@pytest.mark.parametrize(
    "config",
    [
        {"exits.mode": "bounded"},
        {"exits.threshold": 0.995},
        {"decode.rebatching": "lazy"},
        {"helios.enabled": True},
        {"depth": 4},
    ],
)
def test_a_configuration_that_allows_loss_lets_tokens_leave_early(config: dict[str, Any]) -> None:
    assert read(served(**config)) == ExitParams(0.995, "bounded")


@pytest.mark.parametrize(
    "config",
    [
        {"exits.mode": "lossless", "exits.threshold": 0.5},
        {"exits.threshold": 1.0},
        {"helios.enabled": True, "helios.max_changed_share": 0.0},
    ],
)
def test_a_configuration_that_allows_none_does_not(config: dict[str, Any]) -> None:
    assert read(served(**config)) == LOSSLESS


def test_the_configuration_overrides_the_checkpoint() -> None:
    model = served(exits={"threshold": 0.5, "layers": [3]})
    assert read(model).threshold == 0.5
    assert model.exits.layers == (3,)


def test_all_fields() -> None:
    params = read(served(), exit_threshold=0.7, exit_policy="bounded", max_depth=4, sla_tbt_ms=30)
    assert params == ExitParams(0.7, "bounded", 4, 0.03)


def test_off_means_every_layer_that_is_served() -> None:
    whole, part = read(served(), exit_policy="off"), read(served(depth=4), exit_policy="off")
    assert whole.policy == "off" and whole.is_strict, "it goes to no replica with fewer layers"
    assert part == ExitParams(1.0, "bounded")


REFUSED: dict[str, list[Any]] = {
    "exit_threshold": [-0.1, 1.1, float("nan")],
    "exit_policy": ["sometimes"],
    "max_depth": [0, 2.5],
    "sla_tbt_ms": [0, float("inf"), 1e9],
    "quality_budget": [-0.1, 1.01, float("nan")],
}


@pytest.mark.parametrize(("field", "value"), [(k, v) for k in REFUSED for v in REFUSED[k]])
def test_bounds(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionBody(model="quadriga-s", prompt="a", **{field: value})
    assert caught.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize("max_depth", [1, 9])
def test_a_depth_without_an_exit_is_refused_with_those_there_are(max_depth: int) -> None:
    with pytest.raises(InvalidRequest, match=r"2\.\.8; .* after 2, 4 or 8 layers") as caught:
        read(served(), max_depth=max_depth)
    assert caught.value.param == "max_depth"


def test_strict_needs_the_whole_model() -> None:
    assert read(served(), exit_policy="strict").policy == "strict"
    cases: list[tuple[ServedModel, dict[str, Any]]] = [
        (served(), {"max_depth": 4}),
        (served(depth=4), {}),
        (served(depth=4), {"exit_threshold": 1.0}),
    ]
    for model, fields in cases:
        with pytest.raises(InvalidRequest, match="4 of 8 layers") as caught:
            read(model, exit_policy="strict", **fields)
        assert caught.value.param == "exit_policy"


@pytest.mark.parametrize(
    "fields",
    [
        {"exit_threshold": 0.9},
        {"exit_policy": "strict"},
        {"max_depth": 8},
        {"sla_tbt_ms": 20.0},
        {"quality_budget": 0.1},
    ],
)
def test_without_exits_every_field_is_refused(fields: dict[str, Any]) -> None:
    bare = replace(served(), exits=replace(served().exits, layers=()))
    for model in (served(**{"decode.rebatching": "off"}), bare):
        with pytest.raises(InvalidRequest, match="no early exits") as caught:
            read(model, **fields)
        assert caught.value.param == next(iter(fields))
        assert read(model).threshold == read(model, quality_budget=0.0).threshold == 1.0


def test_a_quality_budget_goes_with_bounded_exits() -> None:
    bounded = ExitParams(0.995, "bounded", quality_budget=0.1)
    assert read(served(), exit_policy="bounded", quality_budget=0.1) == bounded
    assert read(served(**{"exits.mode": "bounded"}), quality_budget=0.1) == bounded


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"exit_policy": "lossless"},
        {"exit_policy": "off"},
        {"exit_policy": "strict"},
        {"exit_policy": "bounded", "exit_threshold": 1.0},
    ],
)
def test_a_quality_budget_is_refused_where_nothing_could_be_spent_of_it(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(InvalidRequest, match=r"quality_budget: 0\.1 lets tokens leave") as caught:
        read(served(), quality_budget=0.1, **fields)
    assert caught.value.param == "quality_budget"
    assert read(served(), quality_budget=0.0, **fields) == read(served(), **fields)


def test_a_quality_budget_is_refused_where_answers_may_not_depend_on_the_load() -> None:
    model = served(deterministic=True, **{"exits.mode": "bounded"})
    with pytest.raises(InvalidRequest, match="this deployment is deterministic"):
        read(model, quality_budget=0.1)
    assert read(model, quality_budget=0.0) == ExitParams(0.995, "bounded")
