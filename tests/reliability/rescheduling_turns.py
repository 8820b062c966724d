"""`python -m loadgen bench rescheduling-turns`: ARES on and off in turns, on one running service.

One prefill and several decode replicas, paced as devices of their own. The same requests go to the
same processes twice, with placement and moves by forecast and with placement by least work and no
moves, each way first in every second pair. So a pair shares its machine's mood, its warm caches and
its chance; what differs is ARES. At every rate, with exits and without:

    good      requests that kept the SLO of the paced cluster, on over off
    speed     P99 of a token's time, off over on
    typical   P50 of it, off over on

It fails where an interval over the pairs lies below 0.98 for either of the first two: what is on by
default may not cost. A long answer that is kept apart from short ones costs the median a little.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from loadgen.bench.cluster.paced_cluster import (
    add_cluster_arguments,
    client_of,
    pace_of,
    settings_of,
    slo_of,
)
from loadgen.bench.cluster.rescheduling import make_specs
from loadgen.bench.cluster.service import ServiceUnderLoad, started_service
from loadgen.checker.judge import Judgement
from loadgen.comparison.pairs import LEAST_RATIO, paired_ratio
from loadgen.event_loop import run_event_loop
from loadgen.load.workload import RequestSpec
from loadgen.options import number, whole
from loadgen.report.experiment import drop_rows, keep_rows, print_line, say, show
from loadgen.report.metrics import LoadSummary, summarise
from loadgen.runner import Live, LoadOptions, run_load
from loadgen.target import Target
from loadgen.wire.client_http import HttpClient
from quadriga.errors import ConfigError
from quadriga.ports import free_port
from tests.reliability.cluster.control import ClusterControl, cluster_control

EXITS = {"off": (), "on": ("decode.rebatching=drex", "exits.mode=bounded")}
RATIOS, KEPT = ("good", "speed", "typical"), "rescheduling-turns"
ByRate = dict[str, dict[str, Any]]
FEWEST_GOOD = 0.5
"""Requests that count as good in a turn without any, so that pairs have a ratio."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_cluster_arguments(parser)
    parser.add_argument(
        "--rates", type=number(0), nargs="+", default=[2.0, 6.0, 10.0], help="requests per second"
    )
    parser.add_argument(
        "--exits", choices=EXITS, nargs="+", default=list(EXITS), help="tokens may leave early"
    )
    parser.add_argument("--pairs", type=whole(2), default=4, help="of turns, at each rate")
    parser.add_argument("--duration-s", type=number(0), default=20.0, help="arrivals of a turn")


def run(args: argparse.Namespace) -> int:
    """Measure; 1 where a response failed its check, or ARES surely costs."""
    if args.pairs % 2:
        raise ConfigError(f"--pairs: {args.pairs}: an even number has each way first as often")
    found: ByRate = {}
    for exits in args.exits:
        admin_port = free_port()
        settings = [*settings_of(args, "ares-placement", admin_port), *EXITS[exits]]
        log = args.out / f"rescheduling-turns-exits-{exits}.log"
        with started_service(settings, log=log) as service:
            run_event_loop(lambda e=exits, s=service: _measure(args, e, s, found))  # type: ignore[misc]
    columns: dict[str, Callable[[str], object]] = {"exits, rate": lambda name: name}
    for name in (*RATIOS, "good_shares", "p50_ms", "p99_ms", "refused", "failed"):
        columns[name] = lambda key, name=name: found[key][name]  # type: ignore[misc]
    show(found, columns, title="ARES over none: ratios, with intervals over pairs of turns")
    costs = [
        f"{key}: {name} {figure}"
        for key, figures in found.items()
        for name in ("good", "speed")
        if (figure := figures[name]) is not None and figure.is_surely_below(LEAST_RATIO)
    ]
    failed = sum(figures["failed"] for figures in found.values())
    print_line(
        "bench rescheduling-turns",
        surely_below=costs,
        failed=failed,
        results=plain(found),
        config={
            "model": args.model,
            "pairs": args.pairs,
            "duration_s": args.duration_s,
            "seed": args.seed,
            "decode": args.decode,
            "pace": pace_of(args),
        },
    )
    drop_rows(KEPT, args.out)
    return 1 if failed or costs else 0


