"""kubectl, helm and docker, which are not here: tables of what the documents use of them.

What Helm would render, its library does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from tests.docs.pages import ROOT, Shown
from tests.docs.yaml_pieces import render_values

KUBE_KINDS = {
    *("pods", "pod", "rayservice", "raycluster", "service", "secret", "deployment", "job"),
    *("networkpolicy", "events", "namespace"),
}
KUBE_FLAGS = {
    "": {"--namespace": 1},
    "apply": {"--filename": 1},
    "create": {"--from-file": 1, "--from-literal": 1, "--cert": 1, "--key": 1},
    "delete": {"--selector": 1},
    "describe": {"--selector": 1},
    "exec": {"--container": 1, "--stdin": 0, "--tty": 0},
    "get": {"--selector": 1, "--output": 1, "--watch": 0, "--sort-by": 1},
    "logs": {"--selector": 1, "--container": 1, "--follow": 0, "--tail": 1, "--previous": 0},
    "patch": {"--type": 1, "--patch": 1},
    "port-forward": {},
    "wait": {"--for": 1, "--timeout": 1},
}
HELM_FLAGS = {
    "": {"--namespace": 1},
    "install": {"--create-namespace": 0, "--values": 1, "--set": 1, "--version": 1, "--wait": 0},
    "upgrade": {
        **{"--reuse-values": 0, "--reset-then-reuse-values": 0},
        **{"--values": 1, "--set": 1, "--version": 1},
    },
    "test": {"--logs": 0},
    "repo": {},
    "rollback": {},
    "history": {},
    "uninstall": {},
    "get": {},
}
KEEP_VALUES = {"--reuse-values", "--reset-then-reuse-values"}
DOCKER_FLAGS = {"build": {"--file": 1, "--target": 1, "--tag": 1}, "push": {}}


def _flags(
    words: Sequence[str], table: dict[str, dict[str, int]], program: str
) -> tuple[str, list[str], list[tuple[str, str]]]:
    """(verb, arguments, options) by a table. Raises: AssertionError: It has no such flag."""
    allowed = dict(table.get("", {}))
    verb = ""
    arguments: list[str] = []
    options: list[tuple[str, str]] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            break
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            assert name in allowed, f"{program} {verb}: {name} is in no table"
            options.append((name, value if equals or not allowed[name] else next(rest)))
        elif verb:
            arguments.append(word)
        else:
            verb = word
            assert verb in table, f"{program} {verb} is in no table"
            allowed |= table[verb]
    return verb, arguments, options


def kubectl(words: Sequence[str], shown: Shown) -> None:
    verb, arguments, options = _flags(words, KUBE_FLAGS, "kubectl")
    for name, value in options:
        if name in ("--filename", "--from-file", "--cert", "--key"):
            path = value.rpartition("=")[2]
            assert path in shown.files or (ROOT / path).is_file(), f"no file {path}"
    if verb in ("get", "describe", "delete", "create", "patch", "wait"):
        kind = arguments[0].partition("/")[0].partition(",")[0]
        assert kind in KUBE_KINDS, f"kubectl {verb}: {kind}"


def helm(words: Sequence[str], shown: Shown) -> None:
    verb, arguments, options = _flags(words, HELM_FLAGS, "helm")
    if verb not in ("install", "upgrade") or arguments[1] != "helm/quadriga":
        return
    values = dict(shown.values) if KEEP_VALUES & {name for name, _ in options} else {}
    for name, value in options:
        if name == "--values":
            values = merged(values, yaml.safe_load(shown.text(value)))
        elif name == "--set":
            for part in value.split(","):
                values = merged(values, _nested(*part.split("=", 1)))
    render_values(values)
    shown.values = values


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges values: tables into each other, anything else anew."""
    both = {k: merged(base[k], v) for k, v in more.items() if _are_tables(base.get(k), v)}
    return base | more | both


def _are_tables(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def _nested(path: str, value: str) -> dict[str, Any]:
    tree: Any = yaml.safe_load(value)
    for key in reversed(path.split(".")):
        tree = {key: tree}
    return dict(tree)


def docker(words: Sequence[str], shown: Shown) -> None:
    verb, _, options = _flags(words, DOCKER_FLAGS, "docker")
    given = dict(options)
    if verb == "build":
        recipe = (ROOT / given["--file"]).read_text(encoding="utf-8")
        assert re.search(rf"^FROM .* AS {given['--target']}$", recipe, re.M | re.I), given
