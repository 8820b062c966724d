"""Every option of every command says what it is, and refuses what it cannot be."""

from __future__ import annotations

import argparse
import importlib

import pytest

from loadgen.__main__ import COMMANDS, main
from loadgen.options import check_service, setting
from quadriga.errors import ConfigError

RUN = "run --url http://127.0.0.1:1"  # nobody listens
NOT_NUMBERS = ("abc", "nan", "-1", "1e400", "99999999999999999999", "")


def options(name: tuple[str, ...]) -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    return [a for a in parser._actions if a.dest != "help"]


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_every_option_is_described(name: tuple[str, ...]) -> None:
    for option in options(name):
        assert option.help, option.dest


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_every_number_has_bounds(name: tuple[str, ...]) -> None:
    for option in options(name):
        kind = getattr(option.type, "__name__", None)
        assert kind not in ("int", "float"), f"{option.dest}: say what it must be"
        if kind in ("whole_number", "real_number"):
            for text in NOT_NUMBERS:
                with pytest.raises(argparse.ArgumentTypeError):
                    option.type(text)  # type: ignore[operator, misc]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("paper ares --policy ares-mixed", "invalid choice: 'ares-mixed'"),
        ("paper drex --max-tokens 1", "1 must be at least 2"),
        ("paper lossless --max-tokens 1", "1 must be at least 2"),
        ("bench migration --output 63", "63 must be at least 64"),
    ],
)
def test_nothing_is_offered_that_cannot_be_measured(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert message in capsys.readouterr().err
    (changed,) = (a for a in options(("paper", "helios")) if a.dest == "changed")
    assert changed.type("0") == 0.0, "it is among the defaults"  # type: ignore[operator, misc]


def test_a_help_shows_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["paper", "helios", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "(default: quadriga-s quadriga-l)" in told
    with pytest.raises(SystemExit):
        main(["soak", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--every-s SECONDS" in told and "--places N" in told
    assert "--seed N of everything random (default: 0)" in told


@pytest.mark.parametrize("command", ["chaos", "soak", "overload", "upgrade"])
def test_a_wrong_setting_is_found_before_anything_starts(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--set", "decode.max_slotz=3"]) == 2
    assert "did you mean max_slots?" in capsys.readouterr().err
    assert main([command, "--model", "/nowhere"]) == 2
    assert "'/nowhere' is neither bundled" in capsys.readouterr().err


def test_what_a_service_is_started_with() -> None:
    check_service("quadriga-s", ["decode.max_slots=3"])
    assert setting("a=b=c") == "a=b=c"
    for text in ("a", "=b"):
        with pytest.raises(argparse.ArgumentTypeError, match="KEY=VALUE"):
            setting(text)
    with pytest.raises(ConfigError, match="decode_replicas"):
        check_service("quadriga-s", ["decode_replicas=0"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{RUN} --tasks 1 --extra {{", "--extra: not JSON"),
        (f"{RUN} --trace nowhere.csv", "nowhere.csv: cannot be read"),
        (f"{RUN} --sessions nowhere.jsonl", "nowhere.jsonl: cannot be read"),
        (f"{RUN} --tasks 1 --turns 3", "--turns: not for --tasks"),
        (f"{RUN} --stream false --slo-ttft-s 1", "--slo-tpot-s: not for --stream false"),
        (f"{RUN} --tasks 1 --url http://a..b", "--url: 'http://a..b'"),
        ("paper drex --fill copy linear", "--fill: give one"),
        ("paper baton --batch-mixed --batch-brief", "give one of them a size"),
        ("bench rescheduling-turns --pairs 3", "--pairs: 3: an even number"),
    ],
)
def test_what_cannot_be_done_is_named_before_anything_is_asked_or_started(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_a_cell_that_is_not_there_is_answered_shortly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--only", "SIGKILL prefil, mid-stream"]) == 2
    error = capsys.readouterr().err
    assert "'SIGKILL prefill, mid-stream'" in error and len(error) < 300
