"""A GGUF file is converted once, whole or not at all, and found again by its content."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quadriga.catalogue.headers import read_header
from quadriga.checkpoint.folder import on_this_node, read_checkpoint
from quadriga.errors import ConfigError
from quadriga.files import cache_folder, file_lock
from quadriga.gguf import cache as cache_module
from quadriga.gguf import checkpoint_folder
from quadriga.gguf.__main__ import main
from quadriga.gguf.cache import converted_folder, plain_beside, plain_folder
from quadriga.gguf.checkpoint_folder import Conversion
from tests.gguf_files import small_fields, small_tensors, write_file


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of these tests are as old as they will be."""
    monkeypatch.setattr(cache_module, "SETTLED_S", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_file(tmp_path / "Tiny-Q.gguf", "llama", small_fields(), small_tensors())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def folders(cache: Path) -> list[Path]:
    return [p for p in (cache / "gguf").iterdir() if p.is_dir() and p.name != "known"]


def forbid(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    def called(*_: object) -> None:
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(owner, name, called)


def test_the_second_start_reads_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted_folder(file, cache)
    forbid(monkeypatch, cache_module, "_sha256")
    forbid(monkeypatch, checkpoint_folder, "read_gguf")
    assert converted_folder(file, cache) == folder


def test_a_file_that_moved_is_not_converted_again(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted_folder(file, cache)
    forbid(monkeypatch, Conversion, "write")
    assert converted_folder(file.rename(file.with_name("Other.gguf")), cache) == folder


def test_a_file_that_changed_is_converted_again(file: Path, cache: Path) -> None:
    """Of the same name, size and time of writing."""
    folder, info = converted_folder(file, cache), file.stat()
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert converted_folder(file, cache) != folder
    assert len(folders(cache)) == 2


def test_a_file_that_changes_while_it_is_read(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Conversion.write

    def and_touch(self: Conversion, *arguments: object) -> None:
        write(self, *arguments)  # type: ignore[arg-type]
        os.utime(file, ns=(1, 1))

    monkeypatch.setattr(Conversion, "write", and_touch)
    with pytest.raises(ConfigError, match="changed while it was read"):
        converted_folder(file, cache)
    assert folders(cache) == []


def test_a_young_file_is_looked_at_again(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change once more without its times telling."""
    monkeypatch.setattr(cache_module, "SETTLED_S", 3600.0)
    converted_folder(file, cache)
    assert not (cache / "gguf" / "known").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "source.json"])
def test_what_was_taken_out_is_put_back(file: Path, cache: Path, name: str) -> None:
    folder = converted_folder(file, cache)
    (folder / name).unlink()
    assert (converted_folder(file, cache) / name).is_file()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sha256": 5}', b'{"sha256": "../../x"}'])
def test_a_garbled_memory_is_not_believed(file: Path, cache: Path, content: bytes) -> None:
    folder = converted_folder(file, cache)
    (memory,) = (cache / "gguf" / "known").iterdir()
    memory.write_bytes(content)
    assert converted_folder(file, cache) == folder


def test_a_failure_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    tensors = small_tensors()
    tensors["output_norm.weight"][3] = np.nan
    file = write_file(tmp_path / "m.gguf", "llama", small_fields(), tensors)
    with pytest.raises(ConfigError, match="NaN"):
        converted_folder(file, cache)
    assert [p.suffix for p in (cache / "gguf").iterdir()] == [".lock"]


def test_what_dead_processes_left_is_removed(file: Path, cache: Path) -> None:
    folder = converted_folder(file, cache)
    shutil.rmtree(folder)
    own, other, live = (
        cache / "gguf" / f".{name}.partial" for name in (folder.name, "1" * 32, "2" * 32)
    )
    for path in (own, other, live):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    with file_lock(cache / "gguf" / f".{'2' * 32}.lock", 0.0):
        converted_folder(file, cache)
    assert [path.exists() for path in (own, other, live)] == [False, False, True]


def test_folders_of_older_versions_are_removed(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted_folder(file, cache)
    monkeypatch.setattr(cache_module, "VERSION", cache_module.VERSION + 1)
    assert folders(cache) != [newer := converted_folder(file, cache)]
    assert folders(cache) == [newer]


def test_a_disk_that_is_too_small(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "SPARE_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match=r"engine\.cache_dir: .*free there"):
        converted_folder(file, cache)
    with pytest.raises(ConfigError, match=r"--plain: .*free there"):
        plain_folder(file, cache / "plain")


def test_a_cache_that_cannot_be_written(file: Path, cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"engine\.cache_dir"):
        converted_folder(file, cache)


def _convert(file: Path, cache: Path) -> None:
    converted_folder(file, cache)


def test_processes_convert_once(file: Path, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_convert, args=(file, cache)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert len(folders(cache)) == 1


def test_who_waits_gives_up_where_nothing_moves(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "PATIENCE_S", 0.2)
    folder = converted_folder(file, cache)
    shutil.rmtree(folder)
    with (
        file_lock(cache / "gguf" / f".{folder.name}.lock", 0.0),
        pytest.raises(ConfigError, match="another process holds"),
    ):
        converted_folder(file, cache)


def test_who_waits_is_patient_while_something_is_written(tmp_path: Path) -> None:
    """A large model takes longer to convert than anyone waits for silence."""
    lock, released = tmp_path / "lock", threading.Event()
    steps = iter(range(1000))

    def progress() -> int:
        step = next(steps)
        if step == 4:
            released.set()
        return step

    def hold(taken: threading.Event) -> None:
        with file_lock(lock, 0.0):
            taken.set()
            released.wait(60)

    taken = threading.Event()
    holder = threading.Thread(target=hold, args=(taken,))
    holder.start()
    taken.wait(60)
    with file_lock(lock, 0.0, progress=progress):
        assert released.is_set()
    holder.join()


def test_clients_know_a_file_by_its_name(file: Path, cache: Path) -> None:
    checkpoint = read_checkpoint(str(file), cache_dir=cache)
    assert checkpoint.id == "Tiny-Q"
    assert checkpoint.source == str(file)
    assert (checkpoint.num_layers, checkpoint.eos_token_ids) == (2, (1,))


def test_another_node_converts_its_own_file(file: Path, cache: Path, tmp_path: Path) -> None:
    here = read_checkpoint(str(file), cache_dir=cache)
    shutil.rmtree(here.path)  # as on a node that has the file and not the folder
    there = on_this_node(here, tmp_path / "its cache")
    assert there.path.is_relative_to(tmp_path / "its cache")
    assert replace(there, path=here.path, heads_path=here.heads_path) == here


def test_another_node_has_another_file(file: Path, cache: Path, tmp_path: Path) -> None:
    here = read_checkpoint(str(file), cache_dir=cache)
    shutil.rmtree(here.path)
    tensors = small_tensors()
    tensors["output_norm.weight"][0] += 1
    write_file(file, "llama", small_fields(), tensors)
    with pytest.raises(ConfigError, match="another model"):
        on_this_node(here, tmp_path / "its cache")


def test_a_folder_with_a_gguf_file_names_it(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"name its file: .*Tiny-Q\.gguf"):
        read_checkpoint(str(file.parent))


def test_recommended_sampling(tmp_path: Path, cache: Path) -> None:
    fields = small_fields() | {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.75,
    }
    file = write_file(tmp_path / "m.gguf", "llama", fields, small_tensors())
    sampling = read_checkpoint(str(file), cache_dir=cache).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 20, 0.75)
    fields["general.sampling.top_k"] = -1
    file = write_file(tmp_path / "none.gguf", "llama", fields, small_tensors())
    assert read_checkpoint(str(file), cache_dir=cache).sampling.top_k == 0


def test_the_command_prints_the_folder(
    file: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(file), "--cache-dir", str(cache)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert json.loads((folder / "source.json").read_text())["file"] == str(file)
    assert main([str(file) + "x", "--cache-dir", str(cache)]) == 2
    assert (
        f"{file}x cannot be read: No such file or directory; mend its path"
        in capsys.readouterr().err
    )


def test_a_plain_folder_is_written_once(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plain"
    assert main([str(file), "--plain", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    kinds = {place.dtype for place in read_header(folder / "model.safetensors")}
    assert kinds == {"F32"}
    assert main([str(file), "--plain", str(folder)]) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err


def test_a_plain_folder_is_there_whole_or_not_at_all(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Conversion, folder: Path, *_: object) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    folder = tmp_path / "plain"
    monkeypatch.setattr(Conversion, "write", die)
    with pytest.raises(KeyboardInterrupt):
        plain_folder(file, folder)
    assert not folder.exists()
    monkeypatch.undo()
    (folder / "lost+found").mkdir(parents=True)
    before = folder.stat().st_ino
    monkeypatch.chdir(folder)
    assert plain_folder(file, Path()) == folder
    assert folder.stat().st_ino == before, "it may be a mount point, which cannot be replaced"
    assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("is_mount", [True, False])
def test_a_plain_folder_is_written_after_a_run_that_was_killed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mount: bool
) -> None:
    folder = tmp_path / "plain"
    if is_mount:
        folder.mkdir()

    def be_killed(self: Conversion, folder: Path, *_: object) -> None:
        (folder / "half.safetensors").write_bytes(b"half")
        monkeypatch.setattr(cache_module.shutil, "rmtree", lambda *_, **__: None)
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(Conversion, "write", be_killed)
        with pytest.raises(KeyboardInterrupt):
            plain_folder(file, folder)
    monkeypatch.undo()
    assert list(tmp_path.rglob("half.safetensors"))
    assert plain_folder(file, folder) == folder
    names = {path.name for path in folder.iterdir()}
    assert "model.safetensors" in names and not list(tmp_path.rglob("half.safetensors"))
    assert not list(tmp_path.glob(".plain*")) and not {n for n in names if n.startswith(".")}


def test_the_plain_form_is_of_the_file_that_was_converted(file: Path, cache: Path) -> None:
    folder = converted_folder(file, cache)
    tensors = small_tensors()
    tensors["output_norm.weight"][0] += 1
    write_file(file, "llama", small_fields(), tensors)
    with pytest.raises(ConfigError, match="no longer what was converted"):
        plain_beside(folder, cache)
    write_file(file, "llama", small_fields(), small_tensors())
    assert (plain_beside(folder, cache) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("variable", "folder"),
    [("/xdg", "/xdg/quadriga"), ("relative", "~/.cache/quadriga"), (None, "~/.cache/quadriga")],
)
def test_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, folder: str
) -> None:
    if variable is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert cache_folder() == Path(folder).expanduser()
    assert cache_folder("/other") == Path("/other")
