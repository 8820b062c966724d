"""`python -m loadgen overload`: five times what the service can do, for ten minutes.

    capacity   as many clients as there are decode slots, each with its next request at once
    calm       half of that rate: what latencies are like when nothing waits
    burst      five times the capacity for a moment; refused callers come back when told
    overload   five times the capacity; refused callers give up, but for every tenth one,
               which comes back when told
    recovery   half of the capacity again: how long until latencies are calm

Held to: no request fails; of those let in, P99 of TTFT and of TPOT stays within twice the calm one,
for every priority; goodput stays at 0.9 of the peak; no priority is shut out; a caller
that comes back when told is mostly let in, and on average after hardly more time than it was told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from loadgen.bench.cluster.process_cpu import service_cpu_s
from loadgen.bench.cluster.service import ServiceUnderLoad, started_service
from loadgen.checker import Outcome
from loadgen.checker.judge import Judgement
from loadgen.event_loop import run_event_loop
from loadgen.load.workload import RequestSpec
from loadgen.options import add_setting_argument, check_service, number, whole
from loadgen.report.experiment import print_line, wide_console
from loadgen.report.figures import milliseconds
from loadgen.report.output import add_out_argument
from loadgen.runner import Live, LoadOptions, Record, RunResult, run_load
from loadgen.target import Target, find_target
from loadgen.wire.capture import now_s
from quadriga.errors import ConfigError
from quadriga.files import write_atomically
from tests.reliability.overload_report import (
    PHASES,
    PRIORITIES,
    Found,
    Phase,
    Returns,
    figures,
    judge,
    mean,
    mean_tokens,
    recovered_after_s,
    table,
    tokens_between,
)

WIDTH = 130
SLOTS, REPLICAS = 6, 2
SETTINGS = (
    "decode.pace=steady-15ms",
    f"decode.max_slots={SLOTS}",
    f"decode_replicas={REPLICAS}",
    "decode.rebatching=off",
    "engine.compile=wait",
    "engine.max_model_len=512",
    "engine.resources_cpus=0.05",
    "scheduler.max_wait_s=0.1",
    "logging.requests=false",
)
OVER = 5.0
CALM = 0.5
BURST_S = 3.0
OUTPUT_TOKENS = (60, 240)
PROMPT = "Count: {first} 2 3 4 5 6 7 8\n"
REQUEST_TIMEOUT_S = 60.0
RAMP_SHARE = 0.25
"""Of the capacity phase: until all places are staggered."""
MAX_TRIES = 20
PATIENT = 10
"""One caller in so many comes back during the overload."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `overload`."""
    parser.add_argument(
        "--model", default="quadriga-s", help="bundled id, folder, GGUF file, or hub id"
    )
    parser.add_argument("--seconds", type=number(0), default=600.0, help="of overload")
    parser.add_argument(
        "--calm-s", type=number(0), help="afterwards; default: a third of --seconds, 60 at most"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of everything random")
    add_setting_argument(parser)
    add_out_argument(parser, "results/overload")


def run(args: argparse.Namespace) -> int:
    """Run it; 0 when everything held."""
    check_service(args.model, args.set)
    console = wide_console(WIDTH)
    began_s, found = time.monotonic(), Found()
    try:
        settings = [f"model={args.model}", *SETTINGS, *args.set]
        with started_service(settings, log=args.out / "service.log") as service:
            run_event_loop(lambda: Overload(args, service, console).run(found))
    finally:  # the phases that were over are told of a run that is killed, too
        failures = judge(found)
        if found.phases:
            console.print(table(found))
            seconds = round(time.monotonic() - began_s, 1)
            facts = figures(found) | {"failures": failures, "seconds": seconds, "seed": args.seed}
            line = print_line("overload", **facts)
            part = "" if len(found.phases) == len(PHASES) else ".partial"
            write_atomically(args.out / f"overload{part}.json", json.dumps(line).encode())
    return 1 if failures else 0


class Overload:
    """One run."""

    def __init__(
        self, args: argparse.Namespace, service: ServiceUnderLoad, console: Console
    ) -> None:
        self._args = args
        self._console = console
        self._rng = random.Random(args.seed)
        self._client = service.client(REQUEST_TIMEOUT_S)
        self._target = Target(args.model, None)
        self._judge = Judgement(self._target)
        assert service.pid is not None
        self._pid = service.pid

    async def run(self, found: Found) -> None:
        """All phases, one after the other."""
        seconds = self._args.seconds
        calm_s = self._args.calm_s or min(60.0, seconds / 3)
        self._target = await find_target(self._client, self._args.model)
        self._judge = Judgement(self._target)
        await self._closed("warm-up", 4.0)
        capacity = found.phases["capacity"] = await self._closed("capacity", calm_s)
        if not capacity.goodput:
            raise ConfigError(f"nothing was served in {calm_s:g} s of full load; raise --calm-s")
        found.capacity_rps = capacity.goodput / mean_tokens(capacity)
        await self._open(found, "calm", CALM * found.capacity_rps, calm_s)
        await self._burst(found)
        rate, returns = OVER * found.capacity_rps, found.overload_returns
        await self._open(found, "overload", rate, seconds, returns)
        recovery = await self._open(found, "recovery", CALM * found.capacity_rps, calm_s)
        over = found.phases["overload"]
        found.recovery_s = recovered_after_s(found.phases["calm"], over, recovery)

    async def _closed(self, name: str, seconds: float) -> Phase:
        """Keep every slot busy; goodput is of the time after the ramp."""
        places = SLOTS * REPLICAS
        specs = self._specs(round(4 * places * max(1.0, seconds)))
        stop = asyncio.Event()  # what is under way then goes on to its end, and counts until then
        asyncio.get_running_loop().call_later(seconds, stop.set)
        result = await self._send(specs, LoadOptions(concurrency=places), stop)
        began_s, end_s = (result.start_s + share * seconds for share in (RAMP_SHARE, 1.0))
        phase = Phase(name, None, end_s - began_s, result.records)
        phase.goodput = tokens_between(result.records, began_s, end_s) / (end_s - began_s)
        self._say(phase)
        return phase

    async def _open(
        self, found: Found, name: str, rate: float, seconds: float, returns: Returns | None = None
    ) -> Phase:
        """Send at Poisson times, whatever comes back; with `returns` some are patient."""
        times: list[float] = []
        at_s = self._rng.expovariate(rate)
        while at_s < seconds:
            times.append(at_s)
            at_s += self._rng.expovariate(rate)
        made = zip(self._specs(len(times)), times, strict=True)
        specs = [replace(spec, arrival_s=t) for spec, t in made]
        before = service_cpu_s(self._pid)
        begin_s = now_s()
        patient = specs[PATIENT - 1 :: PATIENT] if returns is not None else []
        others = [s for i, s in enumerate(specs, 1) if returns is None or i % PATIENT]
        end_s, told = begin_s + seconds, returns or Returns()
        waiting = [
            asyncio.create_task(self._insist(spec, begin_s + spec.arrival_s, told, end_s))
            for spec in patient
        ]
        result = await self._send(others, LoadOptions())
        records = [*result.records, *await asyncio.gather(*waiting)]
        after, lasted_s = service_cpu_s(self._pid), now_s() - begin_s
        counted_s = begin_s + min(5.0, RAMP_SHARE * seconds)
        phase = Phase(name, rate, seconds, records, end_s=end_s)
        phase.goodput = tokens_between(records, counted_s, end_s) / (end_s - counted_s)
        phase.cores = {k: round((v - before.get(k, 0.0)) / lasted_s, 2) for k, v in after.items()}
        phase.cores["client"] = round(result.cpu_s / lasted_s, 2)
        found.phases[name] = phase
        self._say(phase)
        if returns is not None:
            self._say_returns(name, returns)
        return phase

    async def _burst(self, found: Found) -> None:
        """Far too many at once; each comes back when told, until it is let in."""
        count = round(OVER * found.capacity_rps * BURST_S)
        specs = self._specs(count)
        start_s, told = now_s(), found.returns
        pause_s = BURST_S / count
        waiting = (self._insist(s, start_s + i * pause_s, told) for i, s in enumerate(specs))
        records = await asyncio.gather(*waiting)
        let_in_s = [r.sent_s for r in records if r.verdict.outcome is Outcome.OK]
        found.burst_recovery_s = max(let_in_s, default=start_s) - start_s - BURST_S
        self._say_returns(f"burst of {count}", found.returns)

    async def _insist(
        self, spec: RequestSpec, at_s: float, returns: Returns, until_s: float = math.inf
    ) -> Record:
        """Come back until let in, or told to come after `until_s`. Returns the last try."""
        await asyncio.sleep(at_s - now_s())
        first_s, told_s = 0.0, 0.0
        for attempt in range(MAX_TRIES):
            request_id = f"patient-{spec.index}-{attempt}"
            capture = await self._client.prepare(spec, self._target.model, request_id)()
            verdict = self._judge(capture, spec, request_id)
            times_s = at_s, capture.sent_s, capture.ended_s
            record = Record(spec, request_id, *times_s, attempt + 1, capture.num_bytes, verdict)
            if verdict.outcome is not Outcome.REFUSED:
                returns.failed += verdict.outcome is Outcome.FAILED
                if attempt:
                    returns.tries.append(attempt)
                    returns.told_s.append(told_s)
                    returns.needed_s.append(capture.sent_s - first_s)
                return record
            wait_s = verdict.retry_after_s or 0.0
            if attempt == 0:
                first_s, told_s = capture.ended_s, wait_s
            if now_s() + wait_s > until_s:
                break
            await asyncio.sleep(wait_s)
        else:
            returns.failed += 1
        if attempt:
            returns.tries.append(math.inf)
        return record

    async def _send(
        self, specs: Sequence[RequestSpec], options: LoadOptions, stop: asyncio.Event | None = None
    ) -> RunResult:
        client, model, judge = self._client, self._target.model, self._judge
        return await run_load(specs, client, model, judge, options, Live(), stop=stop)

    def _specs(self, count: int) -> list[RequestSpec]:
        """Requests of random lengths, each priority in turn."""
        return [
            RequestSpec(
                index=index,
                arrival_s=0.0,
                prompt=PROMPT.format(first=index),  # no caller is taken for another
                max_tokens=self._rng.randint(*OUTPUT_TOKENS),
                ignore_eos=True,
                extra={"priority": PRIORITIES[index % len(PRIORITIES)]},
            )
            for index in range(count)
        ]

    def _say_returns(self, name: str, returns: Returns) -> None:
        self._console.print(
            f"{name}: {len(returns.tries)} were refused and came back, {returns.kept:.0%} of them "
            f"were let in at their first return, {returns.in_vain} never; on average told "
            f"{mean(returns.told_s) or 0:.1f} s, and needed {mean(returns.needed_s) or 0:.1f} s",
            style="dim",
        )

    def _say(self, phase: Phase) -> None:
        ttft, tpot = phase.ttft(), phase.tpot()
        self._console.print(
            f"{phase.name}: {len(phase.records)} sent, {phase.share():.0%} let in, goodput "
            f"{phase.goodput:.0f} tokens/s, P99 TTFT {milliseconds(ttft.p99)}, TPOT "
            f"{milliseconds(tpot.p99)}; generator P99 {milliseconds(phase.lag_p99_s)} late; "
            f"cores {phase.cores}",
            style="dim",
        )
