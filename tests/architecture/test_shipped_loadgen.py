"""The load generator as the wheel has it: what it leaves out, and how it says so."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from loadgen.__main__ import COMMANDS, FROM_CHECKOUT

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(sys.argv[1].split())):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from loadgen.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


def installed(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the load generator without the engine and without what stays in a checkout."""
    command = [sys.executable, "-c", WITHOUT, " ".join(("torch", "ray", *FROM_CHECKOUT)), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_wheel_leaves_out_what_the_commands_say() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = built["tool"]["hatch"]["build"]["targets"]["wheel"]
    excluded = {folder.replace("/", ".") for folder in wheel["exclude"]}
    assert {name for name in FROM_CHECKOUT if name.startswith("loadgen.")} <= excluded
    assert "tests" not in wheel["packages"]
    assert {command.is_shipped for command in COMMANDS.values()} == {True, False}


@pytest.mark.parametrize("words", [("chaos",), ("paper", "helios"), ("bench", "serve")])
def test_a_command_that_is_not_shipped_asks_for_a_checkout(words: tuple[str, ...]) -> None:
    refused = installed(*words)
    assert refused.returncode == 2
    assert "checkout" in refused.stderr


def test_profile_names_the_extra_that_it_needs() -> None:
    refused = installed("profile", "quadriga-s")
    assert refused.returncode == 2
    assert ".[loadgen,engine]" in refused.stderr
