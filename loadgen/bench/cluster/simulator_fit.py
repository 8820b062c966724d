"""From what a real run shows to what the simulator must be told: its cost profile and delays.

    step, prefill pass   the replicas' own counters, second by second: time of the steps, sequences
                         and tokens in them; least squares
    hand-off             the prefill replicas' histogram of first token → acknowledged commit
    a move               the reports of the moves that were made
    ingress              TTFT as the client saw it, less that of a simulation without it

Every fit takes one run's data; another run is there to check it.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.bench.cluster.paced_cluster import Page, Played
from loadgen.bench.cluster.rescheduling_report import decoding, step_variances
from loadgen.bench.profile import Fit, fit
from loadgen.checker import Outcome
from loadgen.report.metrics import ttft_s
from loadgen.simulation.loads import SimLoad
from quadriga.config.pacing import PaceProfile
from quadriga.errors import ConfigError
from quadriga.sim.profiles import CostProfile, Delays

COUNTERS = (
    "quadriga_engine_steps_total",
    "quadriga_engine_busy_seconds_total",
    "quadriga_engine_batched_sequences_total",
    "quadriga_engine_batched_tokens_total",
)
HANDOFF = "quadriga_handoff_seconds"
MIN_STEPS = 5
"""Of a window: single steps say little, and the busier the replica the more windows it gives."""
MIN_WINDOWS = 8
NUM_QUANTILES = 41
LEAST_DELAY_S = 1e-3
LEAST_FACTOR = 0.1
HOST_BANDWIDTH_BYTES_PER_S = 5e9
_BUCKET = re.compile(rf'^{HANDOFF}_bucket\{{.*le="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Window:
    """What one replica did between two pushes of its counters, steps enough apart."""

    steps: float
    busy_s: float
    sequences: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What was fitted, and how well.

    Attributes:
        profile: Of the decode and prefill replicas, and of a move.
        delays: `ingress_s` is 0 until `with_ingress`.
        step, prefill: Mean of |fitted / measured − 1| over the windows.
        measured_ms2: What measuring adds to the variance between the replicas' step times.
        num_moves: Moves whose reports were used; without any, a move costs what a hand-off does.
    """

    profile: CostProfile
    delays: Delays
    step: Fit
    prefill: Fit
    measured_ms2: float
    num_windows: int
    num_moves: int


def load_of(played: Played) -> SimLoad:
    """The load as it was really sent: times of sending, and true lengths.

    Raises:
        ConfigError: A response failed its check: there is nothing to compare.
    """
    records = sorted(played.result.records, key=lambda r: r.sent_s)
    for record in records:
        if record.verdict.outcome is not Outcome.OK:
            faults = "; ".join(map(str, record.verdict.faults[:3])) or "it was refused"
            raise ConfigError(f"request {record.spec.index} did not pass: {faults}")
    first_s = records[0].sent_s
    return SimLoad(
        "real",
        np.array([r.sent_s - first_s for r in records]),
        np.array([r.verdict.prompt_tokens or 0 for r in records], dtype=np.int64),
        np.array([r.verdict.choices[0].num_tokens for r in records], dtype=np.int64),
    )


def windows(pages: Sequence[Page], replicas: frozenset[str]) -> list[Window]:
    """What these replicas did, from a push of their counters to a later one."""
    found = []
    for replica in sorted(replicas):
        names = [f'{name}{{replica="{replica}"}}' for name in COUNTERS]
        totals = [
            np.array([page.series[name] for name in names])
            for page in pages
            if all(name in page.series for name in names)
        ]
        if not totals:
            continue
        before = totals[0]
        for after in totals[1:]:
            window = Window(*(after - before).tolist())
            if window.steps >= MIN_STEPS:
                found.append(window)
                before = after
    return found


def replicas_of(views: Sequence[dict[str, Any]], role: str) -> frozenset[str]:
    """Names of the replicas of a role."""
    return frozenset(r["name"] for view in views for r in view["replicas"] if r["role"] == role)


def fit_step(found: Sequence[Window]) -> Fit:
    """Seconds of a decode step: (base, per sequence, per KV token)."""
    _require(found, "decode")
    terms = np.array([(w.steps, w.sequences, w.tokens) for w in found])
    return fit(terms, np.array([w.busy_s for w in found]))


