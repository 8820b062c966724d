"""Write a run down: table, JSON lines with raw times, reproductions of failures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadgen.report import provenance
from loadgen.report.figures import several, shown
from loadgen.report.metrics import Distribution, LoadSummary
from loadgen.runner import Record, RunResult
from loadgen.wire.capture import Capture

RESULTS_FILE = "run.jsonl"
_FILES_BESIDE = ("failed-*.txt", "latency.png", "timeline.png", "ramp.png")


def header(
    *,
    kind: str,
    scenario: str,
    config: Mapping[str, Any],
    seed: int,
    warm_up: str,
    started_unix_s: float,
    fingerprint: str,
) -> dict[str, Any]:
    """Return the first line of a results file: all that is needed to read and repeat the run."""
    return {
        "kind": kind,
        "scenario": scenario,
        "config": dict(config),
        "seed": seed,
        "load_sha256": fingerprint,
        "warm_up": warm_up,
        "started_unix_s": started_unix_s,
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "versions": provenance.versions("numpy", "grpcio", "uvloop"),
        "times": "seconds from the start of the run",
    }


def request_line(record: Record, start_s: float) -> dict[str, Any]:
    """Return one request's line: what was asked, raw times, judgement."""
    spec, verdict = record.spec, record.verdict

    def at(time_s: float) -> float:
        return round(time_s - start_s, 6)

    return {
        "kind": "request",
        "index": spec.index,
        "request_id": record.request_id,
        "response_id": verdict.response_id,
        "endpoint": spec.endpoint,
        "stream": spec.stream,
        "task": spec.task,
        "session": spec.session,
        "turn": spec.turn,
        "dropped_turns": spec.dropped_turns,
        "max_tokens": spec.max_tokens,
        "scheduled_s": at(record.scheduled_s),
        "sent_s": at(record.sent_s),
        "ended_s": at(record.ended_s),
        "attempts": record.attempts,
        "outcome": verdict.outcome,
        "status": verdict.status,
        "retry_after_s": verdict.retry_after_s,
        "model": verdict.model,
        "prompt_tokens": verdict.prompt_tokens,
        "cached_tokens": verdict.cached_tokens,
        "completion_tokens": verdict.completion_tokens,
        "counted_by": verdict.counted_by,
        # Per choice: [time, tokens] of every write.
        "writes": [[[at(w.time_s), w.num_tokens] for w in c.writes] for c in verdict.choices],
        "finish_reasons": [choice.finish_reason for choice in verdict.choices],
        "answers": [choice.digest for choice in verdict.choices],
        "score": record.score,
        "bytes": record.num_bytes,
        "num_faults": verdict.num_faults,
        "faults": [str(fault) for fault in verdict.faults],
        "quadriga": verdict.extension,
    }


