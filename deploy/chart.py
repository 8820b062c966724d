"""Make what follows from other files: run it after a change of the chart or of quadriga/config/.

`python deploy/chart.py` writes, `python deploy/chart.py --check` only compares:

- the configuration's part of helm/quadriga/values.schema.json, from quadriga/config/;
- the table of values in helm/quadriga/README.md, from the comments of values.yaml;
- the chart's copies of deploy/dashboards/*.json and deploy/alerts/*.yaml;
- deploy/kuberay/*.yaml, from the chart and helm/quadriga/examples/*.yaml.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from quadriga.config.engine import PoolConfig
from quadriga.config.ingress import AuthConfig
from quadriga.config.loader import QuadrigaConfig

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "quadriga"
MANIFESTS = ROOT / "deploy" / "kuberay"
COPIES = {"dashboards": "*.json", "alerts": "*.yaml"}
NAME = "quadriga"
TABLE = re.compile(r"(?<=<!-- values -->\n).*?(?=<!-- end of values -->)", re.DOTALL)
KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][\w-]*):(?P<rest>.*)$")
HELM_ONLY = ("helm.sh/chart", "app.kubernetes.io/managed-by")
SECRET_FIELDS = ("api_keys", "api_keys_file")
BAR = "\\|"
MEANINGS = {
    "rebatching": "DREX, where tokens may leave early: those that stay are regrouped",
    "reservation": "BATON: prompts join the running batch; where memory fills, some pause",
    "placement": "ARES: a new sequence goes where it hurts the forecast least",
    "ares": "ARES: running sequences move before a replica overloads",
    "max_wait_s": "who would wait longer for a place to decode is told when to come back",
}
"""Of settings in a manifest's `serveConfigV2`, where rendering leaves no comment."""
SETTING = re.compile(rf"^ +(?P<key>{'|'.join(MEANINGS)}):( [\w.]+)?$", re.MULTILINE)
DRAFT_07 = "#/definitions/{model}"


# The schema


def schema_text() -> str:
    """values.schema.json with the definitions of our own configuration made again."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    kept = {k: v for k, v in schema["definitions"].items() if not k.endswith("Config")}
    schema["definitions"] = kept | config_definitions()
    return json.dumps(schema, indent=2) + "\n"


def config_definitions() -> dict[str, Any]:
    """`config` and `model`, and what they refer to, as draft-07 definitions.

    `pools` come from `models`, where models come from `download`, and API keys from a Secret.
    """
    config = QuadrigaConfig.model_json_schema(ref_template=DRAFT_07)
    model = PoolConfig.model_json_schema(ref_template=DRAFT_07)
    definitions: dict[str, Any] = config.pop("$defs") | model.pop("$defs")
    definitions.pop(PoolConfig.__name__)
    del config["properties"]["pools"]
    for field in SECRET_FIELDS:
        del definitions[AuthConfig.__name__]["properties"][field]
    del model["properties"]["fetched_from"]
    model["properties"]["download"] = {
        "type": "object",
        "additionalProperties": False,
        "required": ["repo"],
        "properties": {
            "repo": {"type": "string", "pattern": "^[A-Za-z0-9][\\w.-]*/[A-Za-z0-9][\\w.-]*$"},
            "revision": {"type": "string", "minLength": 1},
        },
    }
    whole = {"config": config, "model": model, **definitions}
    return {name: _without(whole[name], ("default", "title")) for name in sorted(whole)}


def _without(node: Any, annotations: tuple[str, ...]) -> Any:
    """A schema without annotations that validate nothing; properties of that name stay."""
    if isinstance(node, list):
        return [_without(item, annotations) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {k: v for k, v in node.items() if k not in annotations}
    return {
        k: {name: _without(v, annotations) for name, v in value.items()}
        if k == "properties"
        else _without(value, annotations)
        for k, value in kept.items()
    }


# The table of values


def documented_values() -> Iterator[tuple[str, Any, str]]:
    """(path, default, meaning) of every value with a comment, in the file's order."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    meaning: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith("# --"):
            meaning = [line.strip().removeprefix("# --").strip()]
        elif match := KEY.match(line):
            indent = len(match["indent"])
            path = [(i, key) for i, key in path if i < indent] + [(indent, match["key"])]
            if meaning:
                keys = [key for _, key in path]
                yield ".".join(keys), _at(values, keys), meaning[0]
            meaning = []
        else:
            meaning = []


def _at(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values[key]
    return values


def readme_text() -> str:
    """README.md with the table of values made again."""
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for path, default, meaning in documented_values():
        cells = (f"`{path}`", f"`{json.dumps(default)}`", meaning)
        rows.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    text = (CHART / "README.md").read_text(encoding="utf-8")
    return TABLE.sub(lambda _: "\n".join(rows) + "\n", text)


# The raw manifests


def manifest_text(example: Path) -> str:
    """One example's objects without Helm's hooks and labels, for `kubectl apply`."""
    import helm_python

    values = yaml.safe_load(example.read_text(encoding="utf-8"))
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values, name=NAME, namespace=NAME)
    objects = [
        document
        for name, text in sorted(files.items())
        if not name.endswith("NOTES.txt")
        for document in yaml.safe_load_all(text)
        if document and "helm.sh/hook" not in document["metadata"].get("annotations", {})
    ]
    for document in objects:
        for label in HELM_ONLY:
            document["metadata"]["labels"].pop(label, None)
    objects.sort(key=lambda document: document["kind"] == "RayService")  # what it needs comes first
    head = (
        f"# Made from helm/quadriga and its examples/{example.name} by deploy/chart.py; for use\n"
        f"# without Helm: kubectl create namespace {NAME}; kubectl apply -f {example.name}\n"
    )
    text = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100)
    return head + SETTING.sub(lambda found: f"{found[0]} # {MEANINGS[found['key']]}", text)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stay readable."""


def _readable(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _readable)


# All of it


def rendered_from() -> dict[Path, str]:
    """Those of the files made here that rendering the chart reads."""
    files = {CHART / "values.schema.json": schema_text()}
    for folder, pattern in COPIES.items():
        for source in sorted((ROOT / "deploy" / folder).glob(pattern)):
            files[CHART / folder / source.name] = source.read_text(encoding="utf-8")
    return files


def made() -> dict[Path, str]:
    """Every file made here, with what it should hold."""
    files = rendered_from() | {CHART / "README.md": readme_text()}
    for example in sorted((CHART / "examples").glob("*.yaml")):
        files[MANIFESTS / example.name] = manifest_text(example)
    return files


def stray(files: dict[Path, str]) -> list[Path]:
    """Files in the folders made here that nothing makes any more."""
    folders = [MANIFESTS, *(CHART / folder for folder in COPIES)]
    return [p for folder in folders for p in sorted(folder.glob("*")) if p not in files]


def _make(files: dict[Path, str], surplus: list[Path]) -> None:
    for path, text in files.items():
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    for path in surplus:
        path.unlink()
        print(f"removed {path.relative_to(ROOT)}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if something is old")
    options = parser.parse_args(argv)
    if not options.check:
        first = rendered_from()
        _make(first, [p for p in stray(first) if p.parent != MANIFESTS])
    files = made()
    old = [p for p, text in files.items() if not p.is_file() or p.read_text("utf-8") != text]
    surplus = stray(files)
    if options.check:
        for path in [*old, *surplus]:
            print(f"{path.relative_to(ROOT)} is not current; run `make chart`")
        return 1 if old or surplus else 0
    _make({path: files[path] for path in old}, surplus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