def fit_prefill(found: Sequence[Window]) -> Fit:
    """Seconds of a prefill pass: (base, per token)."""
    _require(found, "prefill")
    terms = np.array([(w.steps, w.tokens) for w in found])
    return fit(terms, np.array([w.busy_s for w in found]))


def _require(found: Sequence[Window], role: str) -> None:
    if len(found) < MIN_WINDOWS:
        raise ConfigError(
            f"{len(found)} times {MIN_STEPS} {role} steps were seen, {MIN_WINDOWS} are needed: "
            "give a longer --duration-s or higher --rates",
            param="duration-s",
        )


def handoff_quantiles(first: Page, last: Page) -> tuple[tuple[float, ...], float]:
    """Hand-offs between two pages: evenly spaced quantiles, and their exact mean, seconds.

    Raises: ConfigError: There were none.
    """
    counts: dict[float, float] = {}
    for page, sign in ((first, -1.0), (last, 1.0)):
        for series, value in page.series.items():
            if match := _BUCKET.match(series):
                edge = float(match[1].replace("+Inf", "inf"))
                counts[edge] = counts.get(edge, 0.0) + sign * value
    total = max(counts.values(), default=0.0)
    if total < 1.0:
        raise ConfigError("no hand-off was counted: the load has no answer of two tokens")
    seconds = _sum(last, f"{HANDOFF}_sum") - _sum(first, f"{HANDOFF}_sum")
    edges = sorted(edge for edge in counts if np.isfinite(edge))
    shares = [counts[edge] / total for edge in edges]
    used = 1 + next((i for i, share in enumerate(shares) if share >= 1.0), len(edges) - 1)
    at = np.linspace(0.0, 1.0, NUM_QUANTILES)
    values = np.interp(at, [0.0, *shares[:used]], [0.0, *edges[:used]])
    mean = seconds / total
    values *= mean / float(np.trapezoid(values, at))  # the buckets are wide, the sum is exact
    return tuple(values.tolist()), mean


def _sum(page: Page, name: str) -> float:
    return sum(v for series, v in page.series.items() if series.split("{")[0] == name)


def until_boundary(
    quantiles: Sequence[float], mean_step_s: float, busy_share: float
) -> tuple[float, ...]:
    """Take out the wait for the end of the running step: the simulator makes that itself.

    Mean and variance of a uniform wait are taken from the distribution's; its form stays.

    Args:
        busy_share: Of the time that a step is running.
    """
    values = np.asarray(quantiles)
    mean, variance = float(values.mean()), float(values.var())
    wait_s = 0.5 * mean_step_s * busy_share
    wait_variance = busy_share * mean_step_s**2 / 3.0 - wait_s**2
    narrower = math.sqrt(max(0.0, 1.0 - wait_variance / variance)) if variance else 0.0
    rest = mean - wait_s + narrower * (values - mean)
    return tuple(np.maximum(rest, LEAST_DELAY_S).tolist())


