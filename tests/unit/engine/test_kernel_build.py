"""The build cache: compiled once, loaded only from a safe place, and never in a user's way."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quadriga.engine import compiled, load_runner
from quadriga.engine.kernels import build
from quadriga.engine.kernels.build import BuildUnavailable, build_library, cached_library
from quadriga.errors import ConfigError
from quadriga.files import cache_folder
from tests.equivalence.models import build as build_model
from tests.equivalence.models import make_spec, make_state, save, start_row

DEADLINE_S = 60.0


def wait_built() -> None:
    for thread in threading.enumerate():
        if thread.name == "kernel-build":
            thread.join(DEADLINE_S)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build_model("llama"), tmp_path / "model")


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes no time: it notes each compilation and writes a library of nothing."""
    log = tmp_path / "compilations"
    script = tmp_path / "fake-cxx"
    script.write_text(
        "#!/bin/sh\n"
        'case "$1" in -dump*) echo 1.0; exit 0;; esac\n'
        f'echo built >> "{log}"\n'
        'while [ "$1" != "-o" ]; do shift; done\n'
        'sleep 0.3; echo library > "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    log.touch()
    return log


def test_a_second_build_reuses_the_first(tmp_path: Path, fake_compiler: Path) -> None:
    cache = tmp_path / "cache"
    assert cached_library(cache) is None
    first = build_library(cache)
    assert build_library(cache) == cached_library(cache) == first
    assert fake_compiler.read_text().split() == ["built"]


def test_concurrent_builds_compile_once(tmp_path: Path, fake_compiler: Path) -> None:
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(build_library(tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(results) == 4
    assert len(set(results)) == 1
    assert fake_compiler.read_text().split() == ["built"]


def test_changed_sources_are_compiled_anew(
    tmp_path: Path, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_library(tmp_path / "cache")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DCHANGED"))
    assert cached_library(tmp_path / "cache") is None
    assert build_library(tmp_path / "cache") != first


def test_the_cache_directory_is_private(tmp_path: Path, fake_compiler: Path) -> None:
    build_library(tmp_path / "cache")
    for path in (tmp_path / "cache", tmp_path / "cache" / "kernels"):
        assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_others_may_write_is_refused(
    tmp_path: Path, fake_compiler: Path, mode: int
) -> None:
    cache = tmp_path / "cache"
    build_library(cache)
    cache.chmod(mode)
    with pytest.raises(ConfigError, match="others may write"):
        cached_library(cache)
    with pytest.raises(ConfigError, match="others may write"):
        build_library(cache)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path, fake_compiler: Path) -> None:
    cache = tmp_path / "cache"
    build_library(cache)
    os.chown(cache / "kernels", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        cached_library(cache)


def test_a_directory_that_cannot_be_made_leaves_the_engine_eager(
    checkpoint: Path, fake_compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint / "file").touch()
    with caplog.at_level(logging.WARNING):
        load_runner(make_spec(checkpoint, compile="wait", cache_dir=checkpoint / "file" / "cache"))
    assert any("cannot be used" in r.message for r in caplog.records)


def test_a_directory_that_is_read_only_leaves_the_engine_eager(
    tmp_path: Path, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(build, "file_lock", locked)
    with pytest.raises(BuildUnavailable, match="Read-only"):
        build_library(tmp_path / "cache")


def test_a_failing_compiler_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "broken-cxx"
    script.write_text('#!/bin/sh\ncase "$1" in -dump*) exit 0;; esac\necho oops >&2; exit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildUnavailable, match="oops"):
        build_library(tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache" / "kernels").iterdir()] == ["lock"]


@pytest.mark.parametrize("mode", ["auto", "wait"])
def test_without_a_compiler_the_engine_stays_eager(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        runner = load_runner(make_spec(checkpoint, compile=mode, cache_dir=checkpoint / "cache"))
    assert [r.message for r in caplog.records if "stays eager" in r.message] == [
        "the engine stays eager: no C++ compiler (g++ or clang++) is on the PATH"
    ]
    start_row(runner, 0, make_state([5, 6, 7]))


def test_a_library_that_cannot_be_loaded_leaves_the_engine_eager(
    checkpoint: Path, fake_compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner = load_runner(make_spec(checkpoint, compile="wait", cache_dir=checkpoint / "cache"))
    assert any("cannot be loaded" in r.message for r in caplog.records)
    start_row(runner, 0, make_state([5, 6, 7]))


def test_a_second_load_without_memory_leaves_the_engine_eager(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "cached_library", lambda cache_dir: None)
    monkeypatch.setattr(compiled, "load_spec", lambda *_, **__: bytes(1 << 62))
    load_runner(make_spec(checkpoint, compile="auto"))
    wait_built()
    assert "the engine stays eager: MemoryError()" in caplog.text


TOO_MANY = """
import resource, sys
from pathlib import Path
from quadriga.engine.kernels.library import KernelLibrary
library = KernelLibrary(Path(sys.argv[1]))
own_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (own_bytes + (200 << 20),) * 2)
print(library.pool_new(2000))
"""
AT_EXIT = """
from quadriga.engine.compiled import _Workers
class Library:
    def pool_new(self, threads):
        return threads
    def pool_free(self, pool):
        print("freed", pool)
let_go = _Workers(Library(), 1)
del let_go
kept = _Workers(Library(), 2)
"""


def said(code: str, *arguments: str) -> str:
    """What a process of its own prints that ends well."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout


@pytest.mark.skipif(not build.has_compiler(), reason="no C++ compiler")
def test_threads_that_cannot_all_be_started_end_no_process() -> None:
    """Memory for some of their stacks is there, as processes may be up to a limit."""
    assert said(TOO_MANY, str(build_library(cache_folder()))) == "None\n"


def test_threads_go_with_the_last_decoder_but_not_at_exit() -> None:
    """A thread that computes then, as a program's own may, would go on without them."""
    assert said(AT_EXIT) == "freed 1\n"


def test_compilation_in_the_background_stalls_nobody(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on eagerly while the build hangs, and are compiled after it: same tokens."""
    library = build_library(cache_folder())
    may_finish = threading.Event()

    def slow_build(cache_dir: Path) -> Path:
        assert may_finish.wait(DEADLINE_S)
        return library

    monkeypatch.setattr(compiled, "build_library", slow_build)
    monkeypatch.setattr(compiled, "cached_library", lambda cache_dir: None)
    runner = load_runner(make_spec(checkpoint, compile="auto"))
    alone = load_runner(make_spec(checkpoint, compile="off"))
    ours, theirs = make_state([9, 8, 7]), make_state([9, 8, 7])
    for r, state in ((runner, ours), (alone, theirs)):
        start_row(r, 0, state)
    for step in range(20):
        if step == 10:
            assert runner.numerics == alone.numerics
            may_finish.set()
            wait_built()
        ours.output_ids.append(runner.decode([0])[0].token_id)
        theirs.output_ids.append(alone.decode([0])[0].token_id)
    assert runner.numerics.startswith("float32 kernels ")
    assert ours.output_ids == theirs.output_ids
    stored = save(build_model("llama").bfloat16(), checkpoint.parent / "stored")
    num_bytes = (stored / "model.safetensors").stat().st_size
    monkeypatch.setattr(compiled, "_BACKGROUND_BYTES", 3 * num_bytes // 2)
    kernels = compiled.find_kernels(make_spec(stored, compile="auto"))
    assert kernels.library is not None, "weights that are large as float32 are not held twice"
