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
        ("ramp --tasks 3", "one of the arguments --rate --concurrency is required"),
        ("ramp --tasks 3 --rate 9-1", "9 is above 1"),
        ("ramp --tasks 3 --rate 0-1", "must be a number above 0"),
        ("ramp --tasks 3 --rate nan", "must be a number above 0"),
        ("ramp --tasks 3 --rate 1-2 --concurrency 3-4", "not allowed with"),
        ("ramp --tasks 3 --rate 1-2 --steps 201", "must be in 1..200"),
        ("ramp --tasks 3 --rate 1-2 --slo-share 1.5", "at most 1"),
        ("run --sessions 0", "must be in 1.."),
        ("run --sessions 3 --turns 0", "must be in 1..1000"),
        ("run --sessions 3 --turns 4-2", "4 is above 2"),
        ("run --sessions 3 --turns 2-", "is not a whole number"),
        ("run --sessions 3 --think-s -1", "must be a number in 0.."),
        ("run --sessions 3 --think-s nan", "must be a number in 0.."),
        ("run --sessions 3 --tasks 3", "not allowed with"),
        ("simulate --lengths alpaca --front .5 --stays .001", "--stays: '.001' must be a number"),
    ],
)
def test_what_an_option_cannot_be_is_named(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
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
        (f'{RUN} --tasks 1 --extra {{"n":2}}', "--extra: n: set it with --choices"),
        (f"{RUN} --trace nowhere.csv", "there is no file nowhere.csv"),
        (f"{RUN} --sessions nowhere.jsonl", "there is no file nowhere.jsonl"),
        (f"{RUN} --tasks 1 --turns 3", "--turns: not for --tasks, but for --sessions N"),
        (f"{RUN} --prompts x --fit-prompts --endpoint chat", "token ids have no chat form"),
        (f"{RUN} --trace x --endpoint both", "--trace: token ids have no chat form"),
        (
            f"{RUN} --trace x --arrivals poisson:5 --time-scale 2",
            "poisson:5, which sets the times itself",
        ),
        (
            f"{RUN} --sessions 3 --endpoint chat --vocab-size 9",
            "--endpoint chat, which sends words",
        ),
        (f"{RUN} --sessions x --endpoint completions", "of a file are messages; use chat"),
        (f"{RUN} --stream false --slo-ttft-s 1", "--slo-tpot-s: not for --stream false"),
        (f"{RUN} --tasks 1 --url http://a..b", "--url: 'http://a..b'"),
        ("paper drex --fill copy linear", "--fill: give one"),
        ("paper baton --batch-mixed --batch-brief", "give one of them a size"),
        ("bench rescheduling-turns --pairs 3", "--pairs: 3: an even number"),
        ("ramp --tasks 3 --rate 1-9 --settle-s 20", "20 leaves nothing of a step of 20 s"),
        ("ramp --tasks 3 --rate 1-9 --stream both", "only streamed answers have a TTFT"),
        ("ramp --tasks 3 --rate 1-9 --time-scale 2", "a ramp sets the times itself"),
        ("ramp --tasks 3 --rate 1-9 --arrivals closed:3", "none of poisson, constant, gamma:CV"),
        ("ramp --tasks 3 --rate 1-9 --arrivals gamma", "none of poisson, constant, gamma:CV"),
        ("ramp --tasks 3 --rate 1-9 --arrivals gamma:-1", "must be above 0"),
        ("ramp --tasks 3 --concurrency 1.5-3", "must be whole numbers"),
        ("profile quadriga-s quadriga-s", "MODEL: two models are called 'quadriga-s'"),
        ("profile quadriga-s --catalogue x.yaml", "--catalogue: says which models"),
        ("plan nobody", "no published model"),
        ("plan llama-2-7b --context 5000", "4096 positions"),
        ("plan llama-2-7b --depth 33", "1..32"),
        ("paper ares --quick --duration-s 300", "600 must be less than --duration-s 300"),
        ("paper ares --quick --part traces", "--trace"),
        ("paper ares --part own --trace x.csv", "--trace: goes with --part traces"),
        ("paper ares --part settings --policy oracle", "--part settings: nothing to run"),
        ("paper ares --part own bandwidth --policy shedding", "--part own bandwidth: nothing"),
        ("paper helios --quick --threshold .5", "--threshold: goes with --part tau"),
        ("paper helios --memory-mib 9 --part ri", "--memory-mib: goes with --part fixed"),
        ("compare a", "give two runs, A B"),
        ("compare a vs", "give two runs, A B"),
        ("compare vs a", "give two runs, A B"),
        ("compare a vs b vs c", "give two runs, A B"),
        ("compare a b c", "3 runs: write `vs` between the sides"),
        ("compare a vs b c", "1 and 2 runs: one each, or 2..100 each"),
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
