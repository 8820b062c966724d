"""One run of a cell: load, harm, judgement, and the wait until the service is itself again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.load.workload import RequestSpec
from loadgen.wire.capture import now_s
from quadriga.observability.metrics import parse_exposition
from tests.reliability.chaos import fault_injector
from tests.reliability.chaos.cell_results import CellResult
from tests.reliability.chaos.fault_matrix import Cell, Moment, Victim
from tests.reliability.chaos.injection_points import (
    InjectionPoint,
    NotReached,
    at_injection_point,
    make_deep,
    victim,
)
from tests.reliability.cluster.agent_client import AgentError
from tests.reliability.cluster.baseline import HELD
from tests.reliability.cluster.stages import ServiceUnderTest
from tests.reliability.load.streams import StreamAnswer, StreamClients

RESTORED_TIMEOUT_S = 90.0
MAX_WAVES = 8
"""How often the streams are sent for one part in twenty to be met."""
STRUCK_WITHIN_S = (0.15, 0.06, 0.02, 0.0)
"""A blow before the first token comes so soon after the streams were sent, at random. One that came
after every first token is struck again, sooner; the last one at once, while the requests travel."""
MOVABLE = (Victim.SCHEDULER, Victim.CONTROLLER, Victim.INGRESS)


@dataclass(frozen=True, slots=True)
class Trials:
    """What all runs of a stage's cells have in common.

    Attributes:
        specs: The streams that are under way when a process is harmed.
        reference: Their token ids when nothing is.
        whole: Processes of each kind that the service has.
    """

    under_test: ServiceUnderTest
    clients: StreamClients
    specs: Sequence[RequestSpec]
    reference: Sequence[list[int]]
    rng: random.Random
    whole: Counter[str]

    async def run(self, result: CellResult) -> None:
        """Send all streams, harm one process, judge; returns when the service is whole again.

        A blow before the first token that came after the last stream's is judged, and struck again.
        """
        for within_s in STRUCK_WITHIN_S:
            waited, missed = result.waiting, len(result.not_struck)
            failures = len(result.not_restored)
            await self._run_once(result, within_s)
            if len(result.not_struck) > missed:
                return
            is_met = result.cell.moment is not Moment.BEFORE_FIRST_TOKEN or result.waiting > waited
            if is_met or len(result.not_restored) > failures:
                result.done += 1
                return
        result.not_struck.append("every stream had its first token by then")

    async def _run_once(self, result: CellResult, within_s: float) -> None:
        trouble = await self._until_whole()
        if trouble:  # an earlier cell was felt late
            result.not_struck.append(trouble)
            return
        try:
            await self._inject(result, within_s)
        except (NotReached, AgentError) as exc:
            result.not_struck.append(str(exc))
        trouble = await self._until_whole()
        if not trouble and result.cell.moment is Moment.RESIZE:
            trouble = await make_deep(self.under_test)
        if trouble:
            result.not_restored.append(trouble)

    async def _inject(self, result: CellResult, within_s: float) -> None:
        under_test, cell = self.under_test, result.cell
        sending: asyncio.Task[list[StreamAnswer]] | None = None
        injected: fault_injector.InjectedFault | None = None
        try:
            if under_test.nodes is not None and cell.victim in MOVABLE:
                # The loss of the head is the loss of the cluster.
                other = under_test.nodes.cluster.nodes[0].address
                await under_test.agent.call("scatter", cell.victim.value, other)
                await self._until_whole()
            early = await fault_injector.prepare(under_test, cell, self.rng)
            if cell.moment is Moment.BEFORE_FIRST_TOKEN:  # no time is to be lost by looking then
                early = early or await victim(under_test, cell, InjectionPoint(), self.rng)
            if not cell.is_struck_first:
                sending = self._send(cell)
            async with at_injection_point(
                under_test, cell, self.rng, number=result.runs, within_s=within_s
            ) as injection:
                struck = early or await victim(under_test, cell, injection, self.rng)
                injected = await fault_injector.inject(
                    under_test, cell, struck, injection, self.rng
                )
                sending = sending or self._send(cell)
                injection.let_go()
                answers = await sending
                most = MAX_WAVES * len(self.specs)
                while (
                    await fault_injector.has_met_nothing(under_test, injected)
                    and len(answers) < most
                ):
                    sending = self._send(cell)
                    await fault_injector.again(under_test, injected, injection)
                    answers += await sending
                result.add(answers, self.reference, injected_s=injected.injected_s)
                await fault_injector.until_it_may_wake(under_test, injected)
        except (NotReached, AgentError):
            if sending is not None:
                await sending
            raise
        finally:
            if injected is not None:
                await _undo(under_test, injected, result)

    def _send(self, cell: Cell) -> asyncio.Task[list[StreamAnswer]]:
        is_resumed = cell.victim is Victim.INGRESS or self.under_test.nodes is not None
        return asyncio.create_task(self.clients.send_all(self.specs, is_resumed=is_resumed))

    async def _until_whole(self) -> str:
        """Wait for as many processes as before, a healthy service, and nothing held anywhere.

        Returns:
            What is wrong after `RESTORED_TIMEOUT_S`; empty when all is well.
        """
        give_up_s = now_s() + RESTORED_TIMEOUT_S
        while True:
            trouble = await self._trouble()
            if not trouble or now_s() > give_up_s:
                return trouble
            await asyncio.sleep(0.25)

    async def _trouble(self) -> str:
        now = self.under_test.census()
        if now != self.whole:
            return f"processes are {dict(now)}, were {dict(self.whole)}"
        http = self.clients.http
        try:
            status, _ = await http.fetch("GET", "/health")
            if status != 200:
                return f"/health says {status}"
            status, page = await http.fetch_text("/metrics")
            if status != 200:
                return f"/metrics says {status}"
        except ConnectionError as exc:
            return f"the front door does not answer: {exc}"
        values = parse_exposition(page)
        ready = sum(1 for key in values if key.startswith("quadriga_slots{"))
        if ready != self.whole[Victim.PREFILL] + self.whole[Victim.DECODE]:
            return f"{ready} replicas report"
        held = {k: v for k, v in values.items() if v and k.split("{")[0] in HELD}
        if held:
            return f"still held: {held}"
        try:
            state = await self.under_test.agent.call("status")
        except AgentError as exc:
            return f"the controller does not answer: {exc}"
        return "" if state["is_ready"] else f"the controller says: {state['replicas']}"


async def _undo(
    under_test: ServiceUnderTest, injected: fault_injector.InjectedFault, result: CellResult
) -> None:
    try:
        missed = await fault_injector.undo(under_test, injected)
    except (AgentError, RuntimeError) as exc:
        result.not_restored.append(f"not undone: {exc}")
        return
    if missed:
        result.not_struck.append(missed)
