"""A stand-in for `cupy.cuda.nccl` and a GPU, for machines without: its calls wait where NCCL's do.

What it keeps of NCCL, because the transport must live with it:

- `get_unique_id` makes this process the place where ranks meet; the constructor waits for the other
  rank for ever, and refuses two ranks on one GPU;
- `send` and `recv` only enqueue: a stream of its own does the work, in order. The two sides' sizes
  must agree: nobody checks; who waits for more bytes than come waits for ever;
- a peer that dies makes no error (within one machine, NCCL sees none); `is_network` makes one, of
  which only `check_async_error` tells;
- calls inside `groupStart` … `groupEnd` are launched together and progress together; a rank may
  send to itself only so;
- `abort` from another thread ends what is under way, which then looks done.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import torch

from quadriga.kv_transport.nccl_library import NcclLibrary

UID_BYTES = 128
POLL_S = 0.002


class FakeNcclError(RuntimeError):
    """As `cupy.cuda.nccl.NcclError`: it has names for some statuses only."""

    def __init__(self, status: int) -> None:
        names = {1: "CUDA", 2: "SYSTEM", 3: "INTERNAL", 4: "ARGUMENT", 5: "USAGE", 6: "REMOTE"}
        super().__init__(f"NCCL_ERROR_{names[status]}")
        self.status = status


class FakeStream:
    """Does what it is given in order, on a thread that ends when nobody has the stream any more."""

    _all: ClassVar[weakref.WeakValueDictionary[int, FakeStream]] = weakref.WeakValueDictionary()
    _ids: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(self) -> None:
        self.ptr = next(self._ids)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        FakeStream._all[self.ptr] = self
        weakref.finalize(self, self._work.put, None)
        threading.Thread(
            target=self._run, args=(self._work,), name=f"stream-{self.ptr}", daemon=True
        ).start()

    @classmethod
    def of(cls, ptr: int) -> FakeStream:
        return cls._all[ptr]

    @staticmethod
    def _run(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := work.get()) is not None:
            task()
            del task

    def launch(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        def work() -> None:
            target.copy_(source)

        self.launch(work)

    def record(self) -> Callable[[], bool]:
        event = threading.Event()
        self.launch(event.set)
        return event.is_set

    def synchronize(self) -> None:
        event = threading.Event()
        self.launch(event.set)
        event.wait()


class FakeDevice:
    """Host memory in the role of a GPU's.

    Attributes:
        host: Addresses of tensors that are to count as the host's.
        num_taken: Tensors made so far.
    """

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self.host: set[int] = set()
        self.num_taken = 0
        self.users: set[str] = set()

    def use(self) -> None:
        self.users.add(threading.current_thread().name)

    def make_stream(self) -> FakeStream:
        return FakeStream()

    def holds(self, data: torch.Tensor) -> bool:
        return data.data_ptr() not in self.host

    def empty(self, num_bytes: int, stream: Any) -> torch.Tensor:
        self.num_taken += 1
        return torch.empty(num_bytes, dtype=torch.uint8)


class FakeNccl:
    """One process's `cupy.cuda.nccl`.

    Attributes:
        is_network: Whether a dead peer is noticed.
        is_frozen: While set, this side's streams and calls do not move on: a process that hangs.
        communicators: All that were made, for tests to look at.
    """

    NCCL_UINT8 = 1
    available = True

    def __init__(self, gpu: str, *, is_network: bool = False) -> None:
        self.gpu = gpu
        self.is_network = is_network
        self.is_frozen = threading.Event()
        self.is_over = threading.Event()
        self.communicators: list[FakeCommunicator] = []
        self._listeners: dict[bytes, socket.socket] = {}
        self._group = threading.local()

    def library(self) -> NcclLibrary:
        return NcclLibrary(self, FakeDevice(self.gpu))

    def get_unique_id(self) -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        uid = struct.pack("<H", listener.getsockname()[1]).ljust(UID_BYTES, b"\0")
        self._listeners[uid] = listener
        return uid

    def NcclCommunicator(self, ndev: int, uid: bytes, rank: int) -> FakeCommunicator:
        if len(uid) != UID_BYTES:
            raise ValueError(f"commId length {len(uid)} != {UID_BYTES}.")
        self.thaw()
        communicator = FakeCommunicator(self, rank)
        self.communicators.append(communicator)
        if ndev == 2:
            listener = self._listeners.pop(uid) if rank == 0 else None
            communicator.meet(listener, struct.unpack("<H", uid[:2])[0])
        else:
            self._listeners.pop(uid).close()  # nobody else comes
        return communicator

    def groupStart(self) -> None:
        self._group.calls = []

    def groupEnd(self) -> None:
        calls, self._group.calls = self._group.calls, None
        FakeCommunicator.launch_group(calls)

    def enqueue(self, call: Call) -> None:
        calls = getattr(self._group, "calls", None)
        if calls is None:
            FakeCommunicator.launch_group([call])
        else:
            calls.append(call)

    def thaw(self) -> None:
        """Stand still while frozen."""
        while self.is_frozen.is_set() and not self.is_over.wait(POLL_S):
            pass

    def close(self) -> None:
        """End all that waits, and the sockets."""
        self.is_over.set()
        for listener in list(self._listeners.values()):  # whom nobody waits for any more takes one
            listener.close()
        for communicator in list(self.communicators):
            communicator.end()


class Call:
    """One send or receive, as it was enqueued."""

    def __init__(
        self, comm: FakeCommunicator, verb: str, address: int, count: int, peer: int, stream: int
    ) -> None:
        self.comm = comm
        self.verb = verb
        self.memory = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
        self.peer = peer
        self.stream = FakeStream.of(stream)

    @property
    def is_to_itself(self) -> bool:
        return self.peer == self.comm.rank


class FakeCommunicator:
    """One rank; bytes go over a socket.

    Attributes:
        is_alone: Its constructor waits for the other rank.
    """

    def __init__(self, nccl: FakeNccl, rank: int) -> None:
        self.rank = rank
        self.nccl = nccl
        self.is_aborted = threading.Event()
        self.is_alone = False
        self._socket: socket.socket | None = None
        self._error = 0

    def meet(self, listener: socket.socket | None, port: int) -> None:
        """Wait for the other rank, as long as it takes."""
        self.is_alone = True
        while self._socket is None and not self.nccl.is_over.is_set():
            with suppress(OSError):
                if listener is not None:
                    listener.settimeout(POLL_S)
                    self._socket, _ = listener.accept()
                else:
                    self._socket = socket.create_connection(("127.0.0.1", port), timeout=1)
        if listener is not None:
            listener.close()
        if self._socket is None:
            raise FakeNcclError(2)
        # A send is over when its bytes are on their way, as with NCCL; few fit.
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1 << 16)
        mine = self.nccl.gpu.encode()
        self._socket.settimeout(None)
        self._socket.sendall(struct.pack("<I", len(mine)) + mine)
        length = bytearray(4)
        self._fill(memoryview(length))
        theirs = bytearray(struct.unpack("<I", length)[0])
        self._fill(memoryview(theirs))
        self._socket.setblocking(False)
        self.is_alone = False
        if bytes(theirs) == mine:
            self.end()
            raise FakeNcclError(5)

    def _fill(self, memory: memoryview) -> None:
        assert self._socket is not None
        while memory:
            got = self._socket.recv_into(memory)
            if not got:
                raise FakeNcclError(6)
            memory = memory[got:]

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._enqueue("send", sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._enqueue("recv", recvbuf, count, datatype, peer, stream)

    def _enqueue(
        self, verb: str, address: int, count: int, datatype: int, peer: int, stream: int
    ) -> None:
        if self.is_aborted.is_set() or datatype != self.nccl.NCCL_UINT8:
            raise FakeNcclError(4)
        self.nccl.thaw()
        self.nccl.enqueue(Call(self, verb, address, count, peer, stream))

    def check_async_error(self) -> None:
        assert not self.is_aborted.is_set(), "used after its end"
        if self._error:
            raise FakeNcclError(self._error)

    def fail(self, status: int) -> None:
        """From now on something is wrong with it."""
        self._error = status

    def abort(self) -> None:
        # What was ended with its process may be aborted then: a reaper was late.
        assert not self.is_aborted.is_set() or self.nccl.is_over.is_set(), "aborted twice"
        self.end()

    def end(self) -> None:
        self.is_aborted.set()
        if self._socket is not None:
            self._socket.close()

    @staticmethod
    def launch_group(calls: list[Call]) -> None:
        """Have the calls' streams do them, all at once."""
        if len({call.stream.ptr for call in calls}) <= 1:
            for stream in {call.stream for call in calls}:
                stream.launch(lambda: FakeCommunicator._do(calls))
            return
        # Calls of several streams: each waits until all are done.
        done = threading.Event()
        first, *others = {call.stream.ptr: call.stream for call in calls}.values()
        for stream in others:
            stream.launch(lambda: _until(done, [c.comm for c in calls]))

        def work() -> None:
            FakeCommunicator._do(calls)
            done.set()

        first.launch(work)

    @staticmethod
    def _do(calls: list[Call]) -> None:
        local = [call for call in calls if call.is_to_itself]
        sends = [call for call in local if call.verb == "send"]
        receives = [call for call in local if call.verb == "recv"]
        for there, here in zip(sends, receives, strict=False):
            size = min(len(there.memory), len(here.memory))
            here.memory[:size] = there.memory[:size]
        if len(sends) != len(receives) or any(
            len(a.memory) != len(b.memory) for a, b in zip(sends, receives, strict=True)
        ):
            _until(threading.Event(), [call.comm for call in local])
        remote = [call for call in calls if not call.is_to_itself]
        threads = [threading.Thread(target=call.comm._move, args=(call,)) for call in remote[1:]]
        for thread in threads:
            thread.start()
        if remote:
            remote[0].comm._move(remote[0])
        for thread in threads:
            thread.join()

    def _move(self, call: Call) -> None:
        """Move the call's bytes, or hang; an abort makes it look done."""
        memory = call.memory
        assert self._socket is not None
        while memory and not self.is_aborted.is_set():
            self.nccl.thaw()
            try:
                if call.verb == "send":
                    moved = self._socket.send(memory)
                else:
                    moved = self._socket.recv_into(memory)
                    if not moved:
                        raise ConnectionResetError
            except BlockingIOError:
                self.is_aborted.wait(POLL_S / 10)
                continue
            except OSError:
                if self.nccl.is_network:
                    self.fail(6)
                self.is_aborted.wait()
                return
            memory = memory[moved:]


def _until(done: threading.Event, communicators: list[FakeCommunicator]) -> None:
    while not done.wait(POLL_S):
        if any(c.is_aborted.is_set() for c in communicators):
            return
