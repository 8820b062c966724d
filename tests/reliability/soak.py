"""`python -m loadgen soak`: random load and random harm for an hour; then all must be as before.

Patient, impatient and slow clients over both doors; running sequences are moved, depths changed,
processes killed. Every answer passes the strict checker and equals the undisturbed run's. Then
the load stops, and blocks, slots, leases, actors, processes, file descriptors and memory must be
back at their base line; a line fitted to a process's memory must not rise. Replicas that were
started on the way touch KV for the first time: they are compared with the base line alone.
With `--all-on` it is the service with every feature in use; see `tests.reliability.all_on`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadgen.bench.cluster.service import ServiceUnderLoad, started_service
from loadgen.comparison.pairs import LEAST_RATIO, PairedRatio
from loadgen.options import add_setting_argument, check_service, number, whole
from loadgen.report.experiment import REPORT_WIDTH, drawn, print_line, table_of, wide_console
from loadgen.report.output import add_out_argument
from loadgen.target import find_target
from loadgen.wire.capture import now_s
from quadriga.errors import ConfigError
from quadriga.files import write_atomically
from tests.reliability import all_on
from tests.reliability.cluster.baseline import ResourceBaseline, take, trouble_with
from tests.reliability.cluster.control import REPLICAS, ClusterControl, cluster_control
from tests.reliability.cluster.process_resources import Series, Slope, process_resources
from tests.reliability.load.mixed_load import MixedLoad, Tally
from tests.reliability.load.random_faults import MOVES, WEIGHTS, RandomFaults
from tests.reliability.load.streams import StreamClients, clients_of, make_streams

SETTINGS = (
    "deterministic=true",
    "decode.rebatching=drex",
    "decode.pace=steady-15ms",
    "prefill_replicas=2",
    "decode_replicas=3",
    "engine.compile=wait",
    "engine.max_model_len=512",
    "engine.resources_cpus=0.05",
    "lifecycle.heartbeat_interval_s=0.5",
)
NUM_SPECS = 16
READY_TIMEOUT_S = 240.0
CALM_S = 3.0
"""Without load before the base line is taken, and at least before it is compared."""
WARM_UP_EVERY_S = 0.2
WARM_UP_CROWD, WARM_UP_TOKENS = 4, 320
"""Times as many clients before long runs, and their tokens: all KV was touched by then."""
SETTLING_SHARE = 0.5
"""Of a process's time is left out of its line: caches still fill, allocators find their size."""
SETTLING_S = 300.0
"""And no less than this of those that were started on the way, which fill up from nothing."""
MIB = 1 << 20
RESULTS = "soak.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `soak`."""
    parser.add_argument("--model", help="bundled id, folder, GGUF or hub id; default: quadriga-s")
    parser.add_argument("--minutes", type=number(0), default=60.0, help="of load and harm")
    parser.add_argument("--warm-up-s", type=number(0), default=30.0, help="load before base line")
    parser.add_argument("--places", type=whole(1), default=10, help="clients at once")
    parser.add_argument("--max-tokens", type=whole(2), default=120, help="of each stream")
    parser.add_argument("--every-s", type=number(0), default=2.0, help="mean time between harms")
    parser.add_argument("--seed", type=whole(0), default=0, help="of everything random")
    parser.add_argument(
        "--max-slope", type=number(0), default=20.0, help="MiB an hour that a process may grow"
    )
    parser.add_argument(
        "--all-on", action="store_true", help="quadriga-s and quadriga-l with every feature in use"
    )
    parser.add_argument(
        "--turn-s", type=number(0), default=20.0, help="rescheduling on and off, with --all-on"
    )
    add_setting_argument(parser)
    add_out_argument(parser, "results/soak")


def run(args: argparse.Namespace) -> int:
    """Run it; 0 when every answer was right and everything is back at its base line."""
    if args.all_on and args.model:
        text = f"{args.model}: --all-on serves two models of its own; leave one of both out"
        raise ConfigError(f"--model: {text}", param="model")
    check_service(model := args.model or "quadriga-s", args.set)
    console = wide_console(REPORT_WIDTH)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quadriga-soak-") as folder:
        if args.all_on:
            pools = Path(folder) / "pools.yaml"
            pools.write_text(all_on.POOLS, encoding="utf-8")
            settings = ["--config", str(pools), *all_on.SETTINGS, *args.set]
        else:
            settings = [f"model={model}", *SETTINGS, *args.set]
        plot = args.out / "memory.png"
        with started_service(settings, log=args.out / "service.log") as service:
            soak = Soak(args, service, console)
            try:
                asyncio.run(soak.run())
                soak.is_over = True
            finally:  # what was seen is told of a run that is killed, too
                try:
                    write_atomically(args.out / RESULTS, soak.results())
                    soak.plot(plot)
                finally:  # and where the disk is full
                    console.print(soak.table())
                    seconds = round(time.monotonic() - began_s, 1)
                    print_line("soak", **soak.summary(), plot=str(plot), seconds=seconds)
    return 0 if not soak.failures() else 1


