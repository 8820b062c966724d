"""The load generator in the wheel needs neither the engine nor what stays in a checkout."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.__main__ import COMMANDS, FROM_CHECKOUT

ROOT = Path(__file__).parents[2]
LEFT_OUT = (*FROM_CHECKOUT, "tests", "deploy")
SHIPPED = [name for name, command in COMMANDS.items() if command.is_shipped]
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split() or name.startswith(tuple(sys.argv[2].split())):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from loadgen.__main__ import main
sys.exit(main(sys.argv[3:]))
"""


def extras() -> dict[str, set[str]]:
    """Names of the packages of each extra, with those of the extras that it takes over."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, set[str]] = {}
    for extra, packages in project["optional-dependencies"].items():
        names = {p.split(";")[0].split(">")[0].split("=")[0].strip() for p in packages}
        found[extra] = {n.lower() for n in names if not n.startswith("quadriga[")}
        for own in (n for n in names if n.startswith("quadriga[")):
            found[extra] |= set().union(*(found[e] for e in own[9:-1].split(",")))
    return found


def absent() -> str:
    """Modules that an installation of the `loadgen` extra alone lacks."""
    found = extras()
    lacking = (found["engine"] | found["serve"] | found["otel"]) - found["loadgen"]
    names = {n.split("[")[0].replace("-", "_") for n in lacking}
    return " ".join(sorted(names | {"prometheus_client", "starlette", "opentelemetry"}))


def without_extras(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the load generator where only its own extra is installed."""
    command = [sys.executable, "-c", WITHOUT, absent(), " ".join(LEFT_OUT), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_shipped_modules_import_nothing_that_the_wheel_leaves_out() -> None:
    left_out = [ROOT / name.replace(".", "/") for name in LEFT_OUT]
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for package in ("quadriga", "actors", "serve_app", "loadgen")
        for file in (ROOT / package).rglob("*.py")
        if not any(file.is_relative_to(folder) for folder in left_out)
        for name in imports(file)
        if any(name == out or name.startswith(f"{out}.") for out in LEFT_OUT)
    }
    assert not found


def test_the_wheel_leaves_out_what_the_commands_say() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = built["tool"]["hatch"]["build"]["targets"]["wheel"]
    excluded = {folder.replace("/", ".") for folder in wheel["exclude"]}
    assert {name for name in FROM_CHECKOUT if name.startswith("loadgen.")} == excluded
    assert not {name.split(".")[0] for name in LEFT_OUT} - {"loadgen"} & set(wheel["packages"])


@pytest.mark.parametrize("name", SHIPPED, ids=" ".join)
def test_a_shipped_command_needs_only_its_own_extra(name: tuple[str, ...]) -> None:
    assert "torch" in absent().split()
    shown = without_extras(*name, "--help")
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize("words", [("chaos",), ("paper", "helios"), ("bench", "serve")])
def test_a_command_that_is_not_shipped_asks_for_a_checkout(words: tuple[str, ...]) -> None:
    refused = without_extras(*words)
    assert refused.returncode == 2
    assert "checkout" in refused.stderr


def test_profile_names_the_extra_that_it_needs() -> None:
    refused = without_extras("profile", "quadriga-s")
    assert refused.returncode == 2
    assert "quadriga[engine]" in refused.stderr
