"""Answers of /cluster to show: an idle service, and one in which everything happens."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from actors.scheduler.rescheduling import Rescheduling
from quadriga.clock import SystemClock
from quadriga.config.loader import load_config
from quadriga.core.forecast import LoadForecast
from quadriga.core.migration import MigrationCause, MigrationOrder, MigrationReport
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.observability.exits_view import exits_view
from quadriga.observability.load_history import INTERVAL_S, NUM_POINTS, LoadHistory, LoadPoint
from quadriga.observability.metrics import MetricsHub, Registry
from quadriga.policies.ares.forecast import NUM_COLUMNS

NAMES = ("quadriga:decode:0:a1b2c3", "quadriga:decode:1:d4e5f6", "quadriga:decode:2:a7b8c9")
CLASSES = (DepthClass("quadriga-s", 8), DepthClass("quadriga-s", 4))
GRID = (0.0, 0.4, 0.6, 1.1, 1.8, 2.9, 4.8, 7.9, 13.0, 21.0, 34.0, 60.0)


def packed(values: list[float]) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def snapshot(
    name: str, role: Role, depth_class: DepthClass, *, running: int, used: int, growth: float
) -> ReplicaSnapshot:
    info = ReplicaInfo(name, role, depth_class, "node", "1", 32, 16_384)
    forecast = None
    if role is Role.DECODE:
        forecast = LoadForecast(
            grid_s=GRID,
            sequence_ids=("s",),
            rows=np.zeros((1, NUM_COLUMNS), dtype="<f4").tobytes(),
            running=packed([1.0] * len(GRID)),
            context=packed([used] * len(GRID)),
            load_s=packed([0.01 + 1e-4 * growth * t / 60 for t in GRID]),
            tokens=packed([used + growth * t for t in GRID]),
            base_s=0.004,
        )
    return ReplicaSnapshot(
        info, time.time(), running, 2, 100, used, used + 1500, 321.5, 0.0142, forecast=forecast
    )


DEPTHS = {
    "quadriga_depth_forecast_tokens_total": {"0.4": 100.0, "1.0": 40.0},
    "quadriga_depth_expected_layers_total": {"0.4": 310.0, "1.0": 300.0},
    "quadriga_depth_run_layers_total": {"0.4": 330.0, "1.0": 320.0},
}
"""Tokens by the layers that were expected of them."""


def counted() -> dict[str, Any]:
    """Exits of three replicas, by way of the controller's hub."""
    hub = MetricsHub()
    for k, name in enumerate(NAMES):
        registry = Registry(name)
        tokens = registry.counter("quadriga_exit_tokens_total", "t", ["layer"])
        use = registry.gauge("quadriga_exit_use", "u", ["layer", "use"])
        for layer in (2, 4, 6):
            use.labels(layer=str(layer), use="tested").set(1)
        for layer, count in ((2, 400), (4, 900), (6, 250), (8, 120)):
            tokens.labels(layer=str(layer)).inc(count * (k + 1))
        registry.counter("quadriga_breaches_total", "b").inc(7 * k)
        registry.counter("quadriga_lowered_tokens_total", "l").inc(5 * k)
        for name_of, values in DEPTHS.items():
            counter = registry.counter(name_of, "d", ["tenth"])
            for tenth, value in values.items():
                counter.labels(tenth=tenth).inc(value)
        registry.counter("quadriga_involuntary_exits_total", "i")
        registry.counter("quadriga_involuntary_stays_total", "s").inc(31)
        hub.push(name, registry.snapshot(), now_s=0.0)
    return exits_view(hub)


PLACES = [
    {"name": NAMES[1], "gain": 0.23, "work": 0.5, "work_after": 0.8, "memory_share": 0.4},
    {"name": NAMES[2], "gain": -0.1, "work": 1.1, "work_after": 1.4, "memory_share": 0.85},
]
"""Where a sequence might have gone."""