def write_results(
    folder: Path,
    head: Mapping[str, Any],
    result: RunResult,
    summary: LoadSummary,
    further: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write `run.jsonl` and the raw bytes of failed requests; an earlier run's files go.

    Args:
        further: Lines between the requests and the summary.
    """
    path = folder / RESULTS_FILE
    unfinished = path.with_suffix(".unfinished")
    # A lone surrogate of an answer is written as JSON's escape for it.
    with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as stream:
        for line in (
            head,
            *(request_line(record, result.start_s) for record in result.records),
            *further,
            {"kind": "summary", **summary.as_dict()},
        ):
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    unfinished.replace(path)
    for earlier in itertools.chain(*map(folder.glob, _FILES_BESIDE)):
        earlier.unlink()
    for index, capture in result.failed_captures:
        _write_capture(folder / f"failed-{index}.txt", capture, result.start_s)
    return path


def _write_capture(path: Path, capture: Capture, start_s: float) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(f"fault: {capture.fault}\nstatus: {capture.status} {capture.status_message}\n")
        for time_s, data in capture.reads:
            stream.write(f"{time_s - start_s:.6f} {data!r}\n")


def print_summary(console: Console, summary: LoadSummary, title: str) -> None:
    """Print latencies, throughput, generator and task scores as tables."""
    console.print(_latency_table(summary, title))
    console.print(_totals_table(summary))
    if summary.turns:
        console.print(_turn_table(summary))
    if summary.scores:
        console.print(_score_table(summary))
    if summary.faults:
        faults = ", ".join(f"{kind} {count}" for kind, count in summary.faults.items())
        console.print(f"[red]failed requests by first fault:[/red] {faults}")
    for reason, count in summary.unsent.items():
        console.print(f"turns not sent: {count:,}: {reason}", style="yellow", markup=False)
    if summary.generator_is_slow:
        console.print(
            "[yellow]The generator was late (lag P99 above 10 ms): its machine is too busy for "
            "this load, and the service saw another one than planned.[/yellow]"
        )


def _latency_table(summary: LoadSummary, title: str) -> Table:
    table = Table(title=title)
    for column in ("ms", "mean", "P50", "P90", "P99", "max", "values"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    rows = {
        "TTFT": summary.ttft,
        "TPOT": summary.tpot,
        "inter-token": summary.itl,
        "stall": summary.stall,
        "E2E": summary.e2e,
        "lag": summary.lag,
    }
    for name, values in rows.items():
        table.add_row(name, *_cells(values))
    if summary.retry_after.count:
        table.add_row("Retry-After", *_cells(summary.retry_after))
    return table


def _cells(values: Distribution) -> list[str]:
    parts = (values.mean, values.p50, values.p90, values.p99, values.max)
    return [*(several(part, factor=1e3) for part in parts), f"{values.count:,}"]


def _totals_table(summary: LoadSummary) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("requests: passed every check", f"{summary.ok:,} of {summary.requests:,}")
    table.add_row("refused (429)", f"{summary.refused:,}")
    if summary.refused_attempts > summary.refused:
        table.add_row("refused attempts, with retried ones", f"{summary.refused_attempts:,}")
    table.add_row("failed", f"[red]{summary.failed:,}[/red]" if summary.failed else "0")
    table.add_row("duration", f"{summary.duration_s:,.2f} s")
    table.add_row("requests/s", f"{summary.requests_per_s:,.3f}")
    table.add_row("output tokens/s", f"{summary.output_tokens_per_s:,.1f}")
    tokens = f"{summary.prompt_tokens:,} in, {summary.output_tokens:,} out"
    table.add_row("tokens", tokens)
    if summary.tokens_per_write is not None:
        table.add_row("tokens per write", f"{summary.tokens_per_write:.2f}")
    if len(summary.exits) > 1:
        total = sum(summary.exits.values())
        shares = (f"{layers}: {count / total:.1%}" for layers, count in summary.exits.items())
        table.add_row("tokens by layers run", ", ".join(shares))
    if summary.goodput_rps is not None and summary.good_share is not None:
        limits = " and ".join(
            f"{name} ≤ {limit * 1e3:g} ms"
            for name, limit in (("TTFT", summary.slo.ttft_s), ("TPOT", summary.slo.tpot_s))
            if limit is not None
        )
        table.add_row(
            f"goodput ({limits})", f"{summary.goodput_rps:,.3f}/s, {summary.good_share:.1%}"
        )
    table.add_row("generator CPU", f"{summary.generator_cpu_share:.2f} cores")
    return table


def _turn_table(summary: LoadSummary) -> Table:
    table = Table(title=f"turns of {summary.sessions:,} conversations")
    columns = ("turn", "passed", "prompt tokens", "cached", "shortened")
    for column in (*columns, "TTFT P50", "P99", "TPOT P50"):
        table.add_column(column, justify="left" if column == "turn" else "right")
    for turn in summary.turns:
        first, last = turn.first + 1, turn.last + 1
        name = str(first) if first == last else f"{first} to {last}"
        times = (turn.ttft.p50, turn.ttft.p99, turn.tpot.p50)
        table.add_row(
            name,
            f"{turn.ok:,} of {turn.requests:,}",
            shown(turn.prompt_tokens, ",.0f"),
            shown(turn.cached_tokens, ",.0f"),
            f"{turn.shortened:,}",
            *(several(time_s, unit="ms", factor=1e3) for time_s in times),
        )
    return table


def _score_table(summary: LoadSummary) -> Table:
    table = Table(title="answers")
    table.add_column("task")
    table.add_column("right", justify="right")
    table.add_column("judged", justify="right")
    table.add_column("share", justify="right")
    rows = dict(summary.scores)
    if len(rows) > 1:
        rows["all"] = (sum(r for r, _ in rows.values()), sum(j for _, j in rows.values()))
    for task, (right, judged) in rows.items():
        table.add_row(task, str(right), str(judged), f"{right / judged:.1%}")
    return table
