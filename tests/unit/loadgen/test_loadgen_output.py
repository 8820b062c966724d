"""Where results go is tried first; whoever does not read the output to its end is not told off."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import loadgen
from loadgen.__main__ import COMMANDS, EXIT_UNREAD, main
from loadgen.report import provenance
from loadgen.report.experiment import keep_rows, publish
from loadgen.report.output import file_to_write, folder_to_write, output_folder
from quadriga.errors import ConfigError

SIMULATE = ["simulate", "--lengths", "alpaca", "--duration-s", "50", "--no-plots"]


def unusable(tmp_path: Path) -> list[Path]:
    """A file, a folder below a file, and a folder in which not even root can make anything."""
    file = tmp_path / "file"
    file.write_text("mine")
    return [file, file / "below", Path("/proc/self/fdinfo"), Path("/proc/self/fdinfo/below")]


def test_a_folder_that_cannot_be_written_to_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    for folder in unusable(tmp_path):
        with pytest.raises(argparse.ArgumentTypeError, match="nothing can be written to"):
            folder_to_write(str(folder))
        with pytest.raises(ConfigError, match="--output: nothing can be"), output_folder(folder):
            pass
    assert folder_to_write(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_is_refused_and_none_is_changed(tmp_path: Path) -> None:
    for path in (tmp_path, *(folder / "x" for folder in unusable(tmp_path))):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            file_to_write(str(path))
    for name in ("file", "new", "deep/er"):
        assert file_to_write(str(tmp_path / name)) == tmp_path / name
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "words",
    [
        [*SIMULATE, "--out"],
        [*SIMULATE, "--record"],
        ["run", "--tasks", "1", "--output"],
        ["ramp", "--tasks", "1", "--rate", "1-2", "--output"],
        ["compare", "a", "b", "--output"],
        ["paper", "ares", "--out"],
        ["bench", "simulator", "--out"],
        ["bench", "simulator", "--record"],
        ["bench", "rescheduling", "--out"],
        ["bench", "engine", "--dump"],
        ["bench", "serve", "--log"],
        ["replay", "--save"],
        ["soak", "--out"],
        ["overload", "--out"],
        ["chaos", "--json"],
        ["chaos", "--logs"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_commands_look_at_where_results_go_before_they_begin(
    words: list[str], tmp_path: Path, capsys: Any
) -> None:
    blocked = unusable(tmp_path)[1]
    with pytest.raises(SystemExit) as stopped:
        main([*words, str(blocked)])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"argument {words[-1]}: " in printed.err
    assert "choose another" in printed.err


def test_every_command_with_results_tries_where_they_go() -> None:
    """No option that names a folder or file to write is a mere path."""
    for name, command in COMMANDS.items():
        module = Path(*command.module.split(".")).with_suffix(".py")
        source = (Path(loadgen.__file__).parents[1] / module).read_text()
        named = ("--out", "--output", "--record", "--json", "--logs", "--dump", "--log", "--save")
        for option in named:
            after = source.partition(f'"{option}"')[2][:60]
            assert "type=Path" not in after, (name, option)


@contextmanager
def unread_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard output is a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        yield


def test_the_commit_is_that_of_the_code_and_not_of_a_checkout_it_is_installed_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provenance, "__file__", f"{__file__}.installed")
    assert provenance.commit() == "unknown"


def test_a_figure_that_there_is_none_of_is_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    third = 1 / 3
    publish("mine", {"ratio": math.nan, "n": 3}, [{"s": [third, math.inf]}], tmp_path)
    for text in (capsys.readouterr().out, (tmp_path / "mine.json").read_text()):
        line = json.loads(text, parse_constant=pytest.fail)
        assert line["headline"] == {"ratio": None, "n": 3}
    assert line["rows"] == [{"s": [third, None]}]


def test_rows_that_cannot_be_kept_end_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_rows("mine", [{"n": 1}], unusable(tmp_path)[1])
    assert "what there is yet is not kept: " in capsys.readouterr().err


def test_output_that_nobody_reads_ends_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with unread_output(monkeypatch):
        assert main(["--help"]) == EXIT_UNREAD
    assert capsys.readouterr().err == ""


def test_results_are_there_though_nobody_read_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    with unread_output(monkeypatch), pytest.raises(SystemExit):
        main([*SIMULATE, "--out", str(tmp_path)])
    assert capsys.readouterr().err == ""
    [path] = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["ended"] == "complete"


def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "a.json")
    monkeypatch.setattr("loadgen.plan.run", Mock(side_effect=full))
    assert main(["plan"]) == 2
    why = "[Errno 28] No space left on device: 'a.json'"
    assert f"error: {why}; make room on the disk, and start it again\n" == capsys.readouterr().err


def test_another_broken_pipe_is_still_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(args: object) -> int:
        raise BrokenPipeError("a connection")

    monkeypatch.setattr("loadgen.simulate.run", breaks)
    with pytest.raises(BrokenPipeError, match="a connection"):
        main(SIMULATE)


def test_the_interpreter_says_nothing_at_its_end_either() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "loadgen", "--help"],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writer)
    assert ended.stderr == b""
    assert ended.returncode == EXIT_UNREAD
