"""What the wheel ships imports what it ships, and what the extra that it belongs to installs."""

from __future__ import annotations

import ast
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.tree import ROOT
from tests.deploy.wheel import (
    PROJECT,
    failed_imports,
    link_distributions,
    required_by,
    shipped_files,
    stage,
)

PACKAGES = ("quadriga", "actors", "serve_app", "loadgen")
_SDK = ("quadriga.client", "quadriga.protos")
_SERVICE_METRICS = (
    "quadriga.control.control_metrics",
    "quadriga.replica.replica_metrics",
    *(
        f"quadriga.observability.{name}"
        for name in ("cluster_metrics", "exits_view", "load_history", "metric_table", "metrics")
    ),
)
_KERNELS = ("attention", "operations", "products")
_GPU_ONLY = tuple(f"quadriga.engine.cuda.triton_{name}" for name in _KERNELS)
OF_EXTRA: dict[str, tuple[str, ...]] = {
    "client": _SDK,
    "loadgen": ("loadgen",),
    "engine": ("quadriga",),
    "serve": ("quadriga", "actors", "serve_app"),
}
"""The packages that each extra is for."""
NOT_OF_EXTRA = {
    "client": (),
    "loadgen": (),
    "engine": _SDK + _SERVICE_METRICS + _GPU_ONLY,
    "serve": _GPU_ONLY,
}
GUARDED = {
    # Behind a check that names the extra, or `find_spec`; without them the feature is off.
    "quadriga.observability.tracing": {"opentelemetry"},
    "quadriga.catalogue.energy": {"pynvml"},
    **{name: {"triton"} for name in _GPU_ONLY},
    "quadriga.kv_transport.nccl_library": {"cupy"},
    "quadriga.tune.report": {"matplotlib"},
    "loadgen.event_loop": {"uvloop"},
    "loadgen.model_costs.depth": {"torch"},
}
"""Modules that use what no extra of theirs installs, and what."""


def modules_of(extra: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if _is_in(name, OF_EXTRA[extra]) and not _is_in(name, NOT_OF_EXTRA[extra])
    ]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("extra", OF_EXTRA)
def test_every_module_of_an_extra_imports_with_what_the_extra_installs(
    extra: str, tmp_path: Path
) -> None:
    wheel, site = tmp_path / "wheel", tmp_path / "site"
    wheel.mkdir()
    site.mkdir()
    names = modules_of(extra, stage(wheel))
    assert names
    link_distributions(site, extra)

    assert failed_imports(wheel, names, site) == []


def test_what_must_be_compiled_is_in_an_extra_of_its_own_below_the_version_that_waits() -> None:
    """A build that imports torch fails where torch is installed by the same command."""
    extras = {
        name: {canonicalize_name(r.name): r for r in map(Requirement, lines)}
        for name, lines in PROJECT["project"]["optional-dependencies"].items()
    }
    assert [name for name, required in extras.items() if "flash-attn" in required] == ["flash"]
    versions = extras["flash"]["flash-attn"].specifier
    assert "2.8.3" in versions and "2.8.3.post2" in versions and "2.8.4" not in versions


def test_the_sdk_asks_for_the_protobuf_that_its_generated_code_needs() -> None:
    """It refuses any that is older."""
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [line for line in extras["client"] if line.startswith("protobuf")]
    code = (ROOT / "quadriga/protos/quadriga/v1/quadriga_pb2.py").read_text(encoding="utf-8")
    _, _, made_with = code.partition("# Protobuf Python Version: ")
    assert asked == [f"protobuf>={made_with.split()[0]}"]


def test_the_base_package_requires_nothing_and_is_typed() -> None:
    assert PROJECT["project"]["dependencies"] == []
    assert (ROOT / "quadriga/py.typed").is_file()


def test_imports_inside_functions_are_of_shipped_modules_and_installed_distributions() -> None:
    owners = metadata.packages_distributions()
    files = {_name(file): file for file in shipped_files()}
    required = {extra: required_by(extra) for extra in OF_EXTRA}
    wrong = []
    for name, file in files.items():
        extra = next(e for e in OF_EXTRA if e != "engine" and _is_in(name, OF_EXTRA[e]))
        if name.startswith("quadriga.") and not _is_in(name, _SDK + _SERVICE_METRICS):
            extra = "engine"
        for module in _imported(file):
            top = module.partition(".")[0]
            if top in sys.stdlib_module_names or top in GUARDED.get(name, ()):
                continue
            if top in PACKAGES:
                is_there = module in files
            else:
                is_there = bool(
                    {canonicalize_name(o) for o in owners.get(top, ())} & required[extra]
                )
            if not is_there:
                wrong.append(f"{file} ({extra}) imports {module}")
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_built_wheel_holds_the_staged_files_and_its_client_runs_in_a_fresh_environment(
    tmp_path: Path,
) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=ROOT, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        built = {name for name in archive.namelist() if name.endswith(".py")}
    assert built == {str(file) for file in shipped_files()}

    for extra, code in {
        "client": "from quadriga.client import AsyncClient, Client",
        "loadgen": "import loadgen.run, loadgen.comparison.command, loadgen.ramp, loadgen.plan",
    }.items():
        home = tmp_path / extra
        venv.create(home, with_pip=True)
        pip = [str(home / "bin/pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, f"quadriga[{extra}] @ {wheel.as_uri()}"], check=True, timeout=600)
        subprocess.run([str(home / "bin/python"), "-c", code], cwd=tmp_path, check=True)


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(file: Path) -> Iterator[str]:
    """Every module that a file imports, whenever the import runs."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
