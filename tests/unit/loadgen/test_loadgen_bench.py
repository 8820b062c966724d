"""Parts of the benchmarks: workloads, child processes, CPU accounting, early tokens."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from loadgen.bench.cluster import serve
from loadgen.bench.cluster.process_cpu import service_cpu_s
from loadgen.bench.cluster.serve import add_arguments, make_workload
from loadgen.bench.cluster.serve_report import Rounds, overhead_us, share_of
from loadgen.bench.cluster.service import ServiceUnderLoad, started_service
from loadgen.bench.depth_forecast import share_early
from loadgen.model_costs.engine import sequence
from loadgen.model_costs.subprocesses import python_process, read_line
from quadriga.checkpoint.exits import NO_EXITS
from quadriga.checkpoint.folder import Checkpoint
from quadriga.core.request import SamplingParams
from quadriga.errors import ConfigError
from tests.waiting import wait_until

CHECKPOINT = Checkpoint(
    id="tiny",
    path=Path("tiny"),
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=8,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=50,
    max_model_len=64,
    eos_token_ids=(0,),
    exits=NO_EXITS,
    fingerprint="0",
    heads_path=Path("tiny"),
)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_workload_is_seeded_and_in_the_vocabulary() -> None:
    words = ("--requests", "5", "--prompt-tokens", "20", "--output-tokens", "10")
    first, same = (make_workload(parse(*words), CHECKPOINT) for _ in range(2))
    other = make_workload(parse(*words, "--seed", "1"), CHECKPOINT)
    assert first == same
    assert first != other
    assert [(len(r.prompt), r.max_tokens) for r in first.requests] == [(20, 10)] * 5
    assert all(0 <= token < 50 for r in first.requests for token in r.prompt)


def test_workload_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="65 is beyond the 64 positions of tiny"):
        make_workload(parse("--prompt-tokens", "60", "--output-tokens", "5"), CHECKPOINT)


def test_overhead_is_the_time_added_per_token() -> None:
    engine = Rounds("engine", [1000.0, 2000.0, 9000.0])
    service = Rounds("http", [500.0, 1600.0, 1800.0])
    assert overhead_us(service, engine) == pytest.approx(1e6 / 1800 - 1e6 / 9000)
    assert share_of(service, engine) == 0.5, "of the medians it is .8"


async def test_the_service_keeps_no_prompts_of_earlier_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = AsyncMock()
    monkeypatch.setattr(serve, "run_load", load)
    workload = make_workload(parse("--prompt-tokens", "20", "--output-tokens", "5"), CHECKPOINT)
    for _ in range(2):
        await serve._send("http", ServiceUnderLoad("http://a:1", "", None), "tiny", workload)
    one, other = ([s.extra["cache_salt"] for s in call.args[0]] for call in load.await_args_list)
    assert len({*one, *other}) == 2


def test_tokens_that_all_leave_at_one_exit_left_early() -> None:
    state = sequence("s", [1], SamplingParams(4), exit_layers=[3, 3, 3, 3])
    assert share_early([state], 8) == 1.0
    state.exit_layers += [8, 8, 8]
    assert share_early([state], 8) == 0.5
    assert share_early([sequence("t", [1], SamplingParams(4))], 8) == 0.0


def test_cpu_time_of_children_is_counted() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    child = subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        assert 0.3 <= sum(service_cpu_s(child.pid).values()) < 5.0
        assert sum(service_cpu_s(os.getpid()).values()) >= 0.3
    finally:
        child.communicate(b"\n", timeout=20)


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["SIGINT", "SIGTERM"])
def asked_by(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """With what a child is asked to end; SIGINT would not be heard by a background job's."""
    before = signal.signal(signal.SIGINT, request.param)
    yield signal.SIGTERM if request.param is signal.SIG_IGN else signal.SIGINT
    signal.signal(signal.SIGINT, before)


def test_process_is_ended_with_its_children(asked_by: signal.Signals) -> None:
    code = "import signal, subprocess\n"
    code += "for s in (2, 15): signal.signal(s, lambda number, _: exit(number))\n"
    code += "p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); signal.pause()"
    with python_process(["-c", code]) as process:
        grandchild = int(read_line(process, 20))
        assert Path(f"/proc/{grandchild}").exists()
    assert process.returncode == asked_by

    def is_gone() -> bool:
        try:
            state = Path(f"/proc/{grandchild}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state == "Z"

    wait_until(is_gone)


def test_process_that_says_nothing_is_named() -> None:
    code = "import signal; signal.pause()"
    with pytest.raises(SystemExit), python_process(["-c", code]) as process:
        process.send_signal = sys.exit  # type: ignore[method-assign]  # as a further Ctrl-C
    assert process.returncode == -signal.SIGKILL
    with python_process(["-c", code]) as process:
        with pytest.raises(ConfigError, match="said nothing within"):
            read_line(process, 0.05)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(ConfigError, match="ended with status -9"):
            read_line(process, 20)


def test_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "made" / "service.log"
    for name in ("banana", "apple"):
        with (
            pytest.raises(ConfigError, match=rf"(?s)the service ended; it said:.*{name}"),
            started_service([f"{name}=1"], log=log),
        ):
            pass
    assert "banana" not in log.read_text(), "a log is written anew"
