"""The `client` extra is all the SDK needs: no torch, no Ray, nothing of the server."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parents[3]

# Refuses every import that neither the SDK's requirements nor Python bring.
CODE = """
import sys
ALLOWED = {"quadriga", "grpc", "google", "typing_extensions", "__mp_main__"} | set(
    sys.stdlib_module_names
)
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ImportError(f"the SDK imports {name}")
sys.meta_path.insert(0, Guard())
from quadriga.client import AsyncClient, Client, Message
with Client("127.0.0.1:1", api_key="k") as client:
    pass
parts = sorted({m for m in sys.modules if m.startswith("quadriga.")} - {"quadriga.errors"})
print(" ".join(parts))
"""


def test_the_sdk_imports_its_own_requirements_only() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for heavy in ("quadriga.engine", "quadriga.scheduling", "quadriga.config"):
        assert heavy not in done.stdout


def test_the_extra_names_them_and_the_base_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {line.split(">")[0] for line in project["optional-dependencies"]["client"]}
    assert names == {"grpcio", "protobuf", "googleapis-common-protos"}
    assert project["dependencies"] == []


def test_it_is_typed() -> None:
    assert (files("quadriga") / "py.typed").is_file()
