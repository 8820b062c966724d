"""Build the kernels for this machine's CPU, once, and keep the result between runs.

The sources are compiled by the system's C++ compiler with `-march=native` into one shared library
that serves every model, depth and batch size. Its name carries a hash of everything that decides
its content: sources, flags, compiler and CPU; so a stale library is never loaded, only left behind.

The cache is code that will be executed, so it must be ours: the directory is created with mode
0700 and refused when another user owns it or could write to it.

Run `python -m quadriga.engine.kernels.build` to build ahead of time, into an image, say.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from quadriga.errors import ConfigError
from quadriga.files import cache_folder, file_lock

SOURCES = Path(__file__).parent
BUILD_TIMEOUT_S = 300.0
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)


class BuildUnavailable(Exception):
    """The kernels cannot be built here; the engine stays eager. The message says why."""


def cached_library(cache_dir: Path) -> Path | None:
    """Return the library if an earlier run built it, without compiling anything.

    Raises:
        ConfigError: The cache directory is not safe to load code from.
        BuildUnavailable: There is no compiler, so nothing can have been built for it, or the
            directory cannot be used at all.
    """
    target = _directory(cache_dir) / f"{_key(find_compiler())}.so"
    return target if target.is_file() else None


def build_library(cache_dir: Path) -> Path:
    """Return the library, compiling it in a niced child process if need be.

    Several processes may call this at once: one compiles, the others wait for it.

    Raises:
        ConfigError: The cache directory is not safe to load code from.
        BuildUnavailable: There is no compiler or no room for its output, or it failed.
    """
    compiler = find_compiler()
    directory = _directory(cache_dir)
    target = directory / f"{_key(compiler)}.so"
    if target.is_file():
        return target
    try:
        with file_lock(directory / "lock", BUILD_TIMEOUT_S + 10.0):
            for abandoned in directory.glob(".*.so.*"):  # by a process that died while compiling
                abandoned.unlink(missing_ok=True)
            if not target.is_file():
                _compile(compiler, target)
    except OSError as exc:  # nobody released the lock in time, or the directory is read-only
        raise BuildUnavailable(str(exc)) from exc
    return target


def find_compiler() -> str:
    """Path of the C++ compiler: `$CXX`, g++ or clang++. Raises: BuildUnavailable without one."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise BuildUnavailable("no C++ compiler (g++ or clang++) is on the PATH")


def has_compiler() -> bool:
    """Whether `find_compiler` finds one."""
    try:
        find_compiler()
    except BuildUnavailable:
        return False
    return True


def _compile(compiler: str, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    command = [compiler, *FLAGS, "-o", str(temporary), str(SOURCES / "kernels.cpp")]
    if nice := shutil.which("nice"):
        command = [nice, "-n", "10", *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        if done.returncode != 0:
            raise BuildUnavailable(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
        temporary.rename(target)
    except subprocess.TimeoutExpired as exc:
        raise BuildUnavailable(f"{compiler} took more than {BUILD_TIMEOUT_S:.0f} s") from exc
    except OSError as exc:
        raise BuildUnavailable(f"{compiler} could not be run: {exc}") from exc
    finally:
        temporary.unlink(missing_ok=True)


def _directory(cache_dir: Path) -> Path:
    """Create `cache_dir/kernels`; refuse what another user could put code into.

    Raises:
        ConfigError: It is not safe.
        BuildUnavailable: It cannot be created: a read-only file system, say.
    """
    directory = cache_dir / "kernels"
    try:
        for path in (cache_dir, directory):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (cache_dir, directory):
            info = path.stat()
            if info.st_uid != os.getuid():
                raise ConfigError(
                    f"engine.cache_dir: {path} belongs to user {info.st_uid}, not to this one "
                    f"({os.getuid()}); compiled code is not loaded from there",
                    param="engine.cache_dir",
                )
            if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(
                    f"engine.cache_dir: others may write to {path} (mode "
                    f"{stat.S_IMODE(info.st_mode):04o}); run chmod go-w on it",
                    param="engine.cache_dir",
                )
    except OSError as exc:
        raise BuildUnavailable(f"{directory} cannot be used: {exc}") from exc
    return directory


def _key(compiler: str) -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    try:
        version = subprocess.run(
            [compiler, "-dumpfullversion", "-dumpversion"],
            capture_output=True,
            text=True,
            timeout=30.0,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as exc:
        raise BuildUnavailable(f"{compiler} does not run: {exc}") from exc
    digest.update(f"{Path(compiler).resolve()} {version} {_cpu()}".encode())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """The instruction sets of this CPU, so that a shared cache suits every machine using it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{platform.machine()} {found.group(1) if found else ''}"


def main() -> int:
    """Build into the directory given as the only argument, or into the default cache."""
    cache_dir = cache_folder(sys.argv[1] if len(sys.argv) > 1 else None)
    try:
        print(build_library(cache_dir))
    except (BuildUnavailable, ConfigError) as exc:
        print(f"kernels not built: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