def ten_minutes(now_unix_s: float) -> dict[str, Any]:
    """A load history with a calm beginning, a gap of a minute, and a busy end."""
    shown = LoadHistory()
    for k in range(NUM_POINTS):
        number = int(now_unix_s // INTERVAL_S) - NUM_POINTS + 1 + k
        if k < 8 or 60 <= k < 72:
            continue
        load = 0.0 if k < 24 else min(1.0, (k - 24) / 50) + 0.1 * math.sin(k / 3)
        times = (0.03 + 0.2 * load, 0.08 + 0.9 * load**2, 0.006 + 0.01 * load, 0.03 + 0.02 * load)
        counts = (800 * load, round(40 * load), round(34 * load))
        shown._points.append(LoadPoint(number, *counts, *(times if load > 0 else [None] * 4)))
    return shown.columns(now_unix_s=now_unix_s)


def default_view() -> dict[str, Any]:
    """A default service that has answered something: no forecasts, no moves, no HELIOS."""
    view = busy_view()
    replicas = [r | {"forecast": [], "seconds_to_full": None} for r in view["replicas"][:2]]
    replicas.append(view["replicas"][3])
    exits = counted()
    for name in NAMES[:2]:
        exits[name]["tokens"] = {"8": 1234.0}
        exits[name]["uses"] = {"2": "not_worth_it", "4": "not_worth_it"}
    names = {r["name"] for r in replicas}
    fleet = [r for r in view["fleet"]["replicas"] if r["name"] in names]
    return view | {
        "mode": "off",
        "replicas": replicas,
        "recent": [],
        "outcomes": {},
        "under_way": [],
        "last_tick": {"why": {}},
        "lengths": {},
        "helios": None,
        "exits": {name: exits[name] for name in NAMES[:2]},
        "fleet": view["fleet"] | {"num_ready": 3, "num_desired": 3, "replicas": fleet},
    }


ETA = {"tokens": 118.4, "lower": 60.0, "upper": 200.0, "seconds": 1.9, "upper_seconds": 3.2}
RUNS: dict[str, Any] = {
    "request_id": "9c5bd2ee0123456789abcdef",
    "choice": 0,
    "model": "quadriga-s",
}
RUNS |= {"replica": NAMES[0], "status": "running", "running_s": 64.0, "tokens": 412, "eta": ETA}
RUNS |= {"migrations": 0, "pauses": 0, "rebuilds": 0, "breaches": 0}
LOST = {"replica": None, "status": "waiting", "tokens": 0, "eta": None, "rebuilds": 1}
REQUESTS = [RUNS, RUNS | {"choice": 1, "status": "paused", "pauses": 2, "breaches": 3}, RUNS | LOST]
"""One that runs, one that is paused, and one whose replica has died."""


def busy_view(*, with_helios: bool = False) -> dict[str, Any]:
    """What the actors' own code makes of a busy cluster."""
    snapshots = [
        snapshot(NAMES[0], Role.DECODE, CLASSES[0], running=30, used=14_000, growth=300.0),
        snapshot(NAMES[1], Role.DECODE, CLASSES[0], running=9, used=4_000, growth=10.0),
        snapshot(NAMES[2], Role.DECODE, CLASSES[1], running=16, used=8_000, growth=200.0),
        snapshot("quadriga:prefill:0:p", Role.PREFILL, CLASSES[0], running=3, used=600, growth=0),
    ]
    config = load_config({"scheduler.ares.mode": "ares"})
    rescheduling = Rescheduling(config, SystemClock(), lambda: snapshots)
    book, now = rescheduling.governor.moves, time.time()
    ends: list[MigrationReport | None] = [
        MigrationReport("", "moved", "", 3, 400_000, 0.018, 0.31),
        MigrationReport("", "refused", "busy: 2 sequences are on their way from here"),
        MigrationReport("", "failed", "timeout: copying took longer than 20.0 s", 4, 9, 0.02, 20.0),
        MigrationReport("", "finished", "finished: it ended before it could move"),
        None,
    ]
    causes = (MigrationCause.BALANCE, MigrationCause.MEMORY, MigrationCause.DRAIN)
    for k, end in enumerate(ends):
        order = MigrationOrder(
            f"0123456789abcdef-{k:012x}",
            CLASSES[0],
            NAMES[0],
            NAMES[1],
            causes[k % 3],
            0.23,
            512,
            340.0 if k != 2 else 0.0,
        )
        seen = {"full_s": 12.0, "destinations": PLACES} if k == 1 else {}
        book.ordered(order, now - 40 + 8 * k, seen)
        if end is not None:
            rescheduling.governor.ended(order, end, now_s=now)
    rescheduling.governor.last.why = {
        "quadriga-s@8": "1 ordered, by the forecast",
        "quadriga-s@4": "1 of 1 replicas can forecast",
    }
    fleet = [
        {
            "name": s.info.name,
            "role": s.info.role.value,
            "phase": "ready",
            "node_id": "n",
            "depth_class": str(s.info.depth_class),
            "error": None,
        }
        for s in snapshots
    ]
    fleet.append(
        {
            "name": "quadriga:decode:3:x",
            "role": "decode",
            "phase": "starting",
            "node_id": None,
            "depth_class": None,
            "error": None,
        }
    )
    view = rescheduling.status() | {
        "missing": {},
        "requests": REQUESTS,
        "fleet": {"num_ready": 4, "num_desired": 5, "error": None, "replicas": fleet},
        "exits": counted(),
        "load_history": ten_minutes(now),
        "helios": None,
    }
    if with_helios:
        view["helios"] = {
            "slo": "throughput",
            "phase": "serve",
            "target": "quadriga-s@4",
            "profiling": None,
            "serve": ["quadriga-s@4"],
            "order": None,
            "served": 77,
            "barred": {},
            "window": {"breaches": 12.0, "tokens": 128},
            "counters": {"resizes": 2, "switches": 0, "trips": 1},
            "rows": [
                {
                    "model": "quadriga-s",
                    "depth": 8,
                    "requests": 20,
                    "ttft_s": 0.05,
                    "tpot_s": 0.012,
                    "tokens_per_s": 640.0,
                    "perplexity": 1.31,
                    "breach_share": 0.0,
                    "joules_per_token": None,
                },
                {
                    "model": "quadriga-l",
                    "depth": 12,
                    "requests": 5,
                    "ttft_s": 0.2,
                    "tpot_s": 0.03,
                    "tokens_per_s": 200.0,
                    "perplexity": 1.2,
                    "breach_share": 0.02,
                    "joules_per_token": 0.41,
                },
            ],
            "decisions": [
                {
                    "at_unix_s": now - 12,
                    "what": "resize",
                    "depth_class": "quadriga-s@4",
                    "reason": "covers 83 % of tokens",
                }
            ],
        }
    return view


def crowded_view(num_replicas: int = 200) -> dict[str, Any]:
    """A large cluster at peace, but for decode 7 (silent for 9 s) and decode 11 (full in 4 s)."""
    view = busy_view()
    calm = view["replicas"][1]
    view["replicas"] = [
        calm | {"name": f"quadriga:decode:{k}:x{k}", "seconds_to_full": None}
        for k in range(num_replicas)
    ]
    view["replicas"][7]["age_s"] = 9.0
    view["replicas"][11]["seconds_to_full"] = 4.0
    view["fleet"] = {
        "num_ready": num_replicas,
        "num_desired": num_replicas,
        "error": None,
        "replicas": [
            {
                "name": r["name"],
                "role": "decode",
                "phase": "ready",
                "node_id": "n",
                "depth_class": r["depth_class"],
                "error": None,
            }
            for r in view["replicas"]
        ],
    }
    return view
