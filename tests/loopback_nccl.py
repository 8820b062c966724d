"""Pairs for one GPU: both ends of a pair in one process, over a communicator of one rank.

NCCL takes one rank a GPU; but a rank may send to itself, inside one group. So the two ends of a
pair lay their calls together, and a send and a receive that meet are launched as a group. What the
transport does on either side of that is its own code: streams, staging, waits, aborts.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import Any

POLL_S = 0.001


@dataclass
class Waiting:
    """A call that waits for its counterpart."""

    address: int
    count: int
    stream: int


class Loopback:
    """`cupy.cuda.nccl` with pairs that are loops.

    Args:
        module: `cupy.cuda.nccl`.
    """

    def __init__(self, module: Any) -> None:
        self.NCCL_UINT8 = module.NCCL_UINT8
        self._module = module
        self._loops: dict[bytes, Loop] = {}
        self._lock = threading.Lock()

    def get_unique_id(self) -> bytes:
        return secrets.token_bytes(128)

    def NcclCommunicator(self, ndev: int, uid: bytes, rank: int) -> LoopEnd:
        assert ndev == 2
        with self._lock:
            loop = self._loops.setdefault(uid, Loop(self._module))
        loop.arrive(rank)
        return LoopEnd(loop, rank)


class Loop:
    """A communicator of one rank that two ends share."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._changed = threading.Condition()
        self._here: set[int] = set()
        self._waiting: dict[str, Waiting] = {}
        self._num_launched = 0
        self._is_aborted = False
        self._communicator: Any = None

    def arrive(self, rank: int) -> None:
        """Wait for the other end."""
        with self._changed:
            self._here.add(rank)
            if len(self._here) == 2:
                uid = self._module.get_unique_id()
                self._communicator = self._module.NcclCommunicator(1, uid, 0)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._communicator is not None)

    def call(self, verb: str, waiting: Waiting, datatype: int) -> None:
        """Enqueue with the counterpart; waits for it, as NCCL may."""
        with self._changed:
            self._waiting[verb] = waiting
            there, back = self._waiting.get("send"), self._waiting.get("recv")
            if there is not None and back is not None and there.count == back.count:
                self._launch(there, back, datatype)
                return
            launched = self._num_launched
            self._changed.wait_for(lambda: self._num_launched > launched or self._is_aborted)

    def _launch(self, there: Waiting, back: Waiting, datatype: int) -> None:
        if self._is_aborted:
            return
        self._module.groupStart()
        self._communicator.send(there.address, there.count, datatype, 0, there.stream)
        self._communicator.recv(back.address, back.count, datatype, 0, back.stream)
        self._module.groupEnd()
        self._waiting.clear()
        self._num_launched += 1
        self._changed.notify_all()

    def check(self) -> None:
        with self._changed:
            if not self._is_aborted:
                self._communicator.check_async_error()

    def abort(self) -> None:
        with self._changed:
            if not self._is_aborted:
                self._is_aborted = True
                self._communicator.abort()
            self._changed.notify_all()


class LoopEnd:
    """One end: `NcclEnd`."""

    def __init__(self, loop: Loop, rank: int) -> None:
        self._loop = loop
        self._other = 1 - rank

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        assert peer == self._other
        self._loop.call("send", Waiting(sendbuf, count, stream), datatype)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        assert peer == self._other
        self._loop.call("recv", Waiting(recvbuf, count, stream), datatype)

    def check_async_error(self) -> None:
        self._loop.check()

    def abort(self) -> None:
        self._loop.abort()
