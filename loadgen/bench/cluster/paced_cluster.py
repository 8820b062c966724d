"""One prefill and several paced decode replicas: started, given a load, and looked at meanwhile.

Paced, each replica behaves as on a device of its own; memory is promised as it is used; early exits
are off, as they depend on the load, and answers of several runs are to be compared.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loadgen.bench.cluster.service import ServiceUnderLoad, started_service
from loadgen.checker.judge import Judgement
from loadgen.event_loop import run_event_loop
from loadgen.load.workload import RequestSpec
from loadgen.options import whole
from loadgen.report.metrics import LoadSlo
from loadgen.report.output import add_out_argument
from loadgen.runner import Live, LoadOptions, RunResult, run_load
from loadgen.target import Target
from loadgen.wire.capture import now_s
from loadgen.wire.client_http import HttpClient
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.config.pacing import SHORT_FACTOR, find_profile
from quadriga.errors import ConfigError
from quadriga.observability.metrics import parse_exposition
from quadriga.ports import free_port

POLICIES: dict[str, tuple[str, ...]] = {
    "off": ("scheduler.ares.mode=off", "scheduler.placement=least_work"),
    "least-requests": ("scheduler.ares.mode=off", "scheduler.placement=least_requests"),
    "current-load": ("scheduler.ares.mode=off", "scheduler.placement=current_load"),
    "load": ("scheduler.ares.mode=load", "scheduler.placement=current_load"),
    "ares": ("scheduler.ares.mode=ares", "scheduler.placement=least_work"),
    "ares-placement": ("scheduler.ares.mode=ares", "scheduler.placement=ares"),
}
PROFILE = "ares-qwen7b-4090d-short"
KV_CAPACITY_TOKENS = 111_600 // SHORT_FACTOR
MAX_TOKENS = 640
MAX_MODEL_LEN = 704
INTERVAL_S = 0.5
"""Of decisions and reports: answers last a tenth of the paper's, at its step times."""
SAMPLE_EVERY_S = 0.5
COUNT_EVERY_S = 1.0
"""Replicas push their counters once a second."""
REQUEST_TIMEOUT_S = 300.0
REFERENCE_STEP_S = 0.02
SLO_TTFT_S = 5.0
SLO_TPOT_FACTOR = 1.5

MakeSpecs = Callable[[HttpClient], Awaitable[list[RequestSpec]]]


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the cluster, and what is done with the figures."""
    parser.add_argument("--model", default="quadriga-s", help="bundled id")
    parser.add_argument("--decode", type=whole(2, 16), default=3, help="decode replicas")
    parser.add_argument(
        "--slow",
        type=whole(1, 100),
        default=1,
        help="devices so many times as slow, requests so much rarer and for so much longer: for a "
        "machine that cannot do the work of three in the time of their steps",
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of everything random")
    add_out_argument(parser, "results/bench")


def pace_of(args: argparse.Namespace) -> str:
    """The pace of the decode replicas."""
    return f"{PROFILE}*{args.slow}"


def slo_of(args: argparse.Namespace) -> LoadSlo:
    """A good request's first token comes within 5 s, and its tokens, on average, within 1.5 times
    the step of a replica whose memory is half full."""
    half_full_s = find_profile(pace_of(args)).step_s(0, KV_CAPACITY_TOKENS // 2)
    return LoadSlo(args.slow * SLO_TTFT_S, SLO_TPOT_FACTOR * half_full_s)


def client_of(args: argparse.Namespace, service: ServiceUnderLoad) -> HttpClient:
    """A client that waits as much longer as the devices are slower."""
    return service.client(args.slow * REQUEST_TIMEOUT_S)


def settings_of(args: argparse.Namespace, policy: str, admin_port: int) -> list[str]:
    """Return the service's settings under a policy."""
    checkpoint = read_checkpoint(args.model)
    token_bytes = checkpoint.kv_bytes_per_token(checkpoint.num_layers, 4)
    return [
        f"model={args.model}",
        "prefill_replicas=1",
        f"decode_replicas={args.decode}",
        "engine.compile=wait",
        "engine.dtype=float32",
        f"engine.max_model_len={MAX_MODEL_LEN}",
        f"engine.kv_memory_bytes={KV_CAPACITY_TOKENS * token_bytes}",
        "decode.reservation=used",
        "decode.rebatching=off",
        f"decode.pace={pace_of(args)}",
        f"scheduler.ares.reference_step_s={args.slow * REFERENCE_STEP_S}",
        f"scheduler.snapshot_interval_s={INTERVAL_S}",
        f"scheduler.ares.interval_s={INTERVAL_S}",
        f"admin.port={admin_port}",
        *POLICIES[policy],
    ]


