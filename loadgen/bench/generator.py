"""`python -m loadgen bench generator`: how fast the load generator itself can be.

A fake service in a process of its own writes as fast as it can; the generator reads, then judges.
What counts is the CPU time per token: on a machine that the generator shares with the service it
is taken from the service.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from loadgen.checker import Outcome
from loadgen.checker.judge import Judgement
from loadgen.event_loop import run_event_loop
from loadgen.load.workload import RequestSpec
from loadgen.model_costs.subprocesses import python_process, read_line
from loadgen.options import whole
from loadgen.report import provenance
from loadgen.runner import Live, RunOptions, now_s, run_load
from loadgen.target import Target
from loadgen.wire.capture import LoadClient
from loadgen.wire.client_grpc import GrpcClient
from loadgen.wire.client_http import HttpClient, parse_url

START_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 120.0
PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one transport can take.

    Attributes:
        tokens_per_s: Read per second of wall time; the fake service may be the limit.
        read_us: CPU microseconds of the generator per token, while it reads.
        judge_us: CPU microseconds per token of the checker, after the load.
    """

    transport: str
    tokens_per_write: int
    tokens: int
    tokens_per_s: float
    read_us: float
    judge_us: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--requests", type=whole(1), default=64, help="in each measurement")
    parser.add_argument("--tokens", type=whole(1), default=512, help="output tokens per request")
    parser.add_argument("--concurrency", type=whole(1), default=32, help="requests in flight")
    parser.add_argument("--tokens-per-write", type=whole(1), default=1, help="events in a write")


def run(args: argparse.Namespace) -> int:
    """Measure both transports; fails when a response does."""
    capacities = [_measure(transport, args) for transport in ("http", "grpc")]
    table = Table(title=f"generator, {args.concurrency} streams at once")
    for column in ("transport", "tokens/s", "µs CPU/token reading", "µs CPU/token judging"):
        table.add_column(column, justify="right")
    for capacity in capacities:
        table.add_row(
            capacity.transport,
            f"{capacity.tokens_per_s:,.0f}",
            f"{capacity.read_us:.2f}",
            f"{capacity.judge_us:.2f}",
        )
    Console().print(table)
    line = {
        "bench": "generator",
        "capacities": [asdict(capacity) for capacity in capacities],
        "commit": provenance.commit(),
        "machine": provenance.machine(),
    }
    print(json.dumps(line))
    return 0


def _measure(transport: str, args: argparse.Namespace) -> Capacity:
    words = ["-m", "loadgen.bench.fake_service.server", "--grpc"]
    words += ["--tokens-per-write", str(args.tokens_per_write)]
    with python_process(words) as process:
        addresses = json.loads(read_line(process, START_TIMEOUT_S))
        return run_event_loop(lambda: _load(transport, addresses, args))


async def _load(transport: str, addresses: dict[str, str], args: argparse.Namespace) -> Capacity:
    specs = [
        RequestSpec(
            index=index,
            arrival_s=0.0,
            prompt=list(range(256 + index, 256 + index + PROMPT_TOKENS)),
            prompt_tokens=PROMPT_TOKENS,
            max_tokens=args.tokens,
            ignore_eos=True,
        )
        for index in range(args.requests)
    ]
    client: LoadClient
    if transport == "grpc":
        grpc = GrpcClient(addresses["grpc"], now_s=now_s, timeout_s=REQUEST_TIMEOUT_S)
        client, close = grpc, grpc.close
    else:
        client = HttpClient(parse_url(addresses["url"]), now_s=now_s, timeout_s=REQUEST_TIMEOUT_S)
        close = None
    judgement = Judgement(Target("fake", None))
    try:
        options = RunOptions(concurrency=args.concurrency)
        start_cpu_s = time.process_time()
        result = await run_load(specs, client, "fake", judgement, options, Live())
        judge_cpu_s = time.process_time() - start_cpu_s - result.cpu_s
    finally:
        if close is not None:
            await close()
    failed = [r for r in result.records if r.verdict.outcome is not Outcome.OK]
    if failed:
        raise RuntimeError(f"a response of the fake service failed: {failed[0].verdict.faults}")
    tokens = args.requests * args.tokens
    return Capacity(
        transport=transport,
        tokens_per_write=args.tokens_per_write,
        tokens=tokens,
        tokens_per_s=tokens / (result.end_s - result.start_s),
        read_us=result.cpu_s / tokens * 1e6,
        judge_us=judge_cpu_s / tokens * 1e6,
    )
