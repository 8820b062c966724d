"""`python -m loadgen bench engine`: offline greedy generation, alone or against other engines.

Every engine runs in a process of its own; rounds are interleaved, so that a disturbance of the
machine hits all alike; medians are reported, and a ratio is the median of the rounds' own. Loading,
compilation and a warm-up of each workload stay outside the clock. Results are JSON lines on stdout;
progress goes to stderr.

Of a GGUF file the engine computes with the weights as they are stored. All other engines, and
`quadriga-plain`, read an ordinary checkpoint that is written from it, with the same numbers in
float32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.bench.engines.agreement import compare
from loadgen.bench.engines.base import GeneratedTokens
from loadgen.bench.engines.floor import floor_s, measure_machine, model_costs
from loadgen.bench.engines.peer_process import PeerProcess, interpreters, is_installed
from loadgen.bench.engines.peers import PEERS
from loadgen.bench.engines.quality import measure_quality
from loadgen.bench.engines.workloads import Workload, WorkloadError, load_workload, make_suite
from loadgen.comparison.pairs import median_ratio
from loadgen.options import whole
from loadgen.report.experiment import print_line, say
from loadgen.report.output import folder_to_write
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.checkpoint.packaged_models import packaged_file
from quadriga.config.engine_spec import WEIGHT_BYTES
from quadriga.errors import ConfigError
from quadriga.files import cache_folder
from quadriga.gguf.cache import plain_beside

OURS = "quadriga"
PLAIN = "quadriga-plain"
REFERENCE = "transformers"
LLAMA = "llama.cpp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--checkpoint", default="quadriga-l", help="bundled id, folder, GGUF file, or hub id"
    )
    parser.add_argument(
        "--workload", nargs="+", type=Path, default=[], metavar="FILE", help="JSON workload files"
    )
    parser.add_argument(
        "--weights",
        choices=["auto", *WEIGHT_BYTES],
        default="auto",
        help="engine.weights, of ours and of peers that know the form; says what it costs, too",
    )
    parser.add_argument("--threads", type=whole(1), default=1, help="CPU threads of each engine")
    parser.add_argument("--rounds", type=whole(1), help="measured runs; 1, or 3 of the suite")
    parser.add_argument(
        "--dump", type=folder_to_write, metavar="DIR", help="write token ids, a file each"
    )
    parser.add_argument(
        "--peer",
        nargs="+",
        default=[],
        choices=sorted(PEERS),
        metavar="NAME",
        help=f"also measure these: {', '.join(sorted(set(PEERS) - {OURS}))}",
    )
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="interpreter that has the peer installed",
    )
    parser.add_argument(
        "--suite",
        action="store_true",
        help="make the standard workloads, run all installed peers, compare and print the floor; "
        "what is done where no --workload is given",
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of the suite's workloads")


@dataclass(slots=True)
class EngineResults:
    """Every run of every peer: `runs[peer][workload name]`, in order of rounds.

    Attributes:
        memory_bytes: What each peer's process holds when it is warm.
    """

    runs: dict[str, dict[str, list[GeneratedTokens]]] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, peer: str, workload: str, generation: GeneratedTokens) -> None:
        self.runs.setdefault(peer, {}).setdefault(workload, []).append(generation)

    def seconds(self, peer: str, workload: str) -> float:
        """Median over the rounds."""
        return statistics.median(g.seconds for g in self.runs[peer][workload])

    def cpu_s(self, peer: str, workload: str) -> float:
        """Median processor time over the rounds: other programs on the machine are not in it."""
        return statistics.median(g.cpu_s for g in self.runs[peer][workload])

    def over_fastest(self, others: Sequence[str], workload: str, figure: str) -> float:
        """The fastest other one's `seconds` or `cpu_s` over ours, a median of ratios; else NaN."""
        ours, *times = (
            [getattr(done, figure) for done in self.runs[peer][workload]]
            for peer in (OURS, *others)
        )
        return median_ratio(min(times, key=statistics.median), ours) if times else math.nan