def moves_of(views: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reports of the moves that were made."""
    recent = views[-1]["recent"] if views else []
    reports = [m["report"] for m in recent if m["report"] is not None]
    return [r for r in reports if r["outcome"] == "moved"]


def bandwidth_of(moves: Sequence[dict[str, Any]]) -> float | None:
    """Bytes per second at which sequences were copied while they ran; None without a move."""
    rates = [m["bytes_sent"] / max(m["took_s"] - m["stall_s"], LEAST_DELAY_S) for m in moves]
    return statistics.median(rates) if rates else None


def by_load_ms2(views: Sequence[dict[str, Any]], step: PaceProfile) -> list[float]:
    """Variance between the replicas' step times, by what their batches hold, in each view with
    any at work."""
    return [
        float(np.var([1e3 * step.step_s(r["num_running"], r["used_tokens"]) for r in replicas]))
        for replicas in map(decoding, views)
        if any(r["num_running"] for r in replicas)
    ]


def measured_ms2(views: Sequence[dict[str, Any]], step: PaceProfile) -> float:
    """What the replicas' own measuring adds to that variance: noise, and a mean's inertia."""
    reported, by_load = step_variances(views), by_load_ms2(views, step)
    return float(np.mean(reported) - np.mean(by_load)) if reported and by_load else 0.0


def said_s(window: Window, step: PaceProfile) -> float:
    """What a step model says of a window's steps."""
    by_batch = step.per_sequence_s * window.sequences + step.per_token_s * window.tokens
    return step.base_s * window.steps + by_batch


def step_factors(found: Sequence[Window], step: PaceProfile) -> tuple[float, ...]:
    """What the steps of a second took over what the model says: evenly spaced quantiles."""
    values = [max(LEAST_FACTOR, w.busy_s / said_s(w, step)) for w in found]
    return tuple(np.quantile(values, np.linspace(0.0, 1.0, NUM_QUANTILES)).tolist())


def fitted_over_real(played: Played, step: PaceProfile) -> float:
    """What a step model says of all decode steps of a run, over what they took."""
    found = windows(played.pages, replicas_of(played.views, "decode"))
    real_s = sum(w.busy_s for w in found)
    return sum(said_s(w, step) for w in found) / real_s if found else float("nan")


def fit_costs(
    played: Played, *, kv_bytes_per_token: int, prefill_budget_tokens: int, max_tokens: int
) -> Costs:
    """Fit all that one run shows but the ingress. Raises: ConfigError: Too little was seen."""
    views, pages = played.views, played.pages
    decode = windows(pages, replicas_of(views, "decode"))
    step, prefill = fit_step(decode), fit_prefill(windows(pages, replicas_of(views, "prefill")))
    base_s, per_sequence_s, per_kv_s = step.coefficients
    pace = PaceProfile("fitted", base_s, per_sequence_s, per_kv_s, "a run of this cluster")
    mean_step_s = sum(w.busy_s for w in decode) / sum(w.steps for w in decode)
    num_replicas = len(replicas_of(views, "decode"))
    lasted_s = pages[-1].at_s - pages[0].at_s
    busy_share = min(1.0, sum(w.busy_s for w in decode) / (num_replicas * lasted_s))
    handoffs, mean_s = handoff_quantiles(pages[0], pages[-1])
    handoffs = until_boundary(handoffs, mean_step_s, busy_share)
    moves = moves_of(views)
    stall_s = statistics.median([m["stall_s"] for m in moves]) if moves else mean_s
    pass_s, per_token_s = prefill.coefficients
    one = next(r for r in views[-1]["replicas"] if r["role"] == "decode")
    profile = CostProfile(
        step=pace,
        prefill_base_s=pass_s,
        prefill_per_token_s=max(per_token_s, 1e-7),
        prefill_per_pair_s=0.0,
        prefill_budget_tokens=prefill_budget_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_capacity_tokens=one["kv_capacity_tokens"],
        num_slots=one["num_slots"],
        max_tokens=max_tokens,
        bandwidth_bytes_per_s=bandwidth_of(moves) or views[-1]["bandwidth_bytes_per_s"],
        round_trip_s=max(LEAST_DELAY_S, stall_s - 0.5 * mean_step_s),
        host_bandwidth_bytes_per_s=HOST_BANDWIDTH_BYTES_PER_S,
    )
    measured = measured_ms2(views, pace)
    delays = Delays(handoff_s=handoffs, step_factor=step_factors(decode, pace))
    return Costs(profile, delays, step, prefill, measured, len(decode), len(moves))


def with_ingress(costs: Costs, real_ttft_s: NDArray[np.float64], bare_ttft_s: Any) -> Costs:
    """Add what lies between the client and the prefill queue.

    Args:
        real_ttft_s: As the client saw it, [num_requests].
        bare_ttft_s: The same requests, simulated without it.
    """
    rest = np.maximum(np.asarray(real_ttft_s) - np.asarray(bare_ttft_s), 0.0)
    quantiles = np.quantile(rest, np.linspace(0.0, 1.0, NUM_QUANTILES))
    return replace(costs, delays=replace(costs.delays, ingress_s=tuple(quantiles.tolist())))


def ttfts_of(played: Played) -> NDArray[np.float64]:
    """TTFT by request, in the order of sending."""
    records = sorted(played.result.records, key=lambda r: r.sent_s)
    return np.array([ttft_s(r) or np.nan for r in records])
