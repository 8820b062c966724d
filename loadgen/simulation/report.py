"""What `simulate` says of its runs: a table with a column a policy, and the raw figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.report.figures import figures, for_json, milliseconds, several, shown
from loadgen.simulation.capacity import Probe, SimCapacity
from loadgen.simulation.loads import SimLoad
from quadriga.sim.results import RunSummary, SimulatedRun, Slo, Spread

COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class SimOutcome:
    """One run.

    Attributes:
        ended: `complete`, or why the run was broken off.
        wall_s: What the simulation took.
    """

    policy: str
    run: SimulatedRun
    summary: RunSummary
    ended: str
    wall_s: float


Cell = Callable[[SimOutcome], str]


def print_outcomes(console: Console, outcomes: Sequence[SimOutcome], slo: Slo, title: str) -> None:
    """Print the table, and what the reasons of failures mean."""
    table = Table(title=title, caption=_caption(outcomes[0].summary), caption_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.policy, justify="right")
    for section in _sections(outcomes, slo):
        table.add_section()
        for name, cell in section:
            table.add_row(name, *(cell(outcome) for outcome in outcomes))
    console.print(table)
    examples: dict[str, str] = {}
    for outcome in outcomes:
        examples = {**outcome.run.examples, **examples}
    for reason in _reasons(outcomes):
        console.print(
            f"failed, {reason}: {examples.get(reason, '')}", markup=False, highlight=False
        )


def _caption(summary: RunSummary) -> str:
    if not np.isfinite(summary.rate):
        return "All requests arrive at once: there is no time in which they arrive."
    return (
        f"“while requests arrive”: in {summary.window.span_s:,.0f} s; what ends later does not "
        "count. “until the last ended”: all. docs/simulator.md explains every row."
    )


def _sections(outcomes: Sequence[SimOutcome], slo: Slo) -> list[list[tuple[str, Cell]]]:
    return [
        [
            ("finished while requests arrive", lambda o: _per_s(o.summary.window.finished)),
            ("  good ones", lambda o: _per_s(o.summary.window.good)),
            ("  output tokens", lambda o: _per_s(o.summary.window.tokens, ",.0f")),
            ("finished until the last ended", lambda o: _per_s(o.summary.makespan.finished)),
            ("  good ones", lambda o: _per_s(o.summary.makespan.good)),
            ("  output tokens", lambda o: _per_s(o.summary.makespan.tokens, ",.0f")),
            (
                "  time until then",
                lambda o: several(o.summary.makespan.span_s, form=",.0f", unit="s"),
            ),
            (
                f"good: TTFT ≤ {slo.ttft_s:g} s and TPOT ≤ {1e3 * slo.tpot_s:.1f} ms",
                lambda o: f"{shown(o.summary.good_share, '.1%')} of all",
            ),
        ],
        [
            ("TTFT (first token), P50 / P99 / max", lambda o: _seconds(o.summary.ttft)),
            ("  of it in the prefill queue", lambda o: _seconds(o.summary.prefill_wait)),
            ("TPOT (a token), P50 / P99 / max", lambda o: _ms(o.summary.tpot)),
            ("gap between tokens, P50 / P99 / max", lambda o: _ms(o.summary.gap)),
            ("waited for decode room", lambda o: f"{o.summary.room_wait.count:,} requests"),
            ("  for so long, P50 / P99 / max", lambda o: _seconds(o.summary.room_wait)),
        ],
        [
            ("prefill replicas busy", lambda o: shown(o.summary.prefill_busy_share, ".0%")),
            (
                "  stopped for want of decode room",
                lambda o: shown(o.summary.prefill_blocked_share, ".0%"),
            ),
            ("KV memory in use, mean / fullest", _memory),
            ("  wanted, with those that wait", lambda o: shown(o.summary.most_wanted, ".0%")),
            ("preempted for want of memory", lambda o: f"{o.summary.num_full:,} times"),
            ("  lowered tokens, within budgets", lambda o: f"{o.run.num_lowered:,.0f}"),
            (
                "variance of step times",
                lambda o: several(o.summary.variance_ms2, form=",.3f", unit="ms²"),
            ),
            ("migrations", _migrations),
            ("  pause of the sequence, P50 / P99 / max", lambda o: _ms(o.summary.stall)),
            ("shallow and deep sequences apart", _apart),
        ],
        [
            ("failed", lambda o: f"{o.summary.num_failed:,} of {o.summary.num_requests:,}"),
            *((f"  {reason}", _failed_for(reason)) for reason in _reasons(outcomes)),
            ("simulated time / time taken", lambda o: f"{o.run.end_s:,.0f} s / {o.wall_s:,.1f} s"),
        ],
    ]


def _reasons(outcomes: Sequence[SimOutcome]) -> list[str]:
    return sorted({reason for outcome in outcomes for reason in outcome.summary.failures})


def _failed_for(reason: str) -> Cell:
    return lambda outcome: f"{outcome.summary.failures.get(reason, 0):,}"


def _per_s(value: float, form: str = ",.3f") -> str:
    return several(value, form=form, unit="/s")


def _seconds(spread: Spread) -> str:
    return several(spread.p50_s, spread.p99_s, spread.max_s, unit="s")


def _ms(spread: Spread) -> str:
    return milliseconds(spread.p50_s, spread.p99_s, spread.max_s)


def _memory(outcome: SimOutcome) -> str:
    summary = outcome.summary
    return f"{shown(summary.mean_used, '.0%')} / {shown(summary.most_used, '.0%')}"


def _migrations(outcome: SimOutcome) -> str:
    cancelled = outcome.run.num_cancelled
    return f"{outcome.summary.num_migrations:,}" + (
        f", {cancelled:,} given up" if cancelled else ""
    )


def _apart(outcome: SimOutcome) -> str:
    gains = outcome.run.depth_gains
    if not gains:
        return "no choice"
    share = outcome.run.num_ticks_apart / len(gains)
    return f"{share:.0%} of the time, {sum(gains) / len(gains):.1%} of a token's time forecast"


def headline(outcome: SimOutcome) -> dict[str, Any]:
    """Return the few figures that a run stands for."""
    summary = outcome.summary
    return {
        "wall_s": round(outcome.wall_s, 3),
        "goodput": for_json(summary.window.good),
        "makespan_goodput": for_json(summary.makespan.good),
        "good_share": for_json(summary.good_share),
        "p99_tpot_s": for_json(summary.tpot.p99_s),
        "lowered_tokens": round(outcome.run.num_lowered),
    }


def raw(outcome: SimOutcome, load: SimLoad, config: dict[str, Any]) -> dict[str, Any]:
    """Return all that a run's figures derive from: times of each request, samples, moves."""

    def column(values: Any) -> list[float | None]:
        return [None if np.isnan(v) else round(v, 6) for v in values.tolist()]

    run = outcome.run
    return {
        "ended": outcome.ended,
        "config": config,
        "summary": figures(asdict(outcome.summary)),
        "arrival_s": column(load.arrivals_s),
        "input_tokens": load.input_tokens.tolist(),
        "output_tokens": load.output_tokens.tolist(),
        "first_token_s": column(run.first_token_s),
        "finished_s": column(run.finished_s),
        "prefill_wait_s": column(run.prefill_wait_s),
        "room_wait_s": column(run.room_wait_s),
        "preempted": run.preempted.tolist(),
        "num_lowered": round(run.num_lowered, 1),
        "failures": run.failures,
        "failure_examples": run.examples,
        "samples": [asdict(s) for s in run.samples],
        "migrations": [asdict(m) for m in run.migrations],
    }


