"""Drive one peer's worker process, with a deadline on every answer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.bench.engines.base import GeneratedTokens
from loadgen.bench.engines.peers import PROBES
from quadriga.errors import ConfigError
from quadriga.pipes import read_line

PREPARE_TIMEOUT_S = 1200.0
RUN_TIMEOUT_S = 1200.0
PROBE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
_ROOT = Path(__file__).parents[3]


def is_installed(peer: str, python: str) -> bool:
    """Whether `python` can find the peer's module."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    command = [python, "-c", probe, PROBES[peer]]
    try:
        return subprocess.run(command, timeout=PROBE_TIMEOUT_S, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


class PeerProcess:
    """A peer in a process of its own; a context manager that ends it on every path.

    Attributes:
        memory_bytes: What it holds when it is warm; 0 before.
    """

    def __init__(
        self, peer: str, checkpoint: Path, threads: int, python: str, weights: str = "auto"
    ) -> None:
        self.name = peer
        self.memory_bytes = 0
        environment = os.environ | {
            "PYTHONPATH": str(_ROOT),
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [
                python,
                "-m",
                "loadgen.bench.engines.worker",
                peer,
                str(checkpoint),
                str(threads),
                weights,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("QUADRIGA_BENCH_VERBOSE") else subprocess.DEVNULL,
            env=environment,
        )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of a peer that ended unasked
                    pipe.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_TIMEOUT_S)

    def prepare(self, files: Sequence[Path]) -> None:
        """Load, compile and warm up. Raises: ConfigError when the peer cannot."""
        answer = self._ask({"prepare": [str(f) for f in files]}, PREPARE_TIMEOUT_S)
        self.memory_bytes = answer["memory_bytes"]

    def run(self, file: Path) -> GeneratedTokens:
        """Run one workload. Raises: ConfigError when the peer fails or does not answer."""
        answer = self._ask({"run": str(file)}, RUN_TIMEOUT_S)
        return GeneratedTokens(
            answer["seconds"], answer["ttft_s"], answer["token_ids"], answer["cpu_s"]
        )

    def _ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "opened with a pipe"
        assert stdout is not None, "opened with a pipe"
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError as exc:
            raise ConfigError(f"peer {self.name} ended before it was asked") from exc
        try:
            line = read_line(stdout, timeout_s)
        except TimeoutError as exc:
            raise ConfigError(f"peer {self.name} did not answer within {timeout_s:g} s") from exc
        except EOFError as exc:
            raise ConfigError(
                f"peer {self.name} ended with status {self._process.wait(END_TIMEOUT_S)}; "
                "QUADRIGA_BENCH_VERBOSE=1 shows what it said"
            ) from exc
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigError(f"peer {self.name}: {answer['error']}")
        return answer


def interpreters(given: Sequence[str]) -> dict[str, str]:
    """Parse `--peer-python NAME=PATH`. Raises: ConfigError on an unknown name."""
    found = dict.fromkeys(PROBES, sys.executable)
    for item in given:
        name, _, path = item.partition("=")
        if name not in found or not path:
            raise ConfigError(
                f"--peer-python {item!r}: give NAME=PATH, NAME one of {', '.join(found)}"
            )
        found[name] = path
    return found
