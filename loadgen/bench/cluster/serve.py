"""`python -m loadgen bench serve`: what the service costs, over its own engine's speed.

The same requests (token ids, fixed lengths, greedy, end of sequence ignored) go through HTTP,
through gRPC, and through the engine alone in a process of its own, in turns, so that a disturbance
of the machine hits all alike. The service has one prefill and one decode replica.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loadgen.bench.cluster.process_cpu import service_cpu_s
from loadgen.bench.cluster.serve_report import Rounds, print_final_line, print_table
from loadgen.bench.cluster.service import ServiceUnderLoad, started_service
from loadgen.bench.engines.peer_process import PeerProcess
from loadgen.bench.engines.workloads import Workload, WorkloadRequest
from loadgen.checker import Outcome
from loadgen.checker.judge import Judgement
from loadgen.event_loop import run_event_loop
from loadgen.load.scenario import cached_apart
from loadgen.load.workload import RequestSpec
from loadgen.options import api_key, number, whole
from loadgen.report.experiment import say
from loadgen.report.metrics import LoadSlo, LoadSummary, summarise
from loadgen.report.output import file_to_write
from loadgen.runner import Live, LoadOptions, RunResult, run_load
from loadgen.target import Target
from loadgen.wire.client_grpc import GrpcClient
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.errors import ConfigError

ENGINE = "engine"
TRANSPORTS = ("http", "grpc")
REQUEST_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--model", default="quadriga-l", help="bundled id, folder, GGUF file, or hub id"
    )
    parser.add_argument("--rounds", type=whole(1), default=3, help="of each transport")
    parser.add_argument("--requests", type=whole(1), default=96, help="per round and transport")
    parser.add_argument("--concurrency", type=whole(1), default=32, help="requests in flight")
    parser.add_argument("--prompt-tokens", type=whole(1), default=64, help="of a request")
    parser.add_argument("--output-tokens", type=whole(2), default=128, help="of a request")
    parser.add_argument("--threads", type=whole(1), default=1, help="engine threads, both sides")
    parser.add_argument(
        "--transport",
        nargs="+",
        choices=TRANSPORTS,
        default=list(TRANSPORTS),
        help="how requests travel",
    )
    parser.add_argument(
        "--proxy",
        choices=("auto", "haproxy", "serve"),
        default="auto",
        help="what stands before a started service, as its own option says",
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of everything random")
    parser.add_argument(
        "--require", type=number(0), metavar="RATIO", help="fail below this share of the engine"
    )
    parser.add_argument("--url", help="use this running service instead of starting one")
    parser.add_argument("--grpc", default="127.0.0.1:9000", help="its gRPC address, with --url")
    parser.add_argument("--api-key", help="its key, with --url")
    parser.add_argument("--api-key-file", type=Path, help="file with the key, with --url")
    parser.add_argument(
        "--log", type=file_to_write, help="where the started service writes its output"
    )


def run(args: argparse.Namespace) -> int:
    """Measure; 1 when a response failed its check or a ratio is below `--require`."""
    checkpoint = read_checkpoint(args.model)
    workload = make_workload(args, checkpoint)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = folder / "workload.json"
        workload.save(file)
        say("engine: loading, compiling, warming up")
        engine = stack.enter_context(
            PeerProcess("quadriga", checkpoint.path, args.threads, sys.executable)
        )
        engine.prepare([file])
        service = stack.enter_context(_service(args, checkpoint, folder))
        measured = _measure(args, checkpoint, workload, file, engine, service)
    print_table(measured, args)
    line = print_final_line(args, checkpoint, measured)
    ratios = [row["ratio"] for row in line["results"] if "ratio" in row]
    return 1 if args.require is not None and min(ratios) < args.require else 0


def make_workload(args: argparse.Namespace, checkpoint: Checkpoint) -> Workload:
    """Return the requests; the same for every way and every round.

    Raises:
        ConfigError: They do not fit the model's context.
    """
    if args.prompt_tokens + args.output_tokens > checkpoint.max_model_len:
        raise ConfigError(
            f"--prompt-tokens + --output-tokens: {args.prompt_tokens + args.output_tokens} is "
            f"beyond the {checkpoint.max_model_len} positions of {checkpoint.id}"
        )
    rng = random.Random(args.seed)
    first = min(3, checkpoint.vocab_size - 1)  # low ids are often special tokens
    requests = [
        WorkloadRequest(
            [rng.randrange(first, checkpoint.vocab_size) for _ in range(args.prompt_tokens)],
            args.output_tokens,
        )
        for _ in range(args.requests)
    ]
    return Workload("serve", args.concurrency, requests)


@contextlib.contextmanager
def _service(
    args: argparse.Namespace, checkpoint: Checkpoint, folder: Path
) -> Iterator[ServiceUnderLoad]:
    if args.url is not None:
        yield ServiceUnderLoad(args.url, args.grpc, api_key(args))
        return
    settings = [
        f"model={args.model}",
        "prefill_replicas=1",
        "decode_replicas=1",
        "engine.compile=wait",
        f"engine.threads={args.threads}",
        f"decode.max_slots={args.concurrency}",
        f"--proxy={args.proxy}",
    ]
    say(f"service: starting {checkpoint.id}, 1 prefill and 1 decode replica")
    with started_service(settings, log=args.log or folder / "service.log") as service:
        yield service


def _measure(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    workload: Workload,
    file: Path,
    engine: PeerProcess,
    service: ServiceUnderLoad,
) -> list[Rounds]:
    measured = {name: Rounds(name) for name in (ENGINE, *args.transport)}
    for transport in args.transport:
        say(f"{transport}: warming up")
        _serve_once(transport, service, checkpoint.id, workload.warm_up())
    for turn in range(args.rounds):
        for rounds in measured.values():
            if rounds.name == ENGINE:
                before_s = _engine_cpu_s(service)
                done = engine.run(file)
                us = (_engine_cpu_s(service) - before_s) / workload.output_tokens * 1e6
                rounds.cpu_us.setdefault(ENGINE, []).append(us)
                rounds.tokens_per_s.append(workload.output_tokens / done.seconds)
                rounds.ttft_p50_s.append(statistics.median(done.ttft_s))
            else:
                before = service_cpu_s(service.pid) if service.pid is not None else {}
                summary, result = _serve_once(rounds.name, service, checkpoint.id, workload)
                _take(rounds, summary, result)
                if service.pid is not None:
                    for part, cpu_s in service_cpu_s(service.pid).items():
                        us = (cpu_s - before.get(part, 0.0)) / summary.output_tokens * 1e6
                        rounds.cpu_us.setdefault(part, []).append(us)
            say(f"round {turn + 1}/{args.rounds} {rounds.name}: {rounds.tokens_per_s[-1]:,.0f}/s")
    return list(measured.values())


def _engine_cpu_s(service: ServiceUnderLoad) -> float:
    """CPU seconds of this command's processes, the service's apart: while it runs, the engine's."""
    ours = sum(service_cpu_s(os.getpid()).values())
    return ours - (sum(service_cpu_s(service.pid).values()) if service.pid is not None else 0.0)


