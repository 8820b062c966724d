"""The simulations of `paper ares`: what varies in each figure, and how one is run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.load.lengths import WORKLOADS
from loadgen.load.traces import read_trace
from loadgen.simulation.loads import (
    SimLoad,
    make_simulation,
    standard_slo,
    summary_of,
    synthetic_load,
    trace_load,
)
from quadriga.errors import ConfigError
from quadriga.policies.ares.settings import AresSettings
from quadriga.sim.config import SimConfig
from quadriga.sim.policies import POLICY_NAMES
from quadriga.sim.profiles import find_profile
from quadriga.sim.records import PAUSE, RECOMPUTE, VLLM, VLLM_CACHED
from quadriga.sim.results import RunSummary, Slo

ARITHMETIC = "hardware"
"""The part that runs nothing: the report makes it from the profiles."""
SHAREGPT_RATES = (0.10, 0.13, 0.15, 0.17, 0.19, 0.21, 0.23, 0.26)
ALPACA_RATES = (0.10, 0.13, 0.15, 0.17, 0.19, 0.21, 0.23)
PAPER_RATE = 0.17
"""ShareGPT, as printed. Alpaca's 1.7/s would be 14,600 output tokens/s, ten times what three such
devices can make; 0.17 is taken."""
SIZE_RATE = 0.3 / 8
"""Requests/s for each simulated replica, of which 3 in 4 decode (§6.4)."""
SIZES = (8, 16, 32, 64, 128)
BANDWIDTHS_GBIT = (1.0, 5.0, 10.0, 25.0, 100.0)
SATURATED_RATES = (0.19, 0.20)
"""ShareGPT: where three such devices are nearly full."""
OWN_RATES = (0.10, 0.15, *SATURATED_RATES)
LOCK_STEP_RATES = (0.15, 0.19)
"""On 3 replicas; the part has as much for each of `LOCK_STEP_RANKS`."""
LOCK_STEP_RANKS = 8
OVERLOAD = 1.4
"""Times what a cluster carries: the rate that fills its KV memory, see `fitting_rate`."""
BELOW = {3: (0.5, 0.65, 0.8, 0.9, 0.95), 12: (0.8, 0.95), 64: (0.95,)}
"""Times what a cluster carries, where nothing should be lost, by its decode replicas. The larger it
is the less a load varies."""
OVERLOAD_SIZES = tuple(BELOW)
DURATION_S = {"overload": 2000.0, "below": 2000.0, "sizes": 2000.0}
"""Of arrivals, by part; of the others `LONG_S`."""
LONG_S = 4000.0
QUICK_S = {"vllm": 2000.0, "own": 2000.0, "lockstep": 2000.0, "overload": 1500.0, "below": 1200.0}
"""The same with `--quick`; of the others `SHORT_S`. Where memory has to be full first, a shorter
run shows nothing."""
SHORT_S = 1000.0
LARGE = 64
"""Decode replicas, from which one load is as good as several of fewer: `--seeds` asks for more."""
LENGTHS = ("sharegpt", "reasoning", "translation")
"""The paper's, and two of one hump. Seed 0 of `reasoning` was looked at while the rules of overload
were chosen, its others and `translation` were not."""
COMPARED = tuple(name for name in POLICY_NAMES if name != "ares-mixed")
"""Without exits that one decides as `ares` does."""
STATIC = ("round_robin", "current_load", "least_requests", "least_work")
"""Placements that move nothing: what ARES is measured against."""
TTFT_GRID_S = (1.0, 5.0, 10.0)
TPOT_GRID = (1.1, 1.2, 1.35, 1.5, 2.0)
_GBIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class SimPoint:
    """One simulation: what varies, before it is run.

    Attributes:
        part: Figure it belongs to.
        x: Value on that figure's axis.
        grid: SLOs to judge the run by, besides the standard one.
    """

    part: str
    x: float | str
    workload: str
    rate: float
    policy: str
    config: SimConfig
    duration_s: float
    warm_up_s: float
    settings: AresSettings = field(default_factory=AresSettings)
    trace: Path | None = None
    grid: tuple[Slo, ...] = ()


@dataclass(frozen=True, slots=True)
class PointResult:
    """A point and its figures; `series` is (times, variance in ms²)."""

    point: SimPoint
    summary: RunSummary
    grid_goodput: tuple[float, ...]
    series: tuple[list[float], list[float]]
    wall_s: float


def run_point(point: SimPoint) -> PointResult:
    """Simulate one point. Raises: ConfigError where no request would be counted."""
    started_s = time.perf_counter()
    load = _load(point)
    if not ((load.arrivals_s >= point.warm_up_s) & (load.arrivals_s < point.duration_s)).any():
        span = f"--warm-up-s {point.warm_up_s:g} and --duration-s {point.duration_s:g}"
        raise ConfigError(f"{load.name}: no request arrives between {span}", param="warm-up-s")
    result = make_simulation(point.policy, load, point.config, settings=point.settings).run()
    window = {"from_s": point.warm_up_s, "to_s": point.duration_s}
    samples = [s for s in result.samples if s.at_s <= point.duration_s]
    return PointResult(
        point=point,
        summary=summary_of(result, load, standard_slo(point.config), **window),
        grid_goodput=tuple(summary_of(result, load, s, **window).window.good for s in point.grid),
        series=([s.at_s for s in samples], [round(s.variance_ms2, 4) for s in samples]),
        wall_s=time.perf_counter() - started_s,
    )


def _load(point: SimPoint) -> SimLoad:
    seed = point.config.seed
    if point.trace is None:
        return synthetic_load(
            point.workload, rate=point.rate, duration_s=point.duration_s, seed=seed
        )
    trace = read_trace(point.trace)
    if trace.arrivals_s is None:
        load = trace_load(trace, arrivals=f"poisson:{point.rate!r}", scale=1.0, seed=seed)
    else:
        load = trace_load(trace, arrivals="trace", scale=1.0, seed=seed)
        if not load.rate > 0.0:
            raise ConfigError(
                f"--trace: {load.name}: all rows arrive at once, so there is no rate to change",
                param="trace",
            )
        load = load.faster(point.rate / load.rate)
    mine = load.arrivals_s <= point.duration_s
    return SimLoad(
        load.name, load.arrivals_s[mine], load.input_tokens[mine], load.output_tokens[mine]
    )


# The points of each figure


def _base(args: argparse.Namespace) -> SimConfig:
    profile = find_profile(args.profile)
    return SimConfig(profile, num_decode=3, num_prefill=1, memory=RECOMPUTE)  # as the paper's


def _duration_s(args: argparse.Namespace, part: str) -> float:
    part = part.split(",")[0]
    usual_s = QUICK_S.get(part, SHORT_S) if args.quick else DURATION_S.get(part, LONG_S)
    return float(args.duration_s or usual_s)


def _seeds(args: argparse.Namespace, num_decode: int = 0) -> range:
    return range(args.seeds or (1 if args.quick or num_decode >= LARGE else 3))


def _point(args: argparse.Namespace, part: str, x: float | str, **fields: Any) -> SimPoint:
    values: dict[str, Any] = {
        "workload": "sharegpt",
        "rate": PAPER_RATE,
        "config": _base(args),
        "duration_s": _duration_s(args, part),
        "warm_up_s": args.warm_up_s,
    }
    return SimPoint(part, x, **{**values, **fields})


def _unrefusing(args: argparse.Namespace) -> list[str]:
    """The policies to compare where nothing is refused."""
    return [p for p in args.policy if p != "shedding"]


def _at_rates(
    args: argparse.Namespace,
    part: str,
    rates: Sequence[float],
    config: SimConfig,
    scale: float = 1.0,
    **fields: Any,
) -> list[SimPoint]:
    """Points of all policies that refuse nothing; `scale` times as much arrives as x says."""
    return [
        _point(
            args,
            part,
            rate,
            rate=scale * rate,
            policy=policy,
            config=replace(config, seed=seed),
            **fields,
        )
        for rate in rates
        for seed in _seeds(args)
        for policy in _unrefusing(args)
    ]


def _vllm(args: argparse.Namespace) -> list[SimPoint]:
    """The paper's set-up near saturation: what its engine does with a full memory."""
    return [
        point
        for part, memory in (("vllm", VLLM), ("vllm, prefix caching", VLLM_CACHED))
        for point in _at_rates(args, part, SATURATED_RATES, replace(_base(args), memory=memory))
    ]


