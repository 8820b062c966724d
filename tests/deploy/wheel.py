"""The wheel, staged as a folder, and the distributions that each of its extras installs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pathspec import PathSpec

from tests.architecture.tree import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
_WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
NAME: str = PROJECT["project"]["name"]


def shipped_files() -> list[Path]:
    """The Python files of the wheel, relative to the repository, by hatch's own table."""
    left_out = PathSpec.from_lines("gitignore", _WHEEL["exclude"])
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *_WHEEL["packages"]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [
        Path(file)
        for file in listed
        if file.endswith(".py") and not left_out.match_file(file) and (ROOT / file).exists()
    ]


def stage(folder: Path) -> list[str]:
    """Copy the wheel's modules to a folder; return their dotted names."""
    names = []
    for file in shipped_files():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, folder / file)
        parts = file.with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(names)


def required_by(extra: str) -> set[str]:
    """Canonical names of all distributions that installing an extra brings."""
    optional: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    found: set[tuple[str, str]] = set()
    waiting = [(NAME, extra)]
    while waiting:
        name, of_extra = waiting.pop()
        if (name, of_extra) in found:
            continue
        found.add((name, of_extra))
        waiting += _next(name, of_extra, optional)
    return {name for name, _ in found} - {NAME}


def _next(name: str, extra: str, optional: dict[str, list[str]]) -> Iterable[tuple[str, str]]:
    """What a distribution with one of its extras requires here, as (name, extra)."""
    if name == NAME:
        lines: list[str] = optional[extra]
    else:
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            return  # required on other platforms only, or not part of this environment
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            of = canonicalize_name(requirement.name)
            yield from ((of, other) for other in ("", *requirement.extras) if of != NAME or other)


def link_distributions(folder: Path, extra: str) -> None:
    """Fill a folder with links to what an extra installs, as its site-packages would be."""
    allowed = required_by(extra)
    files: dict[tuple[str, ...], bool] = {}
    for distribution in metadata.distributions():
        is_allowed = canonicalize_name(distribution.name) in allowed
        for file in distribution.files or ():
            if file.parts[0] != ".." and "__pycache__" not in file.parts:
                files[file.parts] = files.get(file.parts, False) or is_allowed
    _link(folder, Path(sysconfig.get_path("purelib")), files)


def _link(folder: Path, source: Path, files: dict[tuple[str, ...], bool]) -> None:
    """Link each entry of which all is allowed; look into folders that several share."""
    below: dict[str, dict[tuple[str, ...], bool]] = {}
    for parts, is_allowed in files.items():
        below.setdefault(parts[0], {})[parts[1:]] = is_allowed
    for name, rest in below.items():
        if all(rest.values()):
            (folder / name).symlink_to(source / name)
        elif any(rest.values()):
            (folder / name).mkdir()
            _link(folder / name, source / name, rest)


_IMPORT_ALL = """
import importlib, sys
folder, site, *names = sys.argv[1:]
sys.path[:0] = [folder]
sys.path += [site]
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as exc:
        print(f"{name}: {exc}")
    else:
        origin = sys.modules[name].__spec__.origin
        if not (origin or folder).startswith(folder):
            print(f"{name}: read from {origin}")
"""


def failed_imports(folder: Path, names: list[str], site: Path) -> list[str]:
    """Import modules of a staged wheel in a fresh interpreter.

    Args:
        folder: What `stage` filled.
        site: What `link_distributions` filled; nothing else is installed.

    Returns:
        A line for each module that cannot be imported, with the reason.
    """
    run = subprocess.run(
        [sys.executable, "-S", "-c", _IMPORT_ALL, str(folder), str(site), *names],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        env={"HOME": str(folder)},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()
