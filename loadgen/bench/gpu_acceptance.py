"""`python -m loadgen.bench.gpu_acceptance`: everything that a GPU must be asked, in one command.

Each stage (`gpu_stages`, and the suites of tests/gpu) is a process of its own with a limit of its
own; one that fails, hangs or dies leaves the others alone. `DIR/acceptance.json` is written again
after each: what ran, how long, what it measured, and the end of what it said where it failed. It
needs torch and transformers; cupy, triton and pytest for their stages. Neither Ray nor pydantic.

`--rehearse` runs all of it on a CPU with tiny shapes: it checks the command, not a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.files import write_atomically

ROOT = Path(__file__).parents[2]
RESULT = "acceptance.json"
_SAID_CHARACTERS = 4000
_LEAST_S = 5.0
"""A stage is not started with less time left."""
_KILL_GRACE_S = 10.0
_CLAIMS = ("is_right", "is_same")
"""Keys of results; a stage with a false one is wrong."""
_CLAIMING = ("logits", "graphs")


@dataclass(frozen=True, slots=True)
class AcceptanceStage:
    """One process.

    Attributes:
        limit_s: Of its time, where the budget leaves so much.
        tests: Arguments of pytest; None: the function of `gpu_stages` that is called like it.
        rehearsed: Other arguments of pytest for a rehearsal.
        environment: Variables for it alone.
    """

    name: str
    limit_s: float
    tests: tuple[str, ...] | None = None
    rehearsed: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


STAGES = (
    AcceptanceStage("environment", 60),
    AcceptanceStage("ceilings", 60),
    AcceptanceStage("attention", 75),
    AcceptanceStage("decode_1b", 75),
    AcceptanceStage("decode_8b", 90),
    AcceptanceStage("logits", 75),
    AcceptanceStage("graphs", 60),
    AcceptanceStage("exits", 90),
    AcceptanceStage(
        "test_attention",
        150,
        ("tests/gpu/test_attention.py", "tests/gpu/test_operations.py"),
        ("tests/gpu/test_operations.py",),
    ),
    AcceptanceStage(
        "test_nccl",
        75,
        ("tests/gpu/test_nccl.py",),
        ("tests/gpu/test_nccl.py", "-k", "digests"),
        (("NCCL_MULTI_RANK_GPU_ENABLE", "1"),),
    ),
    AcceptanceStage("rivals", 120),
    AcceptanceStage(
        "test_engine",
        300,
        ("tests/gpu/test_engine.py",),
        ("tests/gpu/test_engine.py", "-k", "draws"),
    ),
)
"""The most telling first: the budget may end before the last."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 where every one of them was right."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench.gpu_acceptance")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for all stages")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--only", nargs="+", choices=[s.name for s in STAGES], metavar="STAGE")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.stage is not None:
        from loadgen.bench.gpu_stages import run

        run(args.stage, args.out / f"{args.stage}.jsonl", rehearse=args.rehearse)
        return 0
    if importlib.util.find_spec("torch") is None:
        parser.error("torch is not installed")
    args.out.mkdir(parents=True, exist_ok=True)
    stages = [s for s in STAGES if args.only is None or s.name in args.only]
    return _run_all(stages, args.out, args.budget_s, args.rehearse)


def _run_all(stages: Sequence[AcceptanceStage], out: Path, budget_s: float, rehearse: bool) -> int:
    ends_s = time.monotonic() + budget_s
    report: dict[str, Any] = {"benchmark": "gpu_acceptance", "rehearsal": rehearse, "stages": {}}
    for stage in stages:
        left_s = ends_s - time.monotonic()
        if left_s < _LEAST_S:
            found: dict[str, Any] = {"outcome": "not started: the budget is used up"}
        else:
            found = _run(stage, out, min(left_s, stage.limit_s), rehearse)
        report["stages"][stage.name] = found
        write_atomically(out / RESULT, (json.dumps(report, indent=1) + "\n").encode())
        print(f"{stage.name}: {found['outcome']}", flush=True)
    return 0 if all(s["outcome"] == "done" for s in report["stages"].values()) else 1


def _run(stage: AcceptanceStage, out: Path, limit_s: float, rehearse: bool) -> dict[str, Any]:
    """Run one stage to its end, or to the end of its time."""
    results, said = out / f"{stage.name}.jsonl", out / f"{stage.name}.log"
    results.unlink(missing_ok=True)
    environment = os.environ | dict(stage.environment)
    command = [sys.executable, "-m", "loadgen.bench.gpu_acceptance", "--out", str(out)]
    command += ["--stage", stage.name, *(["--rehearse"] if rehearse else [])]
    if stage.tests is not None:
        command = [sys.executable, "-m", "pytest", "-o", "addopts=-rfE", "--tb=short"]
        command += ["-o", "filterwarnings=default", "-p", "no:cacheprovider"]
        command += stage.rehearsed if rehearse else stage.tests
        if not rehearse and importlib.util.find_spec("xdist") is not None:
            command += ["-n", "12", "-p", "no:benchmark"]
            environment |= {"OMP_NUM_THREADS": "1"}  # each computes references on the host
    if rehearse:
        environment |= {"QUADRIGA_GPU_TESTS_ON_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    started_s = time.monotonic()
    with said.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            outcome = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit_s:.0f} s"
        finally:
            _end(process)
    told = _read(results)
    text = said.read_text(errors="replace")
    last = text.strip().rpartition("\n")[2]
    claims = [r[claim] for r in told for claim in _CLAIMS if claim in r]
    is_silent = not claims if stage.name in _CLAIMING else stage.tests and " passed" not in last
    if outcome == "done" and (is_silent or False in claims):
        outcome = "nothing was judged" if is_silent else "wrong"
    seconds = round(time.monotonic() - started_s, 1)
    found = {"outcome": outcome, "seconds": seconds, "results": told}
    if outcome != "done":
        found["said"] = text[-_SAID_CHARACTERS:]
    elif stage.tests is not None:
        found["said"] = last
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what the stage started and left, itself too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_KILL_GRACE_S)


def _read(path: Path) -> list[Any]:
    """The results so far; a line that a killed stage had begun is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