def _own(args: argparse.Namespace) -> list[SimPoint]:
    """The same loads, and lighter ones, on replicas that pause, as a service's do."""
    return _at_rates(args, "own", OWN_RATES, replace(_base(args), memory=PAUSE))


def _lock_step(args: argparse.Namespace) -> list[SimPoint]:
    """Ranks of data-parallel attention: each step takes as long as the slowest one's."""
    ranks = LOCK_STEP_RANKS
    config = replace(
        _base(args), num_decode=ranks, num_prefill=ranks // 3, memory=PAUSE, lock_step=True
    )
    return _at_rates(args, "lockstep", LOCK_STEP_RATES, config, ranks / 3)


def _overload(args: argparse.Namespace) -> list[SimPoint]:
    """More than the cluster carries, with the paper's lengths and with two that differ."""
    return [
        point
        for workload in LENGTHS
        for size in OVERLOAD_SIZES
        for point in _loaded(
            args,
            _named("overload", workload),
            size,
            workload,
            size,
            OVERLOAD,
            [p for p in args.policy if p in (*STATIC, "shedding", "ares")],
        )
    ]


def _below(args: argparse.Namespace) -> list[SimPoint]:
    """Less than the cluster carries: the same lengths and sizes."""
    return [
        point
        for workload in LENGTHS
        for size in OVERLOAD_SIZES
        for load in BELOW[size]
        for point in _loaded(
            args,
            _named(f"below, {size}", workload),
            load,
            workload,
            size,
            load,
            [p for p in args.policy if p in (*STATIC, "ares")],
        )
    ]


def _named(part: str, workload: str) -> str:
    return part if workload == LENGTHS[0] else f"{part}, {workload}"