def run(args: argparse.Namespace) -> int:
    """Measure; returns 1 when the suite finds tokens that differ from the reference."""
    args.suite |= not args.workload
    checkpoint = read_checkpoint(args.checkpoint)
    try:
        workloads = [load_workload(file) for file in args.workload]
    except WorkloadError as exc:
        raise ConfigError(str(exc)) from exc
    if args.suite:
        workloads += make_suite(checkpoint.vocab_size, checkpoint.max_model_len, seed=args.seed)
    if len({w.name for w in workloads}) < len(workloads):
        raise ConfigError("two workloads have the same name; results could not be told apart")
    pythons = interpreters(args.peer_python)
    plain = plain_beside(checkpoint.path, cache_folder())
    peers = _choose_peers(args, pythons, has_plain=plain != checkpoint.path)
    results = measure(
        peers,
        workloads,
        checkpoint.path,
        args.threads,
        args.rounds or (3 if args.suite else 1),
        pythons,
        plain=plain,
        gguf=_gguf_file(args.checkpoint),
        weights=args.weights,
        needed=(OURS, REFERENCE, *args.peer),
    )
    if args.dump is not None:
        _dump(args.dump, results, workloads)
    agreed = True
    if args.suite:
        _print_speeds(results, workloads, plain, args.threads)
        if args.weights in ("auto", "float32"):  # others round, so they may say other tokens
            agreed = _print_agreement(results, workloads, plain)
    for line in _json_lines(results, workloads):
        print(json.dumps(line), flush=True)
    if args.weights not in ("auto", "float32"):
        found = measure_quality(checkpoint, [args.weights], args.threads)
        for form, quality in found.items():
            print(json.dumps({"weights": form, **asdict(quality)}), flush=True)
    if args.suite:
        settings = {name: getattr(args, name) for name in ("weights", "threads", "seed")}
        packages = ("torch", "transformers")
        print_line("bench engine", checkpoint=checkpoint.id, packages=packages, **settings)
    return 0 if agreed else 1


def measure(
    peers: Sequence[str],
    workloads: Sequence[Workload],
    checkpoint: Path,
    threads: int,
    rounds: int,
    pythons: dict[str, str],
    *,
    plain: Path | None = None,
    gguf: Path | None = None,
    weights: str = "auto",
    needed: Sequence[str] = (OURS,),
) -> EngineResults:
    """Run every workload on every peer, `rounds` times, taking turns.

    Args:
        gguf: The file that `checkpoint` was made of, which llama.cpp reads; None: there is none.
        weights: Their form, of `engine.weights`; for `quadriga-plain` it is always `auto`.
        plain: What all but our engine read, where that is another folder than `checkpoint`.
        needed: Peers without which nothing is measured; others that do not start are left out.
    """
    results = EngineResults()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        files = [Path(folder) / f"{i}.json" for i in range(len(workloads))]
        for file, workload in zip(files, workloads, strict=True):
            workload.save(file)
        running: list[PeerProcess] = []
        for name in peers:
            say(f"{name}: loading, compiling, warming up")
            path = checkpoint if name == OURS or plain is None else plain
            form = "auto" if name == PLAIN else weights
            try:
                if name == LLAMA:
                    if gguf is None:
                        raise ConfigError(f"{checkpoint.name} is no GGUF file")
                    path = gguf
                process = stack.enter_context(PeerProcess(name, path, threads, pythons[name], form))
                process.prepare(files)
            except ConfigError as exc:
                if name in needed:
                    raise ConfigError(f"{name}: {exc.message}") from exc
                say(f"{name}: left out, {exc.message}")
                continue
            running.append(process)
            results.memory_bytes[name] = process.memory_bytes
        for turn in range(rounds):
            for file, workload in zip(files, workloads, strict=True):
                for process in running:
                    done = process.run(file)
                    _check_counts(process.name, workload, done)
                    results.add(process.name, workload.name, done)
                    say(
                        f"round {turn + 1}/{rounds} {workload.name:>12} {process.name:>13}: "
                        f"{workload.output_tokens / done.seconds:8.0f} tokens/s"
                    )
    return results


def _check_counts(peer: str, workload: Workload, done: GeneratedTokens) -> None:
    wanted = [r.max_tokens for r in workload.requests]
    got = [len(tokens) for tokens in done.token_ids]
    if got != wanted:
        raise ConfigError(
            f"{peer} generated {sum(got)} tokens for {workload.name}, not the {sum(wanted)} asked"
        )


