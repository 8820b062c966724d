"""YAML in the documents: what a piece is for shows in its keys, and that judges it."""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import yaml

from quadriga.catalogue.files import read_catalogue
from quadriga.config.loader import load_config
from tests.deploy import charts

HELM_KEYS = frozenset(yaml.safe_load((charts.CHART / "values.yaml").read_text(encoding="utf-8")))
# Keys that the service's own configuration has too.
AMBIGUOUS = frozenset({"admin", "ingress"})


def check_yaml(text: str) -> None:
    """Raises: AssertionError, ValueError, QuadrigaError, HelmError: It cannot be used as it is."""
    tree = yaml.safe_load(text)
    keys = set(tree)
    if "applications" in keys:
        serve_file(tree)
    elif "scrape_configs" in keys:
        scrape(tree)
    elif tree.get("kind") == "InferencePool":
        inference_pool(tree)
    elif "version" in keys:
        catalogue(tree)
    elif keys <= HELM_KEYS and keys - AMBIGUOUS:
        render_values(tree)
    else:
        load_config(tree)


def inference_pool(tree: dict[str, Any]) -> None:
    """A pool that selects pods by labels which the chart, or KubeRay, gives them."""
    spec = tree["spec"]
    assert set(spec) == {"selector", "targetPorts", "endpointPickerRef"}, spec
    labels = (charts.CHART / "templates" / "_names.tpl").read_text(encoding="utf-8")
    for name in spec["selector"]["matchLabels"]:
        assert name in ("ray.io/node-type", "ray.io/serve") or f"{name}:" in labels, name


def scrape(tree: dict[str, Any]) -> None:
    """A part of Prometheus' configuration."""
    for job in tree["scrape_configs"]:
        known = {"job_name", "authorization", "static_configs", "scheme", "tls_config"}
        assert set(job) <= known, job
        assert set(job.get("authorization", {})) <= {"credentials_file", "credentials"}
        for target in job["static_configs"]:
            assert all(re.fullmatch(r"[\w.-]+:\d+", t) for t in target["targets"]), target


def catalogue(tree: dict[str, Any]) -> None:
    """A catalogue of models, whose names stand for any: bundled ones take their places."""
    for entry, name in zip(tree["models"], ("quadriga-l", "quadriga-s"), strict=True):
        entry["model"] = name
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "catalogue.yaml"
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        assert read_catalogue(str(file)).ids


def serve_file(tree: Any) -> None:
    """Raises: ValidationError, ConfigError: Ray or we refuse a Serve file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, when it is imported first
        from ray.serve.schema import DeploymentSchema, ServeDeploySchema
    ServeDeploySchema.model_validate(tree)
    for application in tree["applications"]:
        for deployment in application.get(
            "deployments", ()
        ):  # Ray passes over what it does not know
            assert set(deployment) <= set(DeploymentSchema.model_fields), deployment
        load_config(application.get("args", {}))


def render_values(values: dict[str, Any]) -> None:
    """Raises: ValidationError: The chart's schema refuses them. HelmError: The chart does."""
    defaults = yaml.safe_load((charts.CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((charts.CHART / "values.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(defaults | values, schema, jsonschema.Draft7Validator)
    if importlib.util.find_spec("helm_python") is not None:  # no wheel for every platform
        assert charts.render(values)
