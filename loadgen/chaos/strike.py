"""One run of a cell: load, harm, judgement, and the wait until the service is itself again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from loadgen.bench.process_cpu import service_processes
from loadgen.bench.service import Service
from loadgen.chaos.cells import Fault, Moment, Victim
from loadgen.chaos.load import Clients
from loadgen.chaos.verdicts import CellResult
from loadgen.runner import now_s
from loadgen.workload import RequestSpec
from quadriga.metrics import parse_exposition

RESTORED_TIMEOUT_S = 90.0
WAKE_AFTER_S = 25.0
"""A process that is stopped in mid-stream sleeps until it was replaced, and for so long at most.
One that is stopped earlier is woken as soon as the streams have ended. What either does then is
part of the test."""
FIRST_TOKEN_S = 0.15
"""About when the streams get their first tokens."""
HELD = (
    "quadriga_running_sequences",
    "quadriga_waiting_sequences",
    "quadriga_kv_reserved_tokens",
    "quadriga_kv_used_tokens",
    "quadriga_ingress_open_requests",
)


def census(service: Service) -> Counter[str]:
    """How many processes of each kind that can be a victim are there."""
    assert service.pid is not None
    found = service_processes(service.pid)
    return Counter({victim.value: len(found.get(victim.value, ())) for victim in Victim})


async def run_cell(
    service: Service,
    clients: Clients,
    specs: Sequence[RequestSpec],
    reference: Sequence[list[int]],
    result: CellResult,
    rng: random.Random,
) -> None:
    """Send all streams, harm one process, judge; returns when the service is whole again."""
    assert service.pid is not None
    cell = result.cell
    whole = census(service)
    victims = service_processes(service.pid)[cell.victim.value]
    pid = rng.choice(victims)
    sending = asyncio.create_task(clients.send_all(specs))
    is_early = cell.moment is Moment.BEFORE_FIRST_TOKEN
    await asyncio.sleep(rng.uniform(0.0, FIRST_TOKEN_S) if is_early else rng.uniform(0.4, 1.2))
    struck_s = now_s()
    os.kill(pid, cell.fault.number)
    try:
        result.add(await sending, reference, struck_s=struck_s)
        while cell.fault is Fault.STOP and not is_early and _is_there(pid):
            if now_s() - struck_s > WAKE_AFTER_S:
                break
            await asyncio.sleep(0.25)
    finally:
        if cell.fault is Fault.STOP:
            _signal(pid, signal.SIGCONT)
    trouble = await _until_whole(service, clients, whole)
    if trouble:
        result.not_restored.append(trouble)


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def _until_whole(service: Service, clients: Clients, whole: Counter[str]) -> str:
    """Wait for as many processes as before, a healthy service, and nothing held anywhere.

    Returns:
        What is wrong after `RESTORED_TIMEOUT_S`; empty when all is well.
    """
    give_up_s = now_s() + RESTORED_TIMEOUT_S
    while True:
        trouble = await _trouble(service, clients, whole)
        if not trouble or now_s() > give_up_s:
            return trouble
        await asyncio.sleep(0.25)


async def _trouble(service: Service, clients: Clients, whole: Counter[str]) -> str:
    now = census(service)
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
    return f"still held: {held}" if held else ""