def plain(found: ByRate) -> ByRate:
    """The same as JSON has it."""
    return {k: f | {n: f[n] and f[n].as_dict() for n in RATIOS} for k, f in found.items()}


async def _measure(
    args: argparse.Namespace, exits: str, service: ServiceUnderLoad, found: ByRate
) -> None:
    """All rates on one service, added to `found`. Raises: AgentError, ConfigError."""
    client = client_of(args, service)
    async with cluster_control(service) as control:
        await _turn(args, control, client, _specs(args, args.rates[0], 0), is_on=True)
        for rate in args.rates:
            pairs: list[tuple[LoadSummary, LoadSummary]] = []
            key = f"exits {exits}, {rate:g}/s"
            for index in range(args.pairs):
                specs = _specs(args, rate, index)
                turns = {}
                for is_on in (index % 2 == 0, index % 2 == 1):
                    turns[is_on] = await _turn(args, control, client, specs, is_on=is_on)
                pairs.append((turns[True], turns[False]))
                found[key] = ratios_of(pairs)
                keep_rows(KEPT, [plain(found)], args.out)
            say(f"{key}: good {found[key]['good']}, speed {found[key]['speed']}")


def _specs(args: argparse.Namespace, rate: float, index: int) -> list[RequestSpec]:
    """The requests of a pair: both its turns send the same."""
    changed = argparse.Namespace(**vars(args))
    changed.rate, changed.seed = rate, args.seed + index
    return make_specs(changed)


async def _turn(
    args: argparse.Namespace,
    control: ClusterControl,
    client: HttpClient,
    specs: list[RequestSpec],
    *,
    is_on: bool,
) -> LoadSummary:
    await control.agent.call("reschedule", is_on)
    judgement = Judgement(Target(args.model, None))
    result = await run_load(specs, client, args.model, judgement, LoadOptions(), Live())
    if await control.agent.call("reschedule", is_on) is not is_on:
        raise ConfigError("the scheduler was configured anew within a turn: it says nothing")
    found = summarise(result, slo_of(args))
    p50_ms, p99_ms = (1e3 * (s or 0.0) for s in (found.tpot.p50, found.tpot.p99))
    say(
        f"ARES {'on' if is_on else 'off'}: good {found.good_share}, P50 and P99 of a token "
        f"{p50_ms:.1f} and {p99_ms:.1f} ms"
    )
    return found


def ratios_of(pairs: list[tuple[LoadSummary, LoadSummary]]) -> dict[str, Any]:
    """What the turns with ARES came to, over those without: at least 1 is as good."""
    p50s = [(on.tpot.p50 or 0.0, off.tpot.p50 or 0.0) for on, off in pairs]
    p99s = [(on.tpot.p99 or 0.0, off.tpot.p99 or 0.0) for on, off in pairs]
    return {
        "good": paired_ratio([(_good(on), _good(off)) for on, off in pairs]),
        "speed": paired_ratio([(off, on) for on, off in p99s]),
        "typical": paired_ratio([(off, on) for on, off in p50s]),
        "good_shares": _means([(on.good_share or 0.0, off.good_share or 0.0) for on, off in pairs]),
        "p50_ms": _means([(1e3 * on, 1e3 * off) for on, off in p50s]),
        "p99_ms": _means([(1e3 * on, 1e3 * off) for on, off in p99s]),
        "refused": [sum(on.refused for on, _ in pairs), sum(off.refused for _, off in pairs)],
        "failed": sum(turn.failed for pair in pairs for turn in pair),
    }


def _means(pairs: list[tuple[float, float]]) -> list[float]:
    """Of the turns with ARES, and of those without."""
    return [round(statistics.mean(values), 3) for values in zip(*pairs, strict=True)]


def _good(summary: LoadSummary) -> float:
    return max((summary.good_share or 0.0) * (summary.ok + summary.refused), FEWEST_GOOD)
