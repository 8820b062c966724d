"""The documents tell the truth: commands exist, links lead somewhere, snippets compile."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from quadriga.checkpoint.folder import bundled_models
from tests.docs.pages import DOCUMENTS, ROOT, fences

TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.M))


def texts(page: Path, language: str) -> list[str]:
    return [fence.text for fence in fences(page) if fence.language == language]


@pytest.fixture(params=DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def document(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_make_verb_exists(document: Path) -> None:
    text = document.read_text()
    code = "\n".join([*texts(document, "sh"), *re.findall(r"`(make [^`]+)`", text)])
    named = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", code))
    assert named <= TARGETS, f"{document.name} names verbs the Makefile lacks"


def test_every_module_exists(document: Path) -> None:
    for module in re.findall(r"python -m ([a-z_.]+[a-z_])", document.read_text()):
        assert importlib.util.find_spec(module), f"{document.name}: no module {module}"


def test_every_relative_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name}: {target} is missing"


def test_every_test_that_is_named_exists(document: Path) -> None:
    for name in re.findall(r"\btests/[a-z_/]+\.py", document.read_text()):
        assert (ROOT / name).exists(), f"{document.name}: {name} is missing"


def test_every_python_snippet_compiles(document: Path) -> None:
    for snippet in texts(document, "python"):
        ast.parse(snippet)


def test_the_readme_names_the_bundled_models() -> None:
    text = (ROOT / "README.md").read_text()
    for model in bundled_models():
        assert model in text


def test_every_verb_has_a_description() -> None:
    for line in (ROOT / "Makefile").read_text().splitlines():
        if re.match(r"^[a-z][a-z0-9-]*:", line):
            assert "##" in line, f"`make help` would not show: {line}"