def _loaded(
    args: argparse.Namespace,
    part: str,
    x: float,
    workload: str,
    size: int,
    load: float,
    policies: list[str],
) -> list[SimPoint]:
    """Points at so many times the rate that fills the memory of decode replicas that pause."""
    config = replace(_base(args), memory=PAUSE, num_decode=size, num_prefill=max(1, size // 3))
    lengths = WORKLOADS[workload].draw(20_000, seed=0)
    return [
        _point(
            args,
            part,
            x,
            workload=workload,
            policy=policy,
            rate=load * fitting_rate(config, *lengths, share=1.0),
            config=replace(config, seed=seed),
        )
        for seed in _seeds(args, size)
        for policy in policies
    ]


def _rates(args: argparse.Namespace) -> list[SimPoint]:
    base = _base(args)
    step_s = base.profile.half_memory_step_s
    grid = tuple(Slo(ttft, f * step_s) for ttft in TTFT_GRID_S for f in TPOT_GRID)
    return [
        point
        for workload, rates in (("sharegpt", SHAREGPT_RATES), ("alpaca", ALPACA_RATES))
        for point in _at_rates(args, workload, rates, base, workload=workload, grid=grid)
    ]


def _bandwidth(args: argparse.Namespace) -> list[SimPoint]:
    policies = [p for p in args.policy if p in ("reschedule", "ares", "oracle")]
    return [
        _point(
            args,
            "bandwidth" if precopy else "bandwidth, stop and copy",
            gbit,
            policy=policy,
            config=replace(
                _base(args), seed=seed, bandwidth_bytes_per_s=gbit * _GBIT, precopy=precopy
            ),
        )
        for gbit in BANDWIDTHS_GBIT
        for precopy in (True, False)
        for policy in policies
        for seed in _seeds(args)
    ]


def _sizes(args: argparse.Namespace) -> list[SimPoint]:
    return [
        _point(
            args,
            "sizes",
            size,
            rate=SIZE_RATE * size,
            policy=policy,
            config=replace(_base(args), seed=seed, num_decode=3 * size // 4, num_prefill=size // 4),
        )
        for size in SIZES
        for seed in _seeds(args, 3 * size // 4)
        for policy in _unrefusing(args)
    ]


def _settings(args: argparse.Namespace) -> list[SimPoint]:
    """The sweep of what the paper leaves open: θ, and how β falls."""
    thetas, decays = (0.05, 0.15, 0.3), (0.6, 0.8, 0.95)
    return [
        _point(
            args,
            "settings",
            f"θ {theta:g}, decay {decay:g}",
            policy="ares",
            config=replace(_base(args), seed=seed),
            settings=AresSettings(theta=theta, decay=decay),
        )
        for theta in thetas
        for decay in decays
        for seed in _seeds(args)
        if "ares" in args.policy
    ]


def _traces(args: argparse.Namespace) -> list[SimPoint]:
    """Real traces: at the rate at which their decode work fills 3 replicas to two thirds, and, on
    replicas that pause, near saturation and under overload."""
    points = []
    for path in args.trace:
        trace = read_trace(path)
        rate = fitting_rate(_base(args), trace.input_tokens, trace.output_tokens, share=1.0)
        for part, x, load, memory, policies in (
            ("traces", trace.name, 2 / 3, RECOMPUTE, args.policy),
            (f"below, 3, {trace.name}", BELOW[3][-1], BELOW[3][-1], PAUSE, (*STATIC, "ares")),
            (f"overload, {trace.name}", 3, OVERLOAD, PAUSE, (*STATIC, "shedding", "ares")),
        ):
            points += [
                _point(
                    args,
                    part,
                    x,
                    rate=load * rate,
                    policy=policy,
                    trace=path,
                    workload=trace.name,
                    config=replace(_base(args), seed=seed, memory=memory),
                )
                for seed in _seeds(args)
                for policy in args.policy
                if policy in policies
            ]
    return points


def fitting_rate(
    config: SimConfig, input_tokens: np.ndarray, output_tokens: np.ndarray, share: float = 2 / 3
) -> float:
    """Requests/s at which the decode replicas' memory is filled to a share, on average.

    A request holds its input plus half of its output, on average, for as long as its steps take.
    """
    profile = config.profile
    tokens = share * profile.kv_capacity_tokens
    held = (input_tokens + output_tokens / 2.0) * output_tokens  # token-steps of a request
    sequences = tokens / (held.mean() / output_tokens.mean())
    step_s = profile.step.step_s(int(sequences), int(tokens))
    return float(config.num_decode * tokens / (held.mean() * step_s))


POINTS: dict[str, Callable[[argparse.Namespace], list[SimPoint]]] = {
    "vllm": _vllm,
    "own": _own,
    "lockstep": _lock_step,
    "overload": _overload,
    "below": _below,
    "rates": _rates,
    "bandwidth": _bandwidth,
    "sizes": _sizes,
    ARITHMETIC: lambda args: [],
    "settings": _settings,
    "traces": _traces,
}
PARTS = tuple(POINTS)
