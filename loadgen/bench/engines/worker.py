"""The child process that holds one peer: `python -m …worker PEER CHECKPOINT THREADS WEIGHTS`.

It reads one JSON command per line on stdin and answers one JSON line per command on the stdout it
was born with; whatever the engine prints goes to stderr. Commands: `{"prepare": [files]}` and
`{"run": file}`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from loadgen.bench.engines.base import Peer
from loadgen.bench.engines.peers import PEERS
from loadgen.bench.engines.workloads import load_workload


def main(arguments: list[str]) -> int:
    """Serve commands until stdin ends."""
    name, checkpoint, threads, weights = arguments
    # The engines print what they like: keep the answers' channel to ourselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer: Peer | None = None
    for line in sys.stdin:
        try:
            command = json.loads(line)
            if peer is None:
                module, cls = PEERS[name]
                made = getattr(importlib.import_module(module), cls)
                peer = made(Path(checkpoint), int(threads), weights)
            answer = _obey(peer, command)
        except Exception as exc:
            traceback.print_exc()
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _obey(peer: Peer, command: dict[str, Any]) -> dict[str, Any]:
    if "prepare" in command:
        workloads = [load_workload(Path(file)) for file in command["prepare"]]
        peer.prepare(workloads)
        for workload in workloads:
            peer.generate(workload.warm_up())
        return {"ready": peer.name, "memory_bytes": _memory_bytes()}
    workload = load_workload(Path(command["run"]))
    cpu_s = time.process_time()
    done = peer.generate(workload)
    return {
        "seconds": done.seconds,
        "ttft_s": done.ttft_s,
        "token_ids": done.token_ids,
        "cpu_s": time.process_time() - cpu_s,
    }


def _memory_bytes() -> int:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
