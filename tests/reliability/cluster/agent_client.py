"""Gives orders to the fault agent inside a cluster, and waits for its answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError

READY_TIMEOUT_S = 90.0
ANSWER_TIMEOUT_S = 70.0
END_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 20


class AgentError(Exception):
    """What the agent could not do, in its words."""


class AgentClient:
    """See `tests.reliability.cluster.fault_agent.FaultAgent` for the orders there are."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[0] = self._ready
        self._reading = asyncio.create_task(self._read())

    async def until_ready(self, log: Path) -> None:
        """Wait until the agent has joined the cluster. Raises: ConfigError: It did not."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await asyncio.shield(self._ready)
        except (TimeoutError, AgentError) as exc:
            said = await asyncio.to_thread(log.read_text, errors="replace")
            raise ConfigError(
                f"the agent in the cluster did not come up: {exc}\n{said[-2000:]}"
            ) from exc

    async def call(self, verb: str, *args: Any) -> Any:
        """Have something done and return what came of it. Raises: OrderFailed."""
        if self._reading.done():
            raise AgentError("the agent in the cluster has ended")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        assert self._process.stdin is not None
        line = json.dumps({"number": number, "verb": verb, "args": args}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await future
        except (TimeoutError, OSError) as exc:
            raise AgentError(f"{verb}: no answer from the agent: {exc!r}") from exc
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """End the agent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            await self._process.wait()
        self._reading.cancel()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if not line.startswith(b"{"):
                continue  # Ray's own words
            reply = json.loads(line)
            future = self._waiting.get(reply["number"])
            if future is None or future.done():
                continue
            if "error" in reply:
                future.set_exception(AgentError(reply["error"]))
            else:
                future.set_result(reply["value"])
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(AgentError("the agent in the cluster has ended"))


@asynccontextmanager
async def started_agent(
    address: str, *, log: Path, prefix: Sequence[str] = (), environment: Mapping[str, str]
) -> AsyncIterator[AgentClient]:
    """Start an agent in the cluster at an address, and end it with the block.

    Args:
        prefix: Command that runs another one where the cluster is.

    Raises:
        ConfigError: It did not come up.
    """
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            *(*prefix, sys.executable, "-m", "tests.reliability.cluster.fault_agent", address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            env={**os.environ, **environment},
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
    orders = AgentClient(process)
    try:
        await orders.until_ready(log)
        yield orders
    finally:
        await orders.close()
