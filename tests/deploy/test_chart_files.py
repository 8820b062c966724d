"""What is made from other files is current, and every value is documented and in the schema."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

import deploy.chart as maker
from quadriga.config.loader import QuadrigaConfig
from tests.deploy.charts import CHART, ROOT, needs_helm

VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
FACTS = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))


@needs_helm
def test_everything_made_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert maker.main(["--check"]) == 0, capsys.readouterr().out


@needs_helm
def test_what_is_old_or_surplus_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(maker, "MANIFESTS", tmp_path / "kuberay")
    monkeypatch.setattr(maker, "ROOT", tmp_path)
    monkeypatch.setattr(maker, "CHART", tmp_path / "chart")
    shutil.copytree(CHART, tmp_path / "chart")
    (tmp_path / "kuberay").mkdir()
    (tmp_path / "kuberay" / "gone.yaml").write_text("old")
    (tmp_path / "deploy" / "alerts").mkdir(parents=True)
    (tmp_path / "deploy" / "alerts" / "new.yaml").write_text("groups: []\n")
    assert maker.main(["--check"]) == 1
    said = capsys.readouterr().out
    for name in ("kuberay/gone.yaml", "kuberay/cpu.yaml", "chart/alerts/new.yaml"):
        assert f"{name} is not current" in said
    assert maker.main([]) == 0
    assert maker.main(["--check"]) == 0
    assert not (tmp_path / "kuberay" / "gone.yaml").exists()


def test_the_schema_is_draft_07_and_closed() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    Draft7Validator.check_schema(SCHEMA)
    assert SCHEMA["additionalProperties"] is False
    assert "global" in SCHEMA["properties"]
    for name, definition in SCHEMA["definitions"].items():
        if "properties" in definition:
            assert definition["additionalProperties"] is False, name


def test_every_value_is_in_the_schema_and_the_schema_in_the_values() -> None:
    assert {*VALUES, "enabled"} == set(SCHEMA["properties"])
    for path, node in _maps(VALUES):
        schema = _schema_at(path)
        if "properties" in schema and path not in {(), ("config",), ("workerGroups",)}:
            missing = set(schema["properties"]) ^ set(node)
            if path[:1] not in {("config",), ("workerGroups",)} and "resources" not in path:
                assert not missing, path
    assert not list(Draft7Validator(SCHEMA).iter_errors(VALUES))


def test_every_value_is_documented() -> None:
    documented = {path for path, _, meaning in maker.documented_values() if meaning}
    for path in _leaves(VALUES):
        parts = path.split(".")
        assert any(".".join(parts[:n]) in documented for n in range(1, len(parts) + 1)), path


def test_templates_read_values_that_exist_and_leave_none_out() -> None:
    read = {
        path
        for template in (CHART / "templates").rglob("*.*")
        for path in re.findall(r"\.Values\.([\w.]+)", template.read_text(encoding="utf-8"))
    }
    for path in read:
        node: Any = VALUES
        for key in path.split("."):
            if path.split(".")[0] == "config" and key not in node:
                break  # our own configuration's, which needs no default here
            assert key in node, f".Values.{path} is no value"
            node = node[key]
    assert {path.split(".")[0] for path in read} == set(VALUES) - {"global"}


def test_the_configuration_in_the_schema_is_ours() -> None:
    config = SCHEMA["definitions"]["config"]["properties"]
    assert set(config) == set(QuadrigaConfig.model_fields) - {"pools"}
    assert not set(maker.SECRET_FIELDS) & set(SCHEMA["definitions"]["AuthConfig"]["properties"])


def test_versions_agree_with_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{FACTS["appVersion"]}"' in project
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={VALUES['rayVersion']}" in constraints


def test_scripts_of_the_chart_are_no_templates() -> None:
    for path in (CHART / "files").glob("*.py"):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
        assert not re.search(r"\{\{", path.read_text(encoding="utf-8"))


def _maps(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict):
        yield path, node
        for key, child in node.items():
            yield from _maps(child, (*path, key))


def _schema_at(path: tuple[str, ...]) -> dict[str, Any]:
    node: dict[str, Any] = SCHEMA
    for key in path:
        node = _resolved(node)
        properties = node.get("properties", {})
        extra = node.get("additionalProperties")
        node = properties.get(key) or (extra if isinstance(extra, dict) else {})
    return _resolved(node)


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        node = SCHEMA["definitions"][node["$ref"].rsplit("/", 1)[1]]
    return node


def _leaves(node: Any, path: str = "") -> Iterator[str]:
    if isinstance(node, dict) and node:
        for key, child in node.items():
            yield from _leaves(child, f"{path}.{key}".lstrip("."))
    else:
        yield path