def _take(rounds: Rounds, summary: LoadSummary, result: RunResult) -> None:
    rounds.tokens_per_s.append(summary.output_tokens_per_s)
    rounds.ttft_p50_s.append(summary.ttft.p50 or 0.0)
    rounds.generator_us.append(result.cpu_s / summary.output_tokens * 1e6)
    rounds.tokens_per_write.append(summary.tokens_per_write or 0.0)


def _serve_once(
    transport: str, service: ServiceUnderLoad, model: str, workload: Workload
) -> tuple[LoadSummary, RunResult]:
    """Send the workload once, check every answer after the clock, and return the figures.

    Raises:
        ConfigError: An answer failed its check or was refused.
    """
    result = run_event_loop(lambda: _send(transport, service, model, workload))
    for record in result.records:
        if record.verdict.outcome is not Outcome.OK:
            faults = "; ".join(map(str, record.verdict.faults[:3])) or "refused"
            raise ConfigError(f"{transport} request {record.spec.index}: {faults}")
    return summarise(result, LoadSlo()), result


async def _send(
    transport: str, service: ServiceUnderLoad, model: str, workload: Workload
) -> RunResult:
    specs = [
        RequestSpec(
            index=index,
            arrival_s=0.0,
            prompt=request.prompt,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            ignore_eos=True,
        )
        for index, request in enumerate(workload.requests)
    ]
    specs = cached_apart(specs)  # the engine keeps no prompts of an earlier round either
    judgement, live = Judgement(Target(model, None)), Live()
    options = LoadOptions(concurrency=workload.concurrency)
    if transport == "http":
        http = service.client(REQUEST_TIMEOUT_S)
        return await run_load(specs, http, model, judgement, options, live)
    grpc = GrpcClient(service.grpc, timeout_s=REQUEST_TIMEOUT_S, api_key=service.api_key)
    try:
        return await run_load(specs, grpc, model, judgement, options, live)
    finally:
        await grpc.close()
