"""The command line: dispatch, options, whole runs against the fake service, exit statuses."""

from __future__ import annotations

import argparse
import asyncio
import errno
import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from loadgen.__main__ import COMMANDS, main
from loadgen.checker import AnswerChoice, FaultKind, Verdict
from loadgen.checker.judge import Judgement
from loadgen.load.scenario import QUESTIONS, choose_load
from loadgen.load_options import add_arguments
from loadgen.report.metrics import LoadSummary
from loadgen.report.run_report import write_results
from loadgen.runner import Record, RunResult
from quadriga.tasks import TASKS, make_example, sample_examples
from tests.fake_service.server import FakeServer
from tests.unit.loadgen.conftest import Service, make_spec, run_command

HEADER = "arrival_s,input_tokens,output_tokens\n"


def answer_tasks(prompt: str) -> str | None:
    """Answer the examples of seed 0 rightly, but every sort wrongly."""
    for index, example in enumerate(sample_examples(seed=0)):
        if example.prompt == prompt.strip():
            return "wrong" if example.task == "sort" else example.answer
        if index > 100:
            return None
    return None


def run(service: tuple[str, str], tmp_path: Path, *words: str) -> int:
    return run_command("run", service, tmp_path, *words)[0]


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    text = (tmp_path / "out" / "run.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def write_trace(tmp_path: Path, rows: str) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + rows)
    return str(path)


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_trace_keeps_its_lengths(transport: str, service: Service, tmp_path: Path) -> None:
    trace = write_trace(tmp_path, "0,5,7\n0.01,300,2\n0.02,6,40\n")
    status = run(service(), tmp_path, "--trace", trace, "--transport", transport)
    assert status == 0
    head, *requests, summary = lines(tmp_path)
    assert head["kind"] == "run" and head["scenario"] == "trace trace" and head["seed"] == 0
    assert {"commit", "machine", "config", "warm_up"} <= head.keys()
    assert [r["prompt_tokens"] for r in requests] == [5, 300, 6]
    assert [r["completion_tokens"] for r in requests] == [7, 2, 40]
    assert [r["outcome"] for r in requests] == ["ok"] * 3
    assert sum(num for _, num in requests[2]["writes"][0]) == 40
    assert {r["response_id"] for r in requests} == {"cmpl-fake" if transport == "http" else "fake"}
    assert summary["kind"] == "summary" and summary["output_tokens"] == 49
    assert summary["ttft"]["p99"] > 0


def test_seed_decides_the_prompts(tmp_path: Path) -> None:
    async def bodies(seed: int) -> list[Any]:
        async with FakeServer() as server:
            words = ["--url", server.url, "--trace", trace, "--seed", str(seed), "--no-plots"]
            words += ["--output", str(tmp_path / "out"), "--warmup", "0", "--arrivals", "closed:1"]
            assert await asyncio.to_thread(main, ["run", *words]) == 0
            return [body["prompt"] for body in server.bodies]

    trace = write_trace(tmp_path, "0,50,1\n0,50,1\n")
    first, same, other = (asyncio.run(bodies(seed)) for seed in (1, 1, 2))
    assert first == same and first != other and first[0] != first[1]


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_tasks_are_scored(transport: str, service: Service, tmp_path: Path) -> None:
    started = service(answer=answer_tasks)
    words = ["--tasks", "40", "--max-tokens", "4000", "--endpoint", "both", "--stream", "both"]
    words += ["--transport", transport]
    assert run(started, tmp_path, *words) == 0
    _, *requests, summary = lines(tmp_path)
    assert {(r["endpoint"], r["stream"]) for r in requests} == {
        (endpoint, stream) for endpoint in ("completions", "chat") for stream in (True, False)
    }
    for task, (right, judged) in summary["scores"].items():
        assert task in TASKS and right == (0 if task == "sort" else judged) and judged > 0


def test_prompt_file_with_answers(service: Service, tmp_path: Path) -> None:
    example = make_example("copy", seed=5, index=0)
    rows = [
        {"prompt": "ping", "answer": "pong"},
        {"prompt": "pang", "answer": "pong"},
        {"prompt": example.prompt, "task": "copy"},
        {"prompt": "unscored", "completion": "ignored", "max_tokens": 5},
    ]
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    answers = {"ping": "pong", "pang": "peng", example.prompt: example.answer}
    words = ["--prompts", str(path), "--max-tokens", "900", "--warmup", "0"]
    assert run(service(answer=answers.get), tmp_path, *words) == 0
    *_, last, summary = lines(tmp_path)
    assert summary["scores"] == {"answer": [1, 2], "copy": [1, 1]}
    assert last["max_tokens"] == 5 and last["score"] is None


@pytest.mark.parametrize("command", ["run", "ramp"])
def test_ctrl_c_while_texts_are_verified_keeps_the_load(
    command: str, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: object) -> int:
        raise asyncio.CancelledError

    monkeypatch.setattr("loadgen.stage.verify_texts", interrupted)
    words = ["--tasks", "4", "--max-tokens", "3", "--warmup", "0"]
    words += ["--rate", "20", "--steps", "1", "--step-s", "0.4"] if command == "ramp" else []
    status, (_, *requests, summary) = run_command(command, service(), tmp_path, *words)
    assert status == 130 and any(line["kind"] == "request" for line in requests)
    assert summary["was_interrupted"] and summary["texts_not_verified"] == "interrupted"


def test_ctrl_c_while_answers_are_judged_keeps_the_load(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, judged = Judgement.__call__, []

    def interrupted(self: Judgement, *args: Any) -> Verdict:
        judged.append(args)
        if len(judged) == 1:
            signal.raise_signal(signal.SIGINT)
        return judge(self, *args)

    monkeypatch.setattr(Judgement, "__call__", interrupted)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, which shows progress
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has none
    assert run(service(), tmp_path, "--tasks", "4", "--max-tokens", "3", "--warmup", "0") == 130
    signal.signal(signal.SIGINT, before)
    _, *requests, summary = lines(tmp_path)
    assert len(requests) == len(judged) == 4 and summary["was_interrupted"]


def test_results_hold_half_a_character_and_are_replaced_as_a_whole(tmp_path: Path) -> None:
    verdict = Verdict(model="fake\ud83d", choices=[AnswerChoice(texts=["hi \ud83d"])])
    verdict.add(FaultKind.ERROR_FRAME, "dead \ud83d")
    assert str(verdict.faults[0]) == "error_frame: dead \\ud83d", "it can be printed"
    record = Record(make_spec(), "id", 0.0, 0.0, 1.0, 1, 10, verdict)
    result, summary = RunResult(0.0, 0.0, records=[record]), LoadSummary()
    path = write_results(tmp_path, {"kind": "run"}, result, summary)
    with pytest.raises(TypeError):
        write_results(tmp_path, {"kind": object()}, result, summary)
    _, request, last = map(json.loads, path.read_text().splitlines())
    assert (request["model"], last["kind"]) == ("fake\ud83d", "summary")


@pytest.mark.parametrize("command", ["run", "ramp"])
def test_a_full_disk_costs_the_file_and_not_the_figures(
    command: str,
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("loadgen.report.run_report.write_results", full)
    words = ["--tasks", "4", "--max-tokens", "3", "--warmup", "0"]
    words += ["--rate", "20", "--steps", "1", "--step-s", "0.4"] if command == "ramp" else []
    assert run_command(command, service(), tmp_path, *words) == (2, [])
    printed = capsys.readouterr()
    assert "tokens/s" in printed.out and "make room on the disk" in printed.err


def test_a_fault_of_the_checks_keeps_the_load(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise KeyError("of a checker")

    monkeypatch.setattr("loadgen.stage.score", broken)
    with pytest.raises(KeyError):
        run(service(), tmp_path, "--tasks", "4", "--max-tokens", "3")
    assert len(lines(tmp_path)) == 6


def test_a_text_file_is_a_chat_question_a_line_in_utf_8(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("Why?\n\n  Where to?  \n")
    assert run(service(), tmp_path, "--prompts", str(path), "--max-tokens", "4") == 0
    _, *requests, _ = lines(tmp_path)
    assert [r["endpoint"] for r in requests] == ["chat", "chat"]
    path.write_bytes(b"Why?\n\xff\xfe\n")
    assert run(service(), tmp_path, "--prompts", str(path)) == 2
    assert "questions.txt, line 2: not UTF-8" in capsys.readouterr().err


def test_without_a_load_a_model_is_asked_the_questions(service: Service, tmp_path: Path) -> None:
    assert run(service(), tmp_path, "--max-tokens", "2", "--warmup", "0") == 0
    head, *requests, _ = lines(tmp_path)
    assert head["scenario"] == "prompts questions.txt"
    assert len(requests) == 100 and {r["endpoint"] for r in requests} == {"chat"}
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
    assert len(set(questions)) == 100 and all(q == q.strip() != "" for q in questions)


def test_without_a_load_a_model_that_knows_the_tasks_is_asked_them() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([])
    choose_load(args, "quadriga-s")
    assert (args.tasks, args.prompts, args.max_tokens) == (100, None, 1024)
    limited = parser.parse_args(["--limit", "5"])
    choose_load(limited, "quadriga-s")
    assert limited.tasks == 5


def test_answers_are_compared_with_an_earlier_run(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("one\ntwo\nthree\n")
    words = ["--prompts", str(path), "--max-tokens", "40"]
    started = service(answer={"one": "1", "two": "2", "three": "3"}.get)
    assert run(started, tmp_path, *words, "--arrivals", "closed:1") == 0
    before = (tmp_path / "out").rename(tmp_path / "before")
    again = [*words, "--same-as", str(before)]
    assert run(started, tmp_path, *again) == 0
    assert "run.jsonl: 3 of 3" in capsys.readouterr().out.replace("\n", "")
    other = service(answer={"one": "1", "two": "II", "three": "3"}.get)
    assert run(other, tmp_path, *again) == 1
    *_, summary = lines(tmp_path)
    assert summary["faults"] == {"answer": 1} and summary["ok"] == 2
    assert run(started, tmp_path, *again, "--seed", "7") == 2
    assert "sent another load" in capsys.readouterr().err
    held = (before / "run.jsonl").read_bytes()
    (tmp_path / "link").symlink_to(before)
    assert run(started, tmp_path, *again, "--output", str(tmp_path / "link")) == 2
    assert "holds what --same-as names" in capsys.readouterr().err
    assert (before / "run.jsonl").read_bytes() == held


def test_a_run_finds_nothing_cached_that_an_earlier_one_sent(tmp_path: Path) -> None:
    async def sent(*words: str) -> list[str | None]:
        async with FakeServer() as server:
            common = ["run", "--url", server.url, "--tasks", "3", "--max-tokens", "3", "--no-plots"]
            common += ["--output", str(tmp_path), "--no-verify-text", *words]
            assert await asyncio.to_thread(main, common) == 0
            return [body.get("cache_salt") for body in server.bodies if "max_tokens" in body]

    (warm, *first), (_, *second) = (asyncio.run(sent("--warmup", "1")) for _ in range(2))
    assert len(first) == 3 and len({*first, *second, warm}) == 3 and None not in first
    assert asyncio.run(sent("--warmup", "0")) == [None] * 3
    extra = ("--warmup", "1", "--extra", '{"cache_salt": "mine"}')
    assert asyncio.run(sent(*extra))[1:] == ["mine"] * 3


def test_fit_prompts_cuts_to_the_context(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 5000}))
    words = ["--prompts", str(path), "--fit-prompts", "--max-tokens", "96"]
    assert run(service(), tmp_path, *words) == 0
    assert lines(tmp_path)[1]["prompt_tokens"] == 4000


@pytest.mark.parametrize("command", ["run", "ramp"])
@pytest.mark.parametrize(("is_for_good", "status"), [(True, 1), (False, 0)])
def test_results_are_written_though_texts_cannot_be_verified(
    command: str,
    is_for_good: bool,
    status: int,
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`/detokenize` is refused from the second call on, or the second call with a Retry-After."""
    answer, asked = FakeServer._answer, []

    async def refusing(self: FakeServer, request: Any, writer: asyncio.StreamWriter) -> None:
        asked.extend([request.path] if request.path == "/detokenize" else [])
        if request.path == "/detokenize" and len(asked) > 1 and (is_for_good or len(asked) == 2):
            after = {} if is_for_good else {"retry-after": 0}
            self._respond(writer, request, 429, {}, after)
        else:
            await answer(self, request, writer)

    monkeypatch.setattr(FakeServer, "_answer", refusing)
    words = ["--tasks", "3", "--max-tokens", "5"]
    if command == "ramp":
        words += ["--concurrency", "1", "--steps", "1", "--step-s", "0.2", "--settle-s", "0"]
    found, written = run_command(command, service(), tmp_path, *words)
    assert found == status
    assert sum(line["kind"] == "request" for line in written) >= 3
    why = "POST /detokenize answered 429: {}" if is_for_good else ""
    assert written[-1]["texts_not_verified"] == why
    assert (f"texts not verified: {why}" in capsys.readouterr().out) == is_for_good


def test_nothing_served_is_exit_status_1(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path, "0,5,9\n0,5,9\n")
    words = ["--trace", trace, "--warmup", "0"]
    assert run(service(fault="gap"), tmp_path, *words) == 1
    *_, summary = lines(tmp_path)
    assert summary["failed"] == 2 and summary["ok"] == 0
    assert (tmp_path / "out" / "failed-0.txt").read_text().count("data: ") >= 9
    # Refused ones are no failures, but none was served; what failed before is told no more.
    assert run(service(fault="refuse"), tmp_path, *words) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.jsonl"]
    assert run(service(fault="refuse"), tmp_path, "--trace", trace, "--warmup", "1") == 2
    assert "warm-up request 0 failed: it was refused" in capsys.readouterr().err


def test_plots_are_written(service: Service, tmp_path: Path) -> None:
    url, _ = service()
    trace = write_trace(tmp_path, "0,5,9\n0,5,9\n")
    words = ["run", "--url", url, "--trace", trace, "--output", str(tmp_path / "out")]
    assert main(words) == 0
    for name in ("latency.png", "timeline.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "3", "--arrivals", "banana"], "--arrivals: 'banana' is none of"),
        (["--tasks", "3", "--task-names", "sort,fly"], "--task-names: fly unknown"),
        (["--tasks", "3", "--extra", "[1]"], "--extra: must be a JSON object"),
        (["--tasks", "3", "--model", "gpt"], "--model: 'gpt' is not served; there are fake"),
        (["--tasks", "3", "--arrivals", "trace"], "no arrival times of its own"),
        (["--tasks", "3", "--transport", "grpc", "--extra", '{"nofield": 1}'], "--extra: Message"),
        (["--tasks", "1", "--api-key", "two\nlines"], "--api-key holds no key"),
        (["--tasks", "1", "--api-key", "schlüssel"], "--api-key holds no key"),
        # These would be ignored.
        (["--tasks", "3", "--fit-prompts"], "--fit-prompts: not for --tasks, but for --prompts"),
        (["--tasks", "3", "--limit", "4"], "--limit: not for --tasks, but for --prompts and"),
        (["--sessions", "3", "--max-tokens", "9"], "--max-tokens: not for --sessions N, but"),
        (["--sessions", "x.jsonl", "--turns", "9"], "--turns: not for --sessions FILE, but"),
        (["--trace", "x.csv", "--think-s", "9"], "--think-s: not for --trace, but for"),
    ],
)
def test_options_that_cannot_be_followed_are_named(
    words: list[str],
    message: str,
    service: Service,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(service(), tmp_path, *words) == 2
    assert message in capsys.readouterr().err


def test_nobody_listening_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("http://127.0.0.1:1", "127.0.0.1:1"), tmp_path, "--tasks", "1") == 2
    assert "is the service running?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # nothing was measured, nothing is left


def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--tasks", "many"])
    error = capsys.readouterr().err
    said = "error: argument --tasks: 'many' is not a whole number; see python -m loadgen run --help"
    assert error == f"{said}\n"


def test_api_key_is_sent_and_not_recorded(service: Service, tmp_path: Path) -> None:
    assert run(service(), tmp_path, "--tasks", "1", "--api-key", "s3cret-key") == 0
    assert "s3cret-key" not in (tmp_path / "out" / "run.jsonl").read_text()


def test_commands_are_listed_and_hinted_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serv"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'bench serve'?" in error
    assert all(" ".join(name) in error for name in COMMANDS)
    assert main(["--version"]) == 2
    assert "unknown command '--version'" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "bench serve" in capsys.readouterr().out
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "bench serve" in out and "paper" not in out
    assert main(["paper"]) == 2
    assert "'paper' alone is no command" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.parametrize("command", ["run", "ramp"])
def test_help_shows_no_key(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUADRIGA_API_KEY", "s3cret-key")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert "s3cret-key" not in out and "examples:" in out


def test_run_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, loadgen.run, loadgen.wire.client_grpc, loadgen.checker.grpc;"
        "import loadgen.load.workload;"
        "import loadgen.ramp, loadgen.comparison.command;"
        "import quadriga.tasks;"
        "sys.exit(any(m.split('.')[0] in ('torch', 'ray', 'transformers') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_command_that_is_terminated_cleans_up(tmp_path: Path, is_async: bool) -> None:
    """`timeout` and supervisors send SIGTERM: a service that was started must not stay behind."""
    (tmp_path / "endless.py").write_text(
        "import asyncio, time\n"
        "def add_arguments(parser): ...\n"
        "async def wait():\n"
        "    try:\n"
        "        print('begun', flush=True)\n"
        f"        {'await asyncio' if is_async else 'time'}.sleep(60)\n"
        "    finally:\n"
        "        print('cleaned', flush=True)\n"
        "def run(args):\n"
        "    asyncio.run(wait())\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import loadgen.__main__ as m;"
        "m.COMMANDS[('endless',)] = m.Command('endless', ''); sys.exit(m.main(['endless']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.terminate()
        assert child.stdout.readline() == "cleaned\n"
        assert child.wait(30.0) == 143
