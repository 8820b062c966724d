"""`python -m loadgen upgrade`: what operators do to a service, while no request may fail.

Rounds in turn:

    sigterm     a replica's process gets SIGTERM: it is replaced and emptied, and ends
    front       `serve deploy` of a setting of the ingress: its processes are exchanged
    replace     `serve deploy` of a setting of the replicas: each gets a successor, then goes
    scale       `serve deploy` of one decode replica more, or one fewer

then SIGTERM to the service itself: what is under way finishes before it ends. At the end, where
network namespaces can be made, a service on several nodes, which are drained, shut down and started
again one after the other. Every answer passes the strict checker and equals the undisturbed run's;
every round is over within the drain deadline and the time that successors need.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from loadgen.bench.cluster.service import ServiceUnderLoad, started_service
from loadgen.load.workload import RequestSpec
from loadgen.options import add_setting_argument, check_service, number, whole
from loadgen.report.experiment import REPORT_WIDTH, drop_rows, keep_rows, print_line, wide_console
from loadgen.report.output import add_out_argument
from loadgen.target import find_target
from loadgen.wire.capture import now_s
from tests.reliability.cluster.agent_client import AgentError
from tests.reliability.cluster.control import ClusterControl, cluster_control
from tests.reliability.load.mixed_load import MixedLoad, Tally
from tests.reliability.load.streams import StreamAnswer, StreamClients, clients_of, make_streams
from tests.reliability.upgrade_report import KINDS, NODE, Found, Round, figures, judge, table

DRAIN_S = 30.0
SUCCESSOR_S = 60.0
"""For new processes, on a machine that is busy with the load."""
SETTINGS = (
    "deterministic=true",
    "decode.rebatching=drex",
    "decode.pace=steady-15ms",
    "prefill_replicas=1",
    "engine.compile=wait",
    "engine.max_model_len=512",
    "engine.resources_cpus=0.05",
    "lifecycle.heartbeat_interval_s=0.5",
    f"lifecycle.drain_timeout_s={DRAIN_S:g}",
    "ingress.replicas=2",
)
NUM_SPECS = 12
SETTLE_S = 1.0
LOOK_EVERY_S = 0.1
FAREWELL_STREAMS = 8
FAREWELL_AFTER_S = 0.5
MANNERS = {"patient": 0.9, "slow": 0.1}


@dataclass(slots=True)
class State:
    """The settings that rounds change."""

    decode_replicas: int = 2
    max_slots: int = 32
    max_choices: int = 16

    def settings(self) -> list[str]:
        return [
            f"decode_replicas={self.decode_replicas}",
            f"decode.max_slots={self.max_slots}",
            f"ingress.max_choices={self.max_choices}",
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `upgrade`."""
    parser.add_argument(
        "--model", default="quadriga-s", help="bundled id, folder, GGUF file, or hub id"
    )
    parser.add_argument("--rounds", type=whole(1), default=20, help="changes under load")
    parser.add_argument("--node-rounds", type=whole(0), default=0, help="nodes that leave")
    parser.add_argument(
        "--only", action="append", choices=KINDS, help="only such rounds; may be repeated"
    )
    parser.add_argument("--places", type=whole(1), default=8, help="clients at once")
    parser.add_argument("--max-tokens", type=whole(2), default=120, help="of each stream")
    parser.add_argument("--budget-s", type=number(0), help="begin no round after this long")
    parser.add_argument("--seed", type=whole(0), default=0, help="of everything random")
    add_setting_argument(parser)
    add_out_argument(parser, "results/upgrade")


def run(args: argparse.Namespace) -> int:
    """Run it; 0 when no request failed."""
    check_service(args.model, args.set)
    console = wide_console(REPORT_WIDTH)
    began_s, found = time.monotonic(), Found()
    try:
        settings, log = [f"model={args.model}", *SETTINGS, *args.set], args.out / "service.log"
        with started_service([*settings, *State().settings()], log=log) as service:
            asyncio.run(Upgrade(args, service, settings, console).run(found, began_s))
        if args.node_rounds:
            run_nodes(args, found, console, began_s)
    finally:  # the rounds that were over are told of a run that is killed, too
        failures = judge(found, wanted_rounds=args.rounds, wanted_nodes=args.node_rounds)
        if found.rounds:
            console.print(table(found))
            seconds = round(time.monotonic() - began_s, 1)
            facts = figures(found) | {"failures": failures, "seconds": seconds, "seed": args.seed}
            print_line("upgrade", **facts)
        drop_rows("upgrade", args.out)
    return 1 if failures else 0


