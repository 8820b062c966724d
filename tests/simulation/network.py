"""Calls and KV between replicas of one process: each asks `Choices` what becomes of it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import torch

from quadriga.background import background
from quadriga.core.kv import KVPart
from quadriga.errors import KVTransportError, ReplicaDied, ReplicaError
from tests.simulation.choices import Choices

WIRE_S = 0.001
LATE_S = 4.5
"""A late call arrives when its caller has given it up."""

CALL_FATES = (
    "arrives",
    "is lost",
    "its answer is lost",
    "arrives late",
    "the callee dies before it",
    "the callee dies after it",
    "the callee cannot be reached",
    "is cancelled by the client meanwhile",
    "the caller dies meanwhile",
)
"""Of a call to a decode replica; the first is what ought to happen."""
PART_FATES = (
    "arrives",
    "is lost",
    "its answer is lost",
    "arrives late",
    "the callee dies before it",
    "is cancelled by the client meanwhile",
    "the caller dies meanwhile",
)


class Network:
    """What replicas see of each other.

    Attributes:
        replicas: Those that are called, by name: they have a `receiver`.
        dead: Replicas that have died. Whatever a dead one still tries has no effect.
        is_cancelled: The client has gone; it goes once.
    """

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.replicas: dict[str, Any] = {}
        self.dead: set[str] = set()
        self.is_cancelled = False

    # What a world adds

    def look(self) -> None:
        """Note what must hold at every moment; called at each fault and after each call."""

    def state(self) -> Hashable:
        """What the world looks like now."""

    def died(self, name: str) -> None:
        """A replica has just died."""

    def cancel(self) -> None:
        """The client has just gone."""

    async def other_call(self, name: str, method: str, *args: Any) -> Any:
        """A call to something that is none of the replicas."""
        raise NotImplementedError(method)

    # Calls

    def call_of(self, caller: str) -> Any:
        """As `actors.rpc.ray_rpc.call`, made by one replica."""

        async def call(name: str, method: str, *args: Any, timeout_s: float) -> Any:
            return await self._call(caller, name, method, *args, timeout_s=timeout_s)

        return call

    def transport_of(self, caller: str) -> Any:
        """As a `KVTransport`, of one replica. Nothing is under way that an abort could stop."""

        async def send(peer: str, part: KVPart, kv: torch.Tensor, *, deadline_s: float) -> None:
            await self._send(caller, peer, part, kv, deadline_s)

        async def abort(peer: str, transfer_id: str) -> None:
            pass

        return SimpleNamespace(name="local", send=send, abort=abort)

    async def _call(self, caller: str, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        await self._end_if_dead(caller)
        if name not in self.replicas:
            return await self.other_call(name, method, *args)
        args = pickle.loads(pickle.dumps(args))
        what = args[0] if method == "call_many" else method
        if name in self.dead:
            raise ReplicaDied(f"{name} died")
        fate = self._fate(f"{what} at {name}", CALL_FATES)
        # What was sent takes effect, whatever becomes of the caller.
        made = background(self._carry(caller, name, method, args, fate))
        made.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(timeout_s):
                answer = await asyncio.shield(made)
        except TimeoutError as exc:
            await self._end_if_dead(caller)
            raise ReplicaError(f"{name} did not answer {what}", code="timeout") from exc
        except ReplicaError:
            await self._end_if_dead(caller)
            raise
        await self._end_if_dead(caller)
        return pickle.loads(pickle.dumps(answer))

    async def _carry(self, caller: str, name: str, method: str, args: Any, fate: str) -> Any:
        """Bring a call to its callee, and the answer back."""
        await asyncio.sleep(WIRE_S)
        self._befall(fate, caller, name)
        if fate == "is lost":
            await asyncio.Event().wait()
        if fate == "arrives late":
            await asyncio.sleep(LATE_S)
        if fate == "the callee cannot be reached":
            raise ReplicaDied(f"{name} is not reachable", code="unreachable")
        if name in self.dead:
            raise ReplicaDied(f"{name} died")
        answer = await getattr(self.replicas[name], method)(*args)
        self.look()
        if fate == "the callee dies after it":
            self._kill(name)
            raise ReplicaDied(f"{name} died")
        if fate == "its answer is lost":
            await asyncio.Event().wait()
        await asyncio.sleep(WIRE_S)
        return answer

    async def _send(
        self, caller: str, peer: str, part: KVPart, kv: torch.Tensor, deadline_s: float
    ) -> None:
        await self._end_if_dead(caller)
        if peer in self.dead:
            raise KVTransportError(f"{peer} is gone")
        fate = self._fate(f"part {part.index} to {peer}", PART_FATES)
        made = background(self._carry_part(caller, peer, part, kv.clone(), fate))
        made.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(made)
        except TimeoutError as exc:
            raise KVTransportError(f"part {part.index} was not acknowledged") from exc
        await self._end_if_dead(caller)

    async def _carry_part(
        self, caller: str, peer: str, part: KVPart, kv: torch.Tensor, fate: str
    ) -> None:
        await asyncio.sleep(WIRE_S)
        self._befall(fate, caller, peer)
        if fate == "is lost":
            await asyncio.Event().wait()
        if fate == "arrives late":
            await asyncio.sleep(LATE_S)
        if peer in self.dead:
            raise KVTransportError(f"{peer} is gone")
        receiver = self.replicas[peer].receiver
        receiver.accept(caller, part)
        receiver.store(caller, part, kv)
        if fate == "its answer is lost":
            await asyncio.Event().wait()

    # Faults

    def _fate(self, asked: str, fates: tuple[str, ...]) -> str:
        self.look()
        able = tuple(f for f in fates if not (self.is_cancelled and "client" in f))
        return self.choices.pick(asked, able, self.state())

    def _befall(self, fate: str, caller: str, callee: str) -> None:
        if fate == "the callee dies before it":
            self._kill(callee)
        elif fate == "the caller dies meanwhile":
            self._kill(caller)
        elif fate == "is cancelled by the client meanwhile":
            self.is_cancelled = True
            self.cancel()

    def _kill(self, name: str) -> None:
        self.dead.add(name)
        self.died(name)

    async def _end_if_dead(self, caller: str) -> None:
        """What a dead process awaits never comes."""
        if caller in self.dead:
            await asyncio.Event().wait()

    def alive(self) -> dict[str, Any]:
        """The replicas that live."""
        return {name: one for name, one in self.replicas.items() if name not in self.dead}
