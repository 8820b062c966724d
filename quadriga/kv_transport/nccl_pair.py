"""One end of a communicator of two, with a stream and a thread of its own.

A call into NCCL may wait for the peer for ever, and within one machine NCCL reports no error when
the peer dies. So calls are made on a thread of the communicator's own, which may be left behind;
the channel's thread waits for them with a deadline, while it looks at the communicator's
asynchronous errors and at whatever else tells that the peer is gone.

When one gives up, a third thread aborts: that makes calls and kernels return. Memory in use is kept
until the device is done with it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from quadriga.kv_transport.nccl_library import NcclEnd, NcclLibrary, named

logger = logging.getLogger(__name__)

MIN_POLL_S = 50e-6
MAX_POLL_S = 2e-3
ABORT_TIMEOUT_S = 10.0
CALL_GRACE_S = 0.05
"""A call that has begun and does not wait is over by then: abort does not run into it."""

Check = Callable[[], None]
"""Looks whether the peer is alive. Raises: OSError, RuntimeError."""


class NcclPair:
    """Made, used and given up by one thread, `abort` apart; deadlines are of `time.monotonic`."""

    def __init__(self, library: NcclLibrary, rank: int) -> None:
        self._library = library
        self._rank = rank
        self._end: NcclEnd | None = None
        self.stream = library.device.make_stream()
        self._lock = threading.Lock()
        self._is_aborted = threading.Event()
        self._is_quiet = threading.Event()
        self._is_idle = threading.Event()  # no call into NCCL is under way
        self._is_idle.set()
        self._aborted_at_s = 0.0
        self._kept: list[torch.Tensor] = []  # the device may still work on them
        self._releases: list[Callable[[], None]] = []
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=f"nccl-rank-{rank}", daemon=True)
        self._thread.start()

    def open(self, uid: bytes, deadline_s: float, check: Check) -> None:
        """Find the other rank and move a byte from rank 0 to rank 1.

        NCCL connects two ranks at their first transfer: now both are known to be there.

        Raises:
            RuntimeError, OSError, TimeoutError: It is of no more use.
        """

        def init() -> None:
            end = self._library.pair(uid, self._rank)
            with self._lock:
                self._end = end

        self._wait(self._call(init), deadline_s, check)
        probe = self._library.device.empty(1, self.stream)
        self._transfer("send" if self._rank == 0 else "recv", probe, deadline_s, check)

    def send(self, data: torch.Tensor, deadline_s: float, check: Check) -> None:
        """Send uint8 [n] on the device to the other rank. Raises: as `open`."""
        self._transfer("send", data, deadline_s, check)

    def receive(self, data: torch.Tensor, deadline_s: float, check: Check) -> None:
        """Fill uint8 [n] on the device from the other rank. Raises: as `open`."""
        self._transfer("recv", data, deadline_s, check)

    def when_unused(self, release: Callable[[], None]) -> None:
        """Call `release` once the device is done with all that it was given.

        At once, unless a transfer was broken off.
        """
        with self._lock:
            if self._is_aborted.is_set() and not self._is_quiet.is_set():
                self._releases.append(release)
                return
        release()

    def abort(self) -> None:
        """Break off what is under way and release everything, later; from any thread."""
        with self._lock:
            if self._is_aborted.is_set():
                return
            self._aborted_at_s = time.monotonic()
            self._is_aborted.set()
        threading.Thread(target=self._reap, name=f"nccl-abort-{self._rank}", daemon=True).start()

    def is_quiet(self, timeout_s: float = 0.0) -> bool:
        """Whether an abort is over: no call, kernel or memory is left."""
        return self._is_quiet.wait(timeout_s)

    @property
    def is_stuck(self) -> bool:
        """Whether an abort does not come to its end."""
        late = time.monotonic() - self._aborted_at_s > ABORT_TIMEOUT_S
        return self._is_aborted.is_set() and not self._is_quiet.is_set() and late

    def _transfer(self, verb: str, data: torch.Tensor, deadline_s: float, check: Check) -> None:
        with self._lock:
            self._check_aborted()
            end = self._end
        assert end is not None, "open comes first"
        enqueue = end.send if verb == "send" else end.recv

        def call() -> Callable[[], bool]:
            enqueue(
                data.data_ptr(),
                data.numel(),
                self._library.bytes_type,
                1 - self._rank,
                self.stream.ptr,
            )
            return self.stream.record()

        try:
            is_done: Callable[[], bool] = self._wait(self._call(call), deadline_s, check)
            self._poll(is_done, deadline_s, check)
        except BaseException:
            with self._lock:
                if not self._is_quiet.is_set():
                    self._kept.append(data)
            self.abort()
            raise

    def _wait(self, call: Future[Any], deadline_s: float, check: Check) -> Any:
        """The call's result, once it is there."""
        self._poll(call.done, deadline_s, check)
        try:
            return call.result()
        finally:
            del call  # a failure's traceback has this frame, and the call has the failure

    def _poll(self, is_done: Callable[[], bool], deadline_s: float, check: Check) -> None:
        """Wait until it is done and nothing went wrong. Sleeping releases Python's lock."""
        pause_s = MIN_POLL_S
        while True:
            # In this order: what an abort or an error ended looks done.
            is_over = is_done()
            self._check_errors()
            if is_over:
                return
            check()
            if time.monotonic() >= deadline_s:
                raise TimeoutError("the peer did not take part in time")
            self._is_aborted.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_S)

    def _check_errors(self) -> None:
        with self._lock:  # an abort frees the communicator: not while we look at it
            self._check_aborted()
            if self._end is not None:
                named(self._end.check_async_error)

    def _check_aborted(self) -> None:
        if self._is_aborted.is_set():
            raise RuntimeError("the communicator was aborted")

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have a call made on the communicator's thread."""
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future

    def _work(self) -> None:
        self._library.device.use()
        while (entry := self._calls.get()) is not None:
            function, future = entry
            with self._lock:
                if self._is_aborted.is_set():
                    future.cancel()
                    continue
                self._is_idle.clear()
            try:
                result = named(function)
            except Exception as exc:  # the waiting thread's news, whatever it is
                future.set_exception(exc)
            else:
                future.set_result(result)
            finally:
                self._is_idle.set()

    def _reap(self) -> None:
        """Abort, wait for the device, release; may take as long as NCCL does, or for ever."""
        self._calls.put(None)
        self._library.device.use()
        with self._lock:
            end = self._end
        if end is None:
            # Still looking for the other rank. To abort would free what the call works on; it
            # ends when the other process does, or comes late.
            self._is_idle.wait()
            with self._lock:
                end = self._end
        else:
            self._is_idle.wait(CALL_GRACE_S)
        try:
            if end is not None:
                named(end.abort)
            self.stream.synchronize()
        except RuntimeError as exc:
            logger.warning("abort of an NCCL communicator: %s", exc)
        with self._lock:
            self._end = None
            self._is_quiet.set()
            self._kept.clear()
            releases, self._releases = self._releases, []
        for release in releases:
            release()