def _choose_peers(
    args: argparse.Namespace, pythons: dict[str, str], *, has_plain: bool
) -> list[str]:
    wanted = [name for name in PEERS if args.suite or name in args.peer or name == OURS]
    if PLAIN in wanted and not has_plain:  # it would be the same once more
        wanted.remove(PLAIN)
    peers = []
    for name in wanted:
        if is_installed(name, pythons[name]):
            peers.append(name)
        elif name in args.peer:
            raise ConfigError(f"--peer {name}: not installed for {pythons[name]}")
        else:
            say(f"{name}: not installed, left out")
    return peers


def _gguf_file(model: str) -> Path | None:
    path = packaged_file(model) or Path(model).expanduser()
    return path if path.is_file() else None


def _dump(folder: Path, results: EngineResults, workloads: Sequence[Workload]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for workload in workloads:
        tokens = results.runs[OURS][workload.name][0].token_ids
        (folder / f"{workload.name}.json").write_text(json.dumps(tokens), encoding="utf-8")


def _json_lines(results: EngineResults, workloads: Sequence[Workload]) -> list[dict[str, Any]]:
    lines = []
    for workload in workloads:
        for peer, runs in results.runs.items():
            seconds = results.seconds(peer, workload.name)
            of_rounds = [g.ttft_s for g in runs[workload.name]]
            p50_s, p99_s = np.percentile(np.median(of_rounds, axis=0), [50, 99]).tolist()
            lines.append(
                {
                    "peer": peer,
                    "workload": workload.name,
                    "tokens": workload.output_tokens,
                    "seconds": round(seconds, 6),
                    "tokens_per_s": round(workload.output_tokens / seconds, 2),
                    "cpu_seconds": round(results.cpu_s(peer, workload.name), 6),
                    "memory_bytes": results.memory_bytes[peer],
                    "ttft_p50": round(p50_s, 6),
                    "ttft_p99": round(p99_s, 6),
                }
            )
    return lines


def _print_speeds(
    results: EngineResults, workloads: Sequence[Workload], checkpoint: Path, threads: int
) -> None:
    """Print speeds, ratios and floor."""
    rates = measure_machine(threads)
    costs = model_costs(checkpoint)
    others = [peer for peer in results.runs if peer not in (OURS, PLAIN)]
    columns = [peer for peer in results.runs if peer != OURS]
    print(f"machine, {threads} thread(s): {rates.describe()}")
    header = f"{'workload':>12} {OURS:>10} " + " ".join(f"{p:>14}" for p in columns)
    print(f"{header} {'ratio':>7} {'by cpu':>7} {'floor':>8} {'of floor':>8}")
    for w in workloads:
        ours = w.output_tokens / results.seconds(OURS, w.name)
        ratio, by_cpu = (results.over_fastest(others, w.name, of) for of in ("seconds", "cpu_s"))
        floor = w.output_tokens / floor_s(w, costs, rates)
        cells = " ".join(f"{w.output_tokens / results.seconds(p, w.name):14.0f}" for p in columns)
        print(
            f"{w.name:>12} {ours:10.0f} {cells} {ratio:6.2f}x {by_cpu:6.2f}x {floor:8.0f} "
            f"{ours / floor:8.0%}"
        )
    print(
        "tokens/s; ratio to the fastest other engine, by the clock and by processor time; "
        "the floor is that of float32"
    )


def _print_agreement(
    results: EngineResults, workloads: Sequence[Workload], checkpoint: Path
) -> bool:
    """Print whose tokens are the reference's; False when some differ."""
    if REFERENCE not in results.runs:
        print(f"{REFERENCE} is not installed: tokens not compared")
        return True
    from loadgen.bench.engines.hf_transformers import load_model

    model = load_model(checkpoint)
    agreed = True
    for w in workloads:
        ours, theirs = (results.runs[peer][w.name][0].token_ids for peer in (OURS, REFERENCE))
        found = compare(model, [r.prompt for r in w.requests], ours, theirs)
        print(f"{w.name:>12} against {REFERENCE}: {found.describe()}")
        agreed = agreed and not found.different
    return agreed
