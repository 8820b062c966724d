"""Where a figure comes from: code, machine, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_GIT_TIMEOUT_S = 10.0


def commit() -> str:
    """Return the commit of the code that runs, with `+changes` where files differ from it.

    An installed package has none, though it may lie in the checkout of something else.
    """
    folder = Path(__file__).parent
    try:
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        head = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+changes" if changes else "")


def machine() -> dict[str, Any]:
    """Return what a figure depends on: CPU, cores, memory, system, interpreter."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of packages; those not installed are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S
    )
    return run.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