# The search for the largest rate


def probe_line(policy: str, probe: Probe) -> str:
    """Return a simulation of the search in one line, for following it."""
    good = "too few" if probe.good_share is None else f"{probe.good_share:.2%}"
    verdict = "enough" if probe.is_kept else "not enough"
    return f"{policy}: {probe.rate:.4g}/s ({_times(probe.factor)}): {good} good, {verdict}"


def conclusion(policy: str, found: SimCapacity, share: float) -> str:
    """Return in a sentence the largest rate at which enough requests are good."""
    what = f"{100 * share:g} % of the requests are good"
    if found.kept is None:
        assert found.broken is not None
        failures = ", ".join(f"{r} {n:,}" for r, n in sorted(found.broken.failures.items()))
        because = f"; failed: {failures}" if failures else ""
        if found.is_at_limit:
            because += "; slower ones hold too few requests, or last too long, to be simulated"
        return (
            f"{policy}: even at {found.broken.rate:.4g}/s ({_times(found.broken.factor)}) fewer "
            f"than {what}{because}"
        )
    kept = f"{found.kept.rate:.4g}/s ({_times(found.kept.factor)})"
    if found.broken is None:
        tried = "can be simulated" if found.is_at_limit else "was tried"
        return f"{policy}: {what} up to {kept}, as far as {tried}"
    return f"{policy}: {what} up to {kept}, and no longer at {found.broken.rate:.4g}/s"


def _times(factor: float) -> str:
    return f"{factor:.3g} times the rate given"
