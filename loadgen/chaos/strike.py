"""One run of a cell: load, harm, judgement, and the wait until the service is itself again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

from loadgen.chaos import blows
from loadgen.chaos.cells import Moment, Victim
from loadgen.chaos.load import Answer, Clients
from loadgen.chaos.moments import NotReached, Scene, make_deep, reached, victim
from loadgen.chaos.orders import OrderFailed
from loadgen.chaos.rig import Rig
from loadgen.chaos.verdicts import CellResult
from loadgen.load.workload import RequestSpec
from loadgen.runner import now_s
from quadriga.metrics import parse_exposition

RESTORED_TIMEOUT_S = 90.0
HELD = (
    "quadriga_running_sequences",
    "quadriga_waiting_sequences",
    "quadriga_kv_reserved_tokens",
    "quadriga_kv_used_tokens",
    "quadriga_ingress_open_requests",
)
MAX_WAVES = 8
"""How often the streams are sent for one part in twenty to be met."""
MAX_ATTEMPTS = 4
"""How often a cell is run for one stream to be without its first token when it is struck."""
MOVABLE = (Victim.SCHEDULER, Victim.CONTROLLER, Victim.INGRESS)


async def run_cell(
    rig: Rig,
    clients: Clients,
    specs: Sequence[RequestSpec],
    reference: Sequence[list[int]],
    result: CellResult,
    rng: random.Random,
    whole: Counter[str],
) -> None:
    """Send all streams, harm one process, judge; returns when the service is whole again.

    A blow before the first token that came after the last stream's is judged, and struck again.

    Args:
        whole: Processes of each kind that the service has.
    """
    for _ in range(MAX_ATTEMPTS):
        waited, troubles = result.waiting, len(result.not_restored)
        await _run_once(rig, clients, specs, reference, result, rng, whole)
        is_met = result.cell.moment is not Moment.BEFORE_FIRST_TOKEN or result.waiting > waited
        if is_met or len(result.not_restored) > troubles:
            return
    result.not_restored.append("not struck: every stream had its first token by then")


async def _run_once(
    rig: Rig,
    clients: Clients,
    specs: Sequence[RequestSpec],
    reference: Sequence[list[int]],
    result: CellResult,
    rng: random.Random,
    whole: Counter[str],
) -> None:
    trouble = await _until_whole(rig, clients, whole)
    if trouble:  # an earlier cell was felt late
        result.not_restored.append(f"not struck: {trouble}")
        return
    cell, blow = result.cell, None
    sending: asyncio.Task[list[Answer]] | None = None
    try:
        if rig.nodes is not None and cell.victim in MOVABLE:
            # The loss of the head is the loss of the cluster.
            await rig.orders.order("scatter", cell.victim.value, rig.nodes.cluster.nodes[0].address)
            await _until_whole(rig, clients, whole)
        early = await blows.prepare(rig, cell, rng)
        if cell.moment is Moment.BEFORE_FIRST_TOKEN:  # no time is to be lost by looking then
            early = early or await victim(rig, cell, Scene(), rng)
        is_resumed = cell.victim is Victim.INGRESS or rig.nodes is not None

        def send() -> asyncio.Task[list[Answer]]:
            return asyncio.create_task(clients.send_all(specs, is_resumed=is_resumed))

        if not cell.is_struck_first:
            sending = send()
        async with reached(rig, cell, rng, result.runs) as scene:
            struck = early or await victim(rig, cell, scene, rng)
            blow = await blows.strike(rig, cell, struck, scene, rng)
            sending = sending or send()
            scene.let_go()
            answers = await sending
            while await blows.has_met_nothing(rig, blow) and len(answers) < MAX_WAVES * len(specs):
                answers += await send()
            result.add(answers, reference, struck_s=blow.struck_s)
            await blows.until_it_may_wake(rig, blow)
    except (NotReached, OrderFailed) as exc:
        result.not_restored.append(f"not struck: {exc}")
        if sending is not None:
            await sending
    finally:
        if blow is not None:
            trouble = await _undo(rig, blow)
            if trouble:
                result.not_restored.append(trouble)
    trouble = await _until_whole(rig, clients, whole)
    if not trouble and cell.moment is Moment.RESIZE:
        trouble = await make_deep(rig)
    if trouble:
        result.not_restored.append(trouble)


async def _undo(rig: Rig, blow: blows.Blow) -> str:
    try:
        return await blows.undo(rig, blow)
    except (OrderFailed, RuntimeError) as exc:
        return f"not undone: {exc}"


async def _until_whole(rig: Rig, clients: Clients, whole: Counter[str]) -> str:
    """Wait for as many processes as before, a healthy service, and nothing held anywhere.

    Returns:
        What is wrong after `RESTORED_TIMEOUT_S`; empty when all is well.
    """
    give_up_s = now_s() + RESTORED_TIMEOUT_S
    while True:
        trouble = await _trouble(rig, clients, whole)
        if not trouble or now_s() > give_up_s:
            return trouble
        await asyncio.sleep(0.25)


async def _trouble(rig: Rig, clients: Clients, whole: Counter[str]) -> str:
    now = rig.census()
    if now != whole:
        return f"processes are {dict(now)}, were {dict(whole)}"
    try:
        status, _ = await clients.http.fetch("GET", "/health")
        if status != 200:
            return f"/health says {status}"
        status, page = await clients.http.fetch_text("/metrics")
        if status != 200:
            return f"/metrics says {status}"
    except ConnectionError as exc:
        return f"the front door does not answer: {exc}"
    values = parse_exposition(page)
    ready = sum(1 for key in values if key.startswith("quadriga_slots{"))
    if ready != whole[Victim.PREFILL] + whole[Victim.DECODE]:
        return f"{ready} replicas report"
    held = {k: v for k, v in values.items() if v and k.split("{")[0] in HELD}
    if held:
        return f"still held: {held}"
    try:
        state = await rig.orders.order("status")
    except OrderFailed as exc:
        return f"the controller does not answer: {exc}"
    return "" if state["is_ready"] else f"the controller says: {state['replicas']}"
