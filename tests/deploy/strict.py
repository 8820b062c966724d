"""A custom resource's definition as a JSON Schema that knows no field it does not name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
DROPPED = ("description", "default", "format")


def strict_schema(path: Path) -> dict[str, Any]:
    """The schema of the version that the cluster stores."""
    crd = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    [version] = [v for v in crd["spec"]["versions"] if v["storage"]]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    for field, kind in (("apiVersion", "string"), ("kind", "string"), ("metadata", "object")):
        schema["properties"][field] = {"type": kind}
    return schema


def _strict(node: dict[str, Any]) -> dict[str, Any]:
    if node.get("x-kubernetes-int-or-string"):
        return INT_OR_STRING
    kept = {k: v for k, v in node.items() if k not in DROPPED and not k.startswith("x-")}
    properties = node.get("properties")
    if properties is not None:
        kept["properties"] = {name: _strict(child) for name, child in properties.items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
        # What has a default is filled in before the schema is looked at.
        kept["required"] = [k for k in node.get("required", []) if "default" not in properties[k]]
    elif isinstance(node.get("additionalProperties"), dict):
        kept["additionalProperties"] = _strict(node["additionalProperties"])
    if "items" in node:
        kept["items"] = _strict(node["items"])
    return kept
