"""Figures of `bench rescheduling`: by policy, over all its runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.report.experiment import show
from loadgen.report.metrics import LoadSummary

TABLE_WIDTH = 150


@dataclass(slots=True)
class PolicyRun:
    """One policy's run.

    Attributes:
        tpot_s, long_tpot_s: Of the requests that passed; the second of longer answers only.
        step_variance_ms2: Between the replicas' step times, at each sample.
        texts: By request, for comparison between runs.
        view: What the scheduler says at the end.
    """

    policy: str
    summary: LoadSummary
    tpot_s: list[float]
    long_tpot_s: list[float]
    step_variance_ms2: list[float]
    texts: dict[int, str]
    view: dict[str, Any]
    num_paused: int

    @property
    def outcomes(self) -> dict[str, int]:
        return dict(self.view.get("outcomes", {}))


def step_variances(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Variance between the running replicas' step times at each sample, ms²; two of them at
    least."""
    found = []
    for sample in samples:
        steps_ms = [1e3 * r["step_s"] for r in decoding(sample) if r["num_running"]]
        if len(steps_ms) > 1:
            found.append(float(np.var(steps_ms)))
    return found


def decoding(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [r for r in sample["replicas"] if r["role"] != "prefill"]


def count_differences(runs: Sequence[PolicyRun]) -> int:
    """Requests whose answers are not the same in all runs that passed them."""
    indices = {index for r in runs for index in r.texts}
    return sum(len({r.texts[index] for r in runs if index in r.texts}) > 1 for index in indices)


def figures(runs: Sequence[PolicyRun]) -> dict[str, Any]:
    """Figures of a policy over its runs, taken together; P99 also by run."""
    tpots = [t for r in runs for t in r.tpot_s]
    long = [t for r in runs for t in r.long_tpot_s]
    variances = [v for r in runs for v in r.step_variance_ms2]
    outcomes: dict[str, int] = {}
    for r in runs:
        for outcome, count in r.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    moves = [m for r in runs for m in r.view.get("recent", []) if m["report"] is not None]
    stalls = [m["report"]["stall_s"] for m in moves if m["report"]["outcome"] == "moved"]
    return {
        "ok": sum(r.summary.ok for r in runs),
        "failed": sum(r.summary.failed for r in runs),
        "refused": sum(r.summary.refused for r in runs),
        "tpot_p50_ms": _ms(tpots, 50),
        "tpot_p99_ms": _ms(tpots, 99),
        "tpot_p99_ms_by_run": [_ms(r.tpot_s, 99) for r in runs],
        "long_tpot_p99_ms": _ms(long, 99),
        "ttft_p99_ms": [round(1e3 * (r.summary.ttft.p99 or 0.0), 1) for r in runs],
        "longest_gap_ms": [round(1e3 * (r.summary.itl.max or 0.0), 1) for r in runs],
        "good_share": round(statistics.mean(r.summary.good_share or 0.0 for r in runs), 4),
        "tokens_per_s": round(statistics.mean(r.summary.output_tokens_per_s for r in runs), 1),
        "step_variance_ms2": round(statistics.mean(variances), 3) if variances else None,
        "most_paused": max((r.num_paused for r in runs), default=0),
        "moves": outcomes,
        "move_stall_p50_ms": _ms(stalls, 50),
    }


def _ms(seconds: Sequence[float], percentile: float) -> float | None:
    return round(1e3 * float(np.percentile(seconds, percentile)), 2) if seconds else None


def headline(results: dict[str, dict[str, Any]], policies: Sequence[str]) -> dict[str, Any]:
    """The last policy against the first."""
    base, ours = results[policies[0]], results[policies[-1]]

    def reduction(name: str) -> float | None:
        before, after = base[name], ours[name]
        return None if not before or after is None else round(1.0 - float(after / before), 4)

    good, before = ours["good_share"], base["good_share"]
    return {
        "goodput_ratio": round(good / before, 4) if before else None,
        "p99_tpot_reduction": reduction("tpot_p99_ms"),
        "p99_long_tpot_reduction": reduction("long_tpot_p99_ms"),
        "step_variance_reduction": reduction("step_variance_ms2"),
        "moved": ours["moves"].get("moved", 0),
        "failed_requests": sum(r["failed"] + r["refused"] for r in results.values()),
    }


def print_table(results: dict[str, dict[str, Any]], different: int) -> None:
    """Print a line for each policy."""

    def moves(policy: str) -> str:
        counted = sorted(results[policy]["moves"].items())
        return ", ".join(f"{n} {outcome}" for outcome, n in counted) or "–"

    names = (
        "good_share",
        "tpot_p50_ms",
        "tpot_p99_ms",
        "long_tpot_p99_ms",
        "step_variance_ms2",
        "tokens_per_s",
    )
    columns: dict[str, Callable[[str], object]] = {"policy": lambda policy: policy}
    for name in (*names, "ok", "failed", "refused", "most_paused"):
        columns[name] = lambda policy, name=name: results[policy][name]  # type: ignore[misc]
    title = "1 prefill and paced decode replicas; all runs of a policy together"
    show(results, columns | {"moves": moves}, title=title, left=("moves",), width=TABLE_WIDTH)
    print(f"answers that differ between runs: {different}")


def raw(done: PolicyRun) -> dict[str, Any]:
    return {
        "policy": done.policy,
        "summary": done.summary.as_dict(),
        "tpot_s": done.tpot_s,
        "step_variance_ms2": done.step_variance_ms2,
        "recent": done.view.get("recent", []),
        "outcomes": done.outcomes,
        "lengths": done.view.get("lengths", {}),
        "texts": done.texts,
    }