class Soak:
    """One run.

    Attributes:
        is_over: It came to its end.
    """

    def __init__(
        self, args: argparse.Namespace, service: ServiceUnderLoad, console: Console
    ) -> None:
        self.is_over = False
        self._args = args
        self._service = service
        self._console = console
        self._series: dict[int, Series] = {}
        self._harms: list[tuple[float, str]] = []
        self._slopes: dict[int, Slope] = {}
        self._troubles: list[str] = []
        self._load: MixedLoad | None = None
        self._free: MixedLoad | None = None
        self._harm: RandomFaults | None = None
        self._turns = all_on.ReschedulingTurns()
        self._ratio: PairedRatio | None = None
        self._counted: dict[str, float] = {}

    async def run(self) -> None:
        """Warm up, take the base line, soak, compare."""
        args = self._args
        make = all_on.exact_streams if args.all_on else make_streams
        specs = make(NUM_SPECS, max_tokens=args.max_tokens, seed=args.seed)
        model = all_on.EXACT_MODEL if args.all_on else None
        num_free = round(all_on.FREE_SHARE * args.places) if args.all_on else 0
        num_exact = args.places - num_free
        async with (
            clients_of(self._service, model) as clients,
            clients_of(self._service, all_on.FREE_MODEL if num_free else None) as free_clients,
            cluster_control(self._service) as control,
        ):
            target = await find_target(clients.http, model)
            reference = await clients.reference(specs)

            def load(seed: int, places: int, max_tokens: int) -> MixedLoad:
                asked = [replace(spec, max_tokens=max_tokens) for spec in specs]
                return MixedLoad(
                    self._service, clients, target, asked, reference, places=places, seed=seed
                )

            crowd, long = 1, args.max_tokens
            if 60.0 * args.minutes > SETTLING_S:
                crowd, long = WARM_UP_CROWD, max(long, WARM_UP_TOKENS)
            warming = [load(args.seed, crowd * num_exact, long)]
            warming[0].excuse(math.inf)
            if num_free:
                warming.append(await self._free_load(free_clients, crowd * num_free, long))
                self._free = await self._free_load(free_clients, num_free, args.max_tokens)
            await self._warm_up(control, warming)
            trouble = await control.until_ready(READY_TIMEOUT_S)
            await asyncio.sleep(CALM_S)
            before = await take(control, clients.http)
            if trouble or before.held:
                self._troubles.append(f"no base line: {trouble or before.held}")
                return
            self._say(f"base line: {before}")
            counted = await all_on.counted(clients.http)
            self._load = load(args.seed + 1, num_exact, args.max_tokens)
            self._harm = RandomFaults(
                control,
                self._load,
                random.Random(args.seed),
                every_s=args.every_s,
                note=lambda what: self._harms.append((now_s(), what)),
                weights=all_on.WEIGHTS if args.all_on else WEIGHTS,
            )
            sampling = asyncio.create_task(self._sample(control))
            harming = asyncio.create_task(self._harm.run())
            try:
                await self._drive_all(control, self._load, 60.0 * args.minutes)
            finally:
                await self._end("harm", harming)
                await self._harm.settle()
                await self._end("sampling of memory", sampling)
            await self._compare(control, before, clients.http)
            after = await all_on.counted(clients.http)
            self._counted = {name: count - counted[name] for name, count in after.items()}

    async def _free_load(self, clients: StreamClients, places: int, max_tokens: int) -> MixedLoad:
        """The load whose answers need not be those of the undisturbed run."""
        target = await find_target(clients.http, all_on.FREE_MODEL)
        specs = all_on.free_streams(NUM_SPECS, max_tokens=max_tokens, seed=self._args.seed)
        load = MixedLoad(
            self._service,
            clients,
            target,
            specs,
            [[] for _ in specs],
            places=places,
            seed=self._args.seed + 2,
        )
        load.excuse(math.inf)
        return load

    async def _drive_all(self, control: ClusterControl, load: MixedLoad, seconds: float) -> None:
        """All loads; with rescheduling on and off in turns where every feature is in use."""
        if self._free is None:
            await self._drive(load, seconds)
            return
        loads, args = (load, self._free), self._args
        turns = asyncio.create_task(self._turns.run(control, args.turn_s))
        easy, hard = (
            all_on.free_streams(
                NUM_SPECS, max_tokens=args.max_tokens, seed=args.seed, threshold=threshold
            )
            for threshold in (all_on.EASY, all_on.HARD)
        )
        asking = asyncio.create_task(all_on.take_turns(self._free.ask, easy, hard, args.turn_s))
        try:
            await asyncio.gather(*(self._drive(one, seconds) for one in loads))
        finally:
            await self._end("rescheduling in turns", turns)
            await self._end("asking in turns", asking)
        tallies = [one.tally for one in loads]
        self._ratio = self._turns.ratio(lambda a, b: sum(t.tokens_between(a, b) for t in tallies))

    async def _warm_up(self, control: ClusterControl, loads: Sequence[MixedLoad]) -> None:
        """Load and moves, so that what is made once is there: kernels, buffers, channels."""
        rng = random.Random(self._args.seed)
        moving = asyncio.create_task(
            RandomFaults(control, loads[0], rng, every_s=WARM_UP_EVERY_S, weights=MOVES).run()
        )
        try:
            await asyncio.gather(*(self._drive(load, self._args.warm_up_s) for load in loads))
        finally:
            await self._end("moving", moving)

    async def _end(self, what: str, task: asyncio.Task[None]) -> None:
        """End what goes on for ever; whatever has ended by itself did not do its work."""
        task.cancel()
        (end,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(end, asyncio.CancelledError):
            self._troubles.append(f"the {what} ended by itself: {end!r}")

    async def _drive(self, load: MixedLoad, seconds: float) -> None:
        running = asyncio.create_task(load.run())
        await asyncio.wait([running], timeout=seconds)
        load.stop()
        await running

    async def _sample(self, control: ClusterControl) -> None:
        """Note every process's memory, for ever; a run that is killed leaves what it has."""
        pause_s = max(0.25, min(5.0, self._args.minutes / 4))
        while True:
            kinds = ("prefill", "decode", "ingress", "scheduler", "controller")
            for pid, kind in control.pids(*kinds).items():
                if (held := process_resources(pid)) is not None:
                    self._series.setdefault(pid, Series(kind)).add(now_s(), held)
            with suppress(OSError):  # a disk that is full is told of at the end
                await asyncio.to_thread(write_atomically, self._args.out / RESULTS, self.results())
            await asyncio.sleep(pause_s)

    async def _compare(
        self, control: ClusterControl, before: ResourceBaseline, http: object
    ) -> None:
        """Wait until everything is as it was, and fit the lines."""
        give_up_s = now_s() + READY_TIMEOUT_S
        while True:
            await asyncio.gather(control.agent.call("rest_channels"), return_exceptions=True)
            await asyncio.sleep(CALM_S)
            after = await take(control, http)  # type: ignore[arg-type]
            troubles = trouble_with(before, after)
            if not troubles or now_s() > give_up_s:
                break
        self._troubles += troubles
        self._say(f"afterwards: {after}")
        self._judge_memory(before)

    def _judge_memory(self, before: ResourceBaseline) -> None:
        for pid, series in self._series.items():
            if series.kind in REPLICAS and pid not in before.by_pid:
                continue
            settling_s = min(SETTLING_S, SETTLING_SHARE * 60.0 * self._args.minutes)
            fitted = series.memory_slope(SETTLING_SHARE, settling_s)
            if fitted is None:
                self._say(f"{series.kind} {pid}: memory not judged, it was seen too seldom")
                continue
            self._slopes[pid] = fitted
            if fitted.is_leak(self._args.max_slope * MIB):
                self._troubles.append(
                    f"{series.kind} {pid} grows by {fitted.per_h / MIB:.0f} MiB an hour"
                )
        if self._args.minutes >= 1 and not self._slopes:  # which is time for a hundred samples
            self._troubles.append("no process's memory was judged")

    def failures(self) -> list[str]:
        """All that went wrong; empty: the run passed."""
        found = [*self._troubles, *["the run was broken off"] * (not self.is_over)]
        if self._load is None or not self._load.tally.is_ok:
            found.append("answers failed" if self._load is not None else "the run did not begin")
        if self._free is not None and not self._free.tally.is_ok:
            found.append(f"answers of {all_on.FREE_MODEL} failed")
        ratio = self._ratio
        if self._args.all_on and (ratio is None or ratio.high is None):
            found.append("rescheduling: fewer than 2 pairs of turns; raise --minutes")
        if ratio is not None and ratio.is_surely_below(LEAST_RATIO):
            found.append(f"tokens/s with rescheduling over without is {ratio}, below {LEAST_RATIO}")
        if self._harm is not None:
            found += self._harm.failures
            found += [f"no {kind} succeeded" for kind in self._harm.never_done()]
        return found

    def table(self) -> Table:
        """Memory by process: first and last, and the line's slope."""
        of, slopes = self._series, self._slopes
        columns: dict[str, Callable[[int], object]] = {
            "process": lambda pid: pid,
            "kind": lambda pid: of[pid].kind,
            "seconds": lambda pid: f"{of[pid].times_s[-1] - of[pid].times_s[0]:.0f}",
            "files": lambda pid: f"{of[pid].num_fds[0]} → {of[pid].num_fds[-1]}",
            "first MiB": lambda pid: f"{of[pid].own_bytes[0] / MIB:.1f}",
            "last MiB": lambda pid: f"{of[pid].own_bytes[-1] / MIB:.1f}",
            "MiB an hour": lambda pid: f"{slopes[pid].per_h / MIB:.1f}",
            "±": lambda pid: f"{slopes[pid].error / MIB:.1f}",
        }
        return table_of(sorted(slopes, key=lambda pid: of[pid].kind), columns)

    def results(self) -> bytes:
        """The last line with the own memory of every process, [seconds, MiB] each, as JSON."""
        memory = {
            f"{one.kind} {pid}": [
                [round(t, 1), round(b / MIB, 2)]
                for t, b in zip(one.times_s, one.own_bytes, strict=True)
            ]
            for pid, one in self._series.items()
        }
        return json.dumps(self.summary() | {"memory": memory}).encode()

    def plot(self, path: Path) -> None:
        """Draw the memory of every process, with the harms as ticks."""
        kinds = sorted({series.kind for series in self._series.values()})
        start_s = min((s.times_s[0] for s in self._series.values()), default=0.0)
        with drawn(path, size=(9, 4.5)) as [[axes]]:
            for series in self._series.values():
                minutes = [(t - start_s) / 60.0 for t in series.times_s]
                colour = f"C{kinds.index(series.kind)}"
                axes.plot(minutes, [b / MIB for b in series.own_bytes], color=colour, linewidth=1)
            for index, kind in enumerate(kinds):
                axes.plot([], [], color=f"C{index}", label=kind)
            for at_s, what in self._harms:
                if what == "kill":
                    axes.axvline((at_s - start_s) / 60.0, color="0.8", linewidth=0.6, zorder=0)
            axes.set(xlabel="minutes (grey: a process is killed)", ylabel="own memory, MiB")
            axes.set_ylim(bottom=0)
            if kinds:
                axes.legend(loc="lower right", fontsize="small")

    def summary(self) -> dict[str, Any]:
        """The last line."""
        tally, of = (self._load.tally if self._load is not None else Tally()), self._series
        tallies = [tally] + ([self._free.tally] if self._free is not None else [])
        judged = [(f"{of[pid].kind} {pid}", of[pid], f) for pid, f in self._slopes.items()]
        return {
            "failed": sum(one.failed for one in tallies),
            "differing": tally.differing,
            "duplicated": sum(one.duplicated for one in tallies),
            "leaked": len(self._troubles),
            **{name: int(self._counted.get(name, 0)) for name in all_on.COUNTED},
            "rescheduling_on_over_off": self._ratio and self._ratio.as_dict(),
            "failures": self.failures(),
            "sent": dict(tally.sent),
            "ok": tally.ok,
            "hung_up": tally.hung_up,
            "refused": tally.refused,
            "rebuilt": tally.rebuilt,
            "tokens": tally.came.total(),
            "worst_silence_s": round(tally.worst_silence_s, 2),
            "faults": [fault for one in tallies for fault in one.faults[:5]],
            "harms": dict(self._harm.done) if self._harm else {},
            "slopes_mib_per_h": {
                name: [round(fitted.per_h / MIB, 1), round(fitted.error / MIB, 1)]
                for name, _, fitted in judged
            },
            "files": {name: [of.num_fds[0], of.num_fds[-1]] for name, of, _ in judged},
            "minutes": self._args.minutes,
            "seed": self._args.seed,
        }

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)