@dataclass(frozen=True, slots=True)
class Page:
    """The cluster's metrics at one moment: series → value."""

    at_s: float
    series: dict[str, float]


@dataclass(slots=True)
class Played:
    """A load that a cluster has served.

    Attributes:
        specs: What was sent.
        views: `/cluster` every half second; the last one is taken after the load.
        pages: `/metrics` every second, where that was asked for.
    """

    result: RunResult
    specs: list[RequestSpec]
    views: list[dict[str, Any]] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)


def play(
    args: argparse.Namespace,
    policy: str,
    make_specs: MakeSpecs,
    *,
    more: Sequence[str] = (),
    counts: bool = False,
) -> Played:
    """Start a service under a policy, send it a load, and stop it.

    Args:
        args: With `model` and `decode`.
        make_specs: Makes the requests; may ask the service for its tokens.
        more: Further settings.
        counts: Fetch the metrics too.

    Raises:
        ConfigError: The service did not start, or ended under way.
    """
    admin_port, log = free_port(), args.out / f"service-{policy}.log"
    settings = [*settings_of(args, policy, admin_port), *more]
    with started_service(settings, log=log) as service:
        try:
            return run_event_loop(lambda: _send(args, service, admin_port, make_specs, counts))
        except ConnectionError as exc:
            raise ConfigError(f"{exc}; {log} has what the service said") from exc


async def _send(
    args: argparse.Namespace,
    service: ServiceUnderLoad,
    admin_port: int,
    make_specs: MakeSpecs,
    counts: bool,
) -> Played:
    client = client_of(args, service)
    admin = HttpClient(f"http://127.0.0.1:{admin_port}", timeout_s=REQUEST_TIMEOUT_S)
    judgement = Judgement(Target(args.model, None))
    specs = await make_specs(client)
    warm = [replace(s, index=i, arrival_s=0.0) for i, s in enumerate(specs[: 2 * args.decode])]
    await run_load(warm, client, args.model, judgement, LoadOptions(concurrency=4), Live())
    views: list[dict[str, Any]] = []
    pages: list[Page] = []
    watchers = [asyncio.create_task(_repeat(lambda: _view(admin), views, SAMPLE_EVERY_S))]
    if counts:
        pages.append(await _page(admin))
        watchers.append(asyncio.create_task(_repeat(lambda: _page(admin), pages, COUNT_EVERY_S)))
    try:
        result = await run_load(specs, client, args.model, judgement, LoadOptions(), Live())
        if counts:
            await asyncio.sleep(2.0 * COUNT_EVERY_S)  # the last push is on its way
    finally:
        for watcher in watchers:
            watcher.cancel()
        ends = await asyncio.gather(*watchers, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    views.append(await _view(admin))
    return Played(result, specs, views, pages)


async def _repeat(look: Callable[[], Awaitable[Any]], found: list[Any], every_s: float) -> None:
    while True:
        found.append(await look())
        await asyncio.sleep(every_s)


async def _view(admin: HttpClient) -> dict[str, Any]:
    """Raises: ConfigError where the admin port does not answer."""
    status, view = await admin.fetch("GET", "/cluster")
    if status != 200 or not isinstance(view, dict):
        raise ConfigError(f"the admin port answered {status} to /cluster")
    return view


async def _page(admin: HttpClient) -> Page:
    """Raises: ConfigError where the admin port does not answer."""
    status, text = await admin.fetch_text("/metrics")
    if status != 200:
        raise ConfigError(f"the admin port answered {status} to /metrics")
    return Page(now_s(), parse_exposition(text))