class Upgrade:
    """One run."""

    def __init__(
        self,
        args: argparse.Namespace,
        service: ServiceUnderLoad,
        settings: Sequence[str],
        console: Console,
    ) -> None:
        self._args = args
        self._service = service
        self._settings = settings
        self._console = console
        self._rng = random.Random(args.seed)
        self._state = State()

    async def run(self, found: Found, began_s: float) -> None:
        """All rounds, and the farewell."""
        args = self._args
        specs = make_streams(NUM_SPECS, max_tokens=args.max_tokens, seed=args.seed)
        kinds = args.only or KINDS
        async with clients_of(self._service) as clients:
            reference = await clients.reference(specs)
            target = await find_target(clients.http, None)
            load = MixedLoad(
                self._service,
                clients,
                target,
                specs,
                reference,
                places=args.places,
                seed=args.seed,
                manners=MANNERS,
            )
            found.tally = load.tally
            async with cluster_control(self._service) as control:
                running = asyncio.create_task(load.run())
                try:
                    for index in range(args.rounds):
                        if is_spent(args, began_s):
                            break
                        await asyncio.sleep(SETTLE_S)
                        found.rounds.append(await self._round(control, kinds[index % len(kinds)]))
                        tell(args, self._console, found, load.tally)
                finally:
                    load.stop()
                    await running
            await self._farewell(clients, specs, reference, found)

    async def _round(self, control: ClusterControl, kind: str) -> Round:
        began_s = now_s()
        try:
            trouble = await getattr(self, f"_{kind}")(control)
        except (AgentError, TimeoutError) as exc:
            trouble = f"{type(exc).__name__}: {exc}"
        return Round(kind, now_s() - began_s, trouble, began_s)

    async def _sigterm(self, control: ClusterControl) -> str:
        """A replica is asked to end; another one takes its place first."""
        pid, kind = self._rng.choice(sorted(control.pids("decode", "prefill").items()))
        os.kill(pid, signal.SIGTERM)
        return await self._until(
            lambda: pid not in control.pids(kind), control, f"the {kind} process does not end"
        )

    async def _front(self, control: ClusterControl) -> str:
        before = set(control.pids("ingress"))
        self._state.max_choices = 33 - self._state.max_choices
        await control.deploy([*self._settings, *self._state.settings()])
        return await self._until(
            lambda: not before & set(control.pids("ingress")),
            control,
            "an old ingress is still there",
        )

    async def _replace(self, control: ClusterControl) -> str:
        before = set(control.pids("decode", "ingress"))
        self._state.max_slots = 63 - self._state.max_slots
        await control.deploy([*self._settings, *self._state.settings()])
        return await self._until(
            lambda: not before & set(control.pids("decode", "ingress")),
            control,
            "an old process is still there",
        )

    async def _scale(self, control: ClusterControl) -> str:
        self._state.decode_replicas = wanted = 5 - self._state.decode_replicas
        await control.deploy([*self._settings, *self._state.settings()])
        return await self._until(
            lambda: len(control.pids("decode")) == wanted,
            control,
            f"there are not {wanted} replicas",
        )

    async def _until(
        self, is_done: Callable[[], bool], control: ClusterControl, trouble: str
    ) -> str:
        """Wait for the exchange and for all that is desired. Returns what is wrong."""
        give_up_s = now_s() + DRAIN_S + SUCCESSOR_S
        while not is_done():
            if now_s() > give_up_s:
                return trouble
            await asyncio.sleep(LOOK_EVERY_S)
        return await control.until_ready(max(1.0, give_up_s - now_s()))

    async def _farewell(
        self,
        clients: StreamClients,
        specs: Sequence[RequestSpec],
        reference: Sequence[list[int]],
        found: Found,
    ) -> None:
        """SIGTERM to the service while streams are under way: they finish, and it ends."""
        pid = self._service.pid
        assert pid is not None
        sending = [
            asyncio.create_task(clients.send(spec, is_grpc=index % 2 == 1))
            for index, spec in enumerate(specs[:FAREWELL_STREAMS])
        ]
        await asyncio.sleep(FAREWELL_AFTER_S)
        began_s = now_s()
        os.kill(pid, signal.SIGTERM)
        answers: list[StreamAnswer] = await asyncio.gather(*sending)
        for answer in answers:
            found.farewell.note(answer, reference[answer.spec.index])
        give_up_s = began_s + DRAIN_S + SUCCESSOR_S
        while _is_running(pid):
            if now_s() > give_up_s:
                return
            await asyncio.sleep(LOOK_EVERY_S)
        found.exit_s = now_s() - began_s


def tell(args: argparse.Namespace, console: Console, found: Found, tally: Tally) -> None:
    """A line for the newest round, and for all requests so far; a run that is killed has both."""
    done = found.rounds[-1]
    keep_rows("upgrade", [figures(found)], args.out)
    pause_s = done.longest(tally.silences, is_first=False)
    wait_s = done.longest(tally.silences, is_first=True)
    console.print(
        f"{done.kind}: {done.took_s:.1f} s, {done.trouble or 'ok'}; silent {pause_s:.2f} s, first"
        f" token after {wait_s:.2f} s; {tally.ok} answers, {tally.failed} failed,"
        f" {tally.refused} refused, {tally.differing} differ {'; '.join(tally.faults[:2])}",
        style="dim",
        markup=False,
    )


def is_spent(args: argparse.Namespace, began_s: float) -> bool:
    """Whether no more rounds begin."""
    return bool(args.budget_s) and time.monotonic() - began_s > args.budget_s


def run_nodes(args: argparse.Namespace, found: Found, console: Console, began_s: float) -> None:
    """Nodes leave and come back, where nodes can be made."""
    from deploy.multinode import why_not_here
    from tests.reliability.node_rounds import remove_nodes

    found.no_nodes = why_not_here() or ""
    if found.no_nodes:
        console.print(f"no nodes: {found.no_nodes}", style="dim", markup=False)
        return

    def done(round_began_s: float, took_s: float, trouble: str, tally: Tally) -> None:
        found.rounds.append(Round(NODE, took_s, trouble, round_began_s))
        tell(args, console, found, tally)

    found.nodes = asyncio.run(
        remove_nodes(
            args.model,
            rounds=args.node_rounds,
            num_specs=NUM_SPECS,
            max_tokens=args.max_tokens,
            places=args.places,
            seed=args.seed,
            settings=args.set,
            may_begin=lambda: not is_spent(args, began_s),
            done=done,
        )
    )


def _is_running(pid: int) -> bool:
    """Whether a child process of ours has not ended yet; it may wait to be asked for its status."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
