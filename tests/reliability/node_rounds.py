"""Nodes that leave and come back under load, each in a network namespace of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.target import find_target
from loadgen.wire.capture import now_s
from tests.reliability.chaos.fault_matrix import Stage
from tests.reliability.cluster.agent_client import AgentError
from tests.reliability.cluster.stages import started_stage
from tests.reliability.load.mixed_load import MixedLoad, Tally
from tests.reliability.load.streams import clients_of, make_streams

if TYPE_CHECKING:
    from tests.reliability.cluster.stages import Process, ServiceUnderTest

GRACE_S = 10.0
"""From SIGTERM to SIGKILL, as of a machine that is shut down."""
DRAIN_S = 60.0
READY_TIMEOUT_S = 120.0
LOOK_EVERY_S = 0.25
SETTLE_S = 1.0
LEAVING = ("ingress", "prefill", "decode")
"""Those that leave a node that is drained; scheduler and controller go with it and come back."""


async def remove_nodes(
    model: str,
    *,
    rounds: int,
    num_specs: int,
    max_tokens: int,
    places: int,
    seed: int,
    settings: Sequence[str],
    may_begin: Callable[[], bool],
    done: Callable[[float, float, str, Tally], None],
) -> Tally:
    """Shut nodes down and start them again, in turns, while clients ask.

    Args:
        rounds: So many nodes, one after the other.
        may_begin: Asked before each.
        done: Called after each with when it began, the seconds until all was whole again, what is
            wrong, and what has become of the requests so far.

    Returns:
        What became of the requests.

    Raises:
        ConfigError: There are no such nodes here; says why.
    """
    specs = make_streams(num_specs, max_tokens=max_tokens, seed=seed)
    with tempfile.TemporaryDirectory(prefix="quadriga-nodes-") as folder:
        async with (
            started_stage(Stage.NODES, model, settings, Path(folder)) as under_test,
            clients_of(under_test.service) as clients,
        ):
            reference = await clients.reference(specs)
            target = await find_target(clients.http, None)
            load = MixedLoad(
                under_test.service, clients, target, specs, reference, places=places, seed=seed
            )
            running = asyncio.create_task(load.run())
            try:
                assert under_test.nodes is not None
                names = [
                    n.name
                    for n in under_test.nodes.cluster.nodes
                    if n.role in ("decode", "prefill")
                ]
                for index in range(rounds):
                    if not may_begin():
                        break
                    await asyncio.sleep(SETTLE_S)
                    began_s = now_s()
                    trouble = await _away_and_back(under_test, names[-1 - index % len(names)])
                    done(began_s, now_s() - began_s, trouble, load.tally)
            finally:
                load.stop()
                await running
            return load.tally


async def _away_and_back(under_test: ServiceUnderTest, node: str) -> str:
    """Drain, shut down and start one node again. Returns what is wrong in the end."""
    trouble = await _drain(under_test, node)
    if trouble:
        return trouble
    pids: list[int] = await under_test.on_nodes("processes", node)
    _signal(pids, signal.SIGTERM)
    give_up_s = now_s() + GRACE_S
    while left := [p for p in await under_test.on_nodes("processes", node) if p in pids]:
        if now_s() > give_up_s:
            _signal(left, signal.SIGKILL)
        await asyncio.sleep(LOOK_EVERY_S)
    await under_test.on_nodes("start_node", node)
    give_up_s = now_s() + READY_TIMEOUT_S
    while True:
        status: dict[str, Any] = {}
        with contextlib.suppress(AgentError):
            status = await under_test.agent.call("status")
        if status.get("is_ready"):
            return ""
        if now_s() > give_up_s:
            return f"{node}: {status.get('num_ready')} of {status.get('num_desired')} replicas"
        await asyncio.sleep(LOOK_EVERY_S)


async def _drain(under_test: ServiceUnderTest, node: str) -> str:
    """Tell Ray that a node goes, and wait until no process that clients need is there.

    Returns what is wrong.
    """
    assert under_test.nodes is not None
    cluster = under_test.nodes.cluster
    status = await asyncio.to_thread(cluster.status)
    node_id = next(r["node_id"] for r in status["replicas"] if r["node"] == node)
    (address,) = (n.address for n in cluster.nodes if n.name == node)
    words = [*cluster.on_head(), sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    words += ["--address", cluster.gcs_address, "--node-id", node_id]
    words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the node is removed"]
    words += ["--deadline-remaining-seconds", f"{DRAIN_S:.0f}"]
    process = await asyncio.create_subprocess_exec(
        *words,
        env={**os.environ, **cluster.environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(DRAIN_S):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"{node} is not drained: the command does not end"
    if process.returncode:
        return f"{node} is not drained: {said.decode(errors='replace')[-300:]}"
    give_up_s = now_s() + DRAIN_S
    while staying := [p.name for p in await under_test.all_processes() if _is_on(p, address)]:
        if now_s() > give_up_s:
            return f"{', '.join(staying)} on {node}, which is drained"
        await asyncio.sleep(LOOK_EVERY_S)
    return ""


def _is_on(process: Process, address: str) -> bool:
    return process.node == address and process.kind in LEAVING


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
