"""`python -m loadgen bench depth`: what an engine costs at each depth, and what changing it costs.

Each depth is loaded in a process of its own: time to load, memory of the process over that of the
same process before, KV per token, tokens that fit into the KV memory, tokens per second of a full
batch that runs every loaded layer. Then one engine decodes while its depth changes: what a change
costs in steps, how long the longest step took, and what comes back.

The times of steps while layers load are those of one machine shared by both threads: on fewer cores
than two they are worse.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadgen.model_costs.subprocesses import python_process, read_line
from loadgen.options import whole
from loadgen.report import provenance
from quadriga.checkpoint.folder import read_checkpoint

WORKER_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--checkpoint", default="quadriga-l", help="bundled id or checkpoint directory, with exits"
    )
    parser.add_argument("--rows", type=whole(1, 512), default=16, help="sequences decoded at once")
    parser.add_argument("--prompt", type=whole(1), default=64, help="tokens of each prompt")
    parser.add_argument("--steps", type=whole(1), default=64, help="tokens timed of each sequence")
    parser.add_argument("--changes", type=whole(1), default=10, help="times down and up again")
    parser.add_argument("--kv-mib", type=whole(1), default=16, help="KV memory, to compare room in")
    parser.add_argument("--threads", type=whole(1), default=1, help="CPU threads of the engine")


def run(args: argparse.Namespace) -> int:
    """Measure; prints two tables and one JSON line."""
    checkpoint = read_checkpoint(args.checkpoint)
    depths = [*checkpoint.exits.layers, checkpoint.num_layers]
    rows = [_ask(args, {"depth": depth}) for depth in depths]
    console = Console()
    console.print(_depth_table(checkpoint.id, rows))
    changes: list[dict[str, Any]] = []
    if len(depths) > 1:
        changes = _ask(args, {"changes": args.changes})["changes"]
        console.print(_change_table(changes))
    first, last = rows[0], rows[-1]
    line = {
        "experiment": "bench depth",
        "headline": {
            "load_time_share": round(first["load_s"] / last["load_s"], 3),
            "memory_share": round(first["memory_bytes"] / last["memory_bytes"], 3),
            "capacity_ratio": round(first["capacity_tokens"] / last["capacity_tokens"], 3),
            "throughput_ratio": round(first["tokens_per_s"] / last["tokens_per_s"], 3),
            "longest_take_ms": max((c["take_ms"] for c in changes), default=None),
        },
        "checkpoint": checkpoint.id,
        "settings": {k: v for k, v in vars(args).items() if isinstance(v, int)},
        "depths": rows,
        "changes": changes,
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "versions": provenance.versions("torch", "safetensors"),
    }
    print(json.dumps(line))
    return 0


def _ask(args: argparse.Namespace, task: dict[str, int]) -> dict[str, Any]:
    """Run one task in a fresh process. Raises: ConfigError: It failed."""
    names = ("rows", "prompt", "steps", "kv_mib", "threads")
    settings = {name: getattr(args, name) for name in names}
    order = json.dumps({"checkpoint": args.checkpoint, **settings, **task})
    module = ["-m", f"{__package__}.depth_worker", order]
    with python_process(module, env={"PYTHONPATH": str(Path(__file__).parents[2])}) as process:
        answer: dict[str, Any] = json.loads(read_line(process, WORKER_TIMEOUT_S))
        process.wait(WORKER_TIMEOUT_S)
    return answer


def _depth_table(name: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{name} by depth")
    columns = ("layers", "load ms", "memory MiB", "weights MiB", "KV B/token", "room", "tokens/s")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["depth"]),
            f"{1e3 * row['load_s']:.0f}",
            f"{row['memory_bytes'] / 2**20:.1f}",
            f"{row['weight_bytes'] / 2**20:.1f}",
            str(row["kv_bytes_per_token"]),
            str(row["capacity_tokens"]),
            f"{row['tokens_per_s']:.0f}",
        )
    return table


def _change_table(changes: list[dict[str, Any]]) -> Table:
    table = Table(title="changing it while a batch decodes")
    columns = ("from", "to", "load ms", "take ms", "step ms", "longest step ms", "memory MiB")
    for column in columns:
        table.add_column(column, justify="right")
    for c in changes:
        table.add_row(
            str(c["before"]),
            str(c["after"]),
            "" if c["load_s"] is None else f"{1e3 * c['load_s']:.0f}",
            f"{c['take_ms']:.2f}",
            f"{c['step_ms']:.2f}",
            f"{c['longest_step_ms']:.2f}",
            f"{c['memory_change_bytes'] / 2**20:+.1f}",
        )
    return table
