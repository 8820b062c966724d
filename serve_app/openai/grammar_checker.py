"""Grammars are tried in a process of their own before a request costs anything."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quadriga.checkpoint.folder import Checkpoint
from quadriga.core.grammar import MAX_GRAMMAR_BYTES, Grammar
from quadriga.errors import IngressFull, InvalidRequest, Unavailable
from quadriga.pipes import read_line
from quadriga.text import TextTokenizer

COMPILE_LIMIT_S = 3.0
START_LIMIT_S = 60.0
MAX_WAITING = 16
"""Grammars of one caller that wait for the process; one more is refused with 429."""
MAX_WAITING_OF_ALL = 256
WAIT_LIMIT_S = 30.0
"""One that waits longer is refused with 429 as well."""
MAX_KNOWN = 1024
"""Grammars whose outcome is remembered."""
TRIED_AGAIN_S = 300.0
"""After so long, one that took too long is tried again: the machine may have been busy."""
TOO_LONG = (
    f"it takes more than {COMPILE_LIMIT_S:.0f} s, or more memory than there is for it, to compile; "
    "make it simpler"
)


class GrammarChecker:
    """Says whether answers of one model can have a form.

    The process is started with the first grammar, killed where one takes too long, and started
    again. Its errors are the client's: nothing of a hostile grammar reaches the ingress's event
    loop or an engine.
    """

    def __init__(self, checkpoint: Checkpoint, tokenizer: TextTokenizer) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # by digest
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._process: subprocess.Popen[bytes] | None = None
        self._is_busy = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by caller

    async def check(self, grammar: Grammar, field: str, caller: str) -> None:
        """Let a grammar pass, or refuse it.

        Args:
            field: Where it is from, for the error.
            caller: Who asks: callers whose grammars are new have the process in turn.

        Raises:
            InvalidRequest: It is too long, is none, or takes too much time or memory.
            IngressFull: Too many of this caller wait to be tried, or it waited too long.
            Unavailable: The process does not start.
        """
        if not self._checkpoint.eos_token_ids:
            raise InvalidRequest(
                f"{field}: {self._checkpoint.id} has no token that ends an answer, so its answers "
                "can have no given form; leave it out",
                param=field,
            )
        size = len(grammar.text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{field}: {size:,} bytes, above the limit of {MAX_GRAMMAR_BYTES:,}; make it "
                "smaller",
                param=field,
                code="invalid_grammar",
            )
        digest = hashlib.sha256(f"{grammar.kind}:{grammar.text}".encode()).digest()
        error, until_s = self._known.get(digest, ("", 0.0))
        if time.monotonic() > until_s:
            await self._turn(caller)
            # Another caller's may have been the same.
            error, until_s = self._known.get(digest, ("", 0.0))
            if time.monotonic() > until_s:
                error, until_s = await self._try(grammar)
                self._known[digest] = error, until_s
            else:
                self._next_turn()
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        if error:
            raise InvalidRequest(f"{field}: {error}", param=field, code="invalid_grammar")

    def close(self) -> None:
        """End the process, and all that wait for it."""
        for turn in [turn for queue in self._waiting.values() for turn in queue]:
            turn.cancel()
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._kill()

    async def _turn(self, caller: str) -> None:
        """Wait for the process; `_next_turn` gives it on.

        Raises: IngressFull.
        """
        if not self._is_busy:
            self._is_busy = True
            return
        queue = self._waiting.get(caller, deque())
        num_waiting = sum(map(len, self._waiting.values()))
        if len(queue) >= MAX_WAITING or num_waiting >= MAX_WAITING_OF_ALL:
            raise IngressFull(
                f"{len(queue)} other grammars of yours, {num_waiting} of all callers, wait to be "
                "compiled; retry shortly",
                retry_after_s=1.0,
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting[caller] = queue
        queue.append(turn)
        try:
            await asyncio.wait_for(asyncio.shield(turn), WAIT_LIMIT_S)
        except TimeoutError as exc:
            self._let_go(turn)
            raise IngressFull(
                f"the grammar waited {WAIT_LIMIT_S:.0f} s to be compiled; retry shortly",
                retry_after_s=5.0,
            ) from exc
        except asyncio.CancelledError:
            self._let_go(turn)
            raise

    def _let_go(self, turn: asyncio.Future[None]) -> None:
        """Whoever waited for it has gone; if it has come meanwhile, it is another's."""
        if turn.done():
            self._next_turn()
        turn.cancel()

    def _next_turn(self) -> None:
        """Let the caller go on whose last turn is longest ago."""
        while self._waiting:
            caller, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[caller] = queue  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False

    async def _try(self, grammar: Grammar) -> tuple[str, float]:
        """What is wrong with a grammar, or "", and until when that holds, monotonic.

        The turn is over when the process is free, though the caller may be gone before.
        """
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._ask, grammar)
        work.add_done_callback(lambda _: self._next_turn())
        error = await asyncio.shield(work)
        if error is None:
            return TOO_LONG, time.monotonic() + TRIED_AGAIN_S
        return error, math.inf

    # On the thread

    def _ask(self, grammar: Grammar) -> str | None:
        """What is wrong with a grammar; None where the process was lost over it."""
        if self._process is not None and self._process.poll() is not None:
            self._kill()  # it ended by itself, or was ended: not over this grammar
        process = self._process or self._start()
        try:
            _send(process, {"kind": grammar.kind, "text": grammar.text})
            answer = _receive(process, COMPILE_LIMIT_S + 1.0)
        except (OSError, ValueError):  # it is gone, or was closed meanwhile
            answer = None
        if answer is not None:
            return str(answer["error"])
        self._kill()
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "quadriga.text.grammar_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        about = {
            "tokenizer": self._tokenizer.definition(),
            "vocab_size": self._checkpoint.vocab_size,
            "end_ids": self._checkpoint.eos_token_ids,
            "limit_s": COMPILE_LIMIT_S,
        }
        try:
            _send(process, about)
            is_ready = _receive(process, START_LIMIT_S) is not None
        except OSError:
            is_ready = False
        if not is_ready:
            self._kill()
            raise Unavailable("the process that compiles grammars does not start; retry shortly")
        return process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _send(process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    """Raises: OSError: The process is gone."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def _receive(process: subprocess.Popen[bytes], limit_s: float) -> Any:
    """The next answer; None where none comes in time, or the process is gone."""
    assert process.stdout is not None
    try:
        return json.loads(read_line(process.stdout, limit_s))
    except (EOFError, TimeoutError):
        return None
