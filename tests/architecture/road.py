"""Measures of a running service: what one request executes, and what lives as long as it.

The service is started as a user starts it, with the larger of two small models, and the recorder
(`recorder/sitecustomize.py`) in each of its processes.

The rule of the road: one plain streamed chat completion is sent three times to a warm service, and
the calls in every process are recorded, each with the project's functions that stand on its stack.
A stack that also occurs in an idle window of several times the length is the periodic work of the
background, and is left out. What remains and occurs in at least two of the three requests is
executed by the request: those functions, and the files they are in. Code that runs when a module
is imported is no part of it.

The rule of the classes: sixteen long streams run at once. An object counts that is alive at two
moments a while apart during them; a class counts when, over all processes, at least sixteen more of
its objects do than were alive before, and most of these are gone after the streams ended. Classes
of which there are more and more while nothing runs, as of points in a history, are left out.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

from tests.architecture.recorder.sitecustomize import FOLDER_VARIABLE, OWNER_VARIABLE
from tests.architecture.tree import ROOT, Tree
from tests.e2e.serve_command import serve_command

RECORDER = Path(__file__).parent / "recorder"
SETTINGS = (
    "model=quadriga-l",
    "decode_replicas=2",
    "engine.compile=wait",
    "scheduler.ares.interval_s=3600",
)
"""The defaults, but for this: compiled steps are there from the start, not from some time on, and
rescheduling, which works for the balance and for no single request, does not come to decide."""
ANSWER_TIMEOUT_S = 60.0
IDLE_S = 12.0
"""Longer than the longest period of the background that shows in a request's time."""
SETTLE_S = 2.0
"""From the end of a request until nothing works for it any more."""
NUM_REQUESTS = 3
NUM_SEEN = 2
NUM_STREAMS = 16
NUM_TOKENS = 24
LONG_TOKENS = 1900
BEGUN_BYTES = 2_000
"""The first of these say nothing yet."""
TAIL_BYTES = 400
LAST_CHUNK = b"0\r\n\r\n"
READ_PAUSE_S = 0.02
"""Streams are read as they lie on the line: readers that woke for every token kept the measuring
thread of this process from its turn for seconds, and the streams were over."""
APART_S = 1.0
NUM_ATTEMPTS = 3
FREED_WITHIN_S = 30.0
BODY = {
    "model": "quadriga-l",
    "messages": [{"role": "user", "content": "Count from 1 to 40."}],
    "stream": True,
}


@dataclass(frozen=True, slots=True)
class Road:
    """What was measured of a running service; the lists are sorted.

    Attributes:
        files: Of the project, with code that the request executes.
        num_processes: Those that execute any of it.
        num_lines: Of these files, all lines.
        num_function_lines: Lines of the functions in them that the request executes.
        modules: Those that any process of the service has imported.
        classes: Those with objects that live as long as a request.
        retained: Classes as these, whose objects outlived the requests.
    """

    files: list[str]
    num_processes: int
    num_lines: int
    num_function_lines: int
    modules: list[str]
    classes: list[str]
    retained: list[str]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Road:
        return Road(**json.loads(path.read_text(encoding="utf-8")))


class Processes:
    """All processes of the service that imported the project, by their recorders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        for name in ("processes", "answers"):
            (folder / name).mkdir()

    def order(self, verb: str) -> dict[int, Any]:
        """Give an order and return each process's answer, by its number.

        Raises: TimeoutError when one that runs does not answer; RuntimeError when one fails.
        """
        self._number += 1
        part = self._folder / "order.part"
        part.write_text(f"{self._number} {verb}", encoding="utf-8")
        part.rename(self._folder / "order")
        give_up_s = time.monotonic() + ANSWER_TIMEOUT_S
        answers = self._folder / "answers"
        while True:
            running = [p for p in self._ids() if Path("/proc", str(p)).exists()]
            found = {p: answers / f"{self._number}.{p}" for p in running}
            missing = [p for p, path in found.items() if not path.exists()]
            if not missing:
                replies = {p: json.loads(path.read_text("utf-8")) for p, path in found.items()}
                if errors := [a["error"] for a in replies.values() if a and "error" in a]:
                    raise RuntimeError(f"{verb}: {errors[0]}")
                return replies
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{verb}: no answer from the recorders of {missing}")
            time.sleep(0.02)

    def _ids(self) -> list[int]:
        return [int(path.name) for path in (self._folder / "processes").iterdir()]


_Function = tuple[Any, ...]
"""File, first and last line."""


def measure(folder: Path) -> Road:
    """Start the service, measure, stop it. Takes about a minute on two free cores.

    Args:
        folder: Empty, for files of the service and of the recorders.

    Raises:
        TimeoutError: A process did not answer.
    """
    with _recorded(folder) as (clients, processes):
        _stream_all(clients, NUM_TOKENS)
        executed = _executed(clients[0], processes)
        modules = {name for all_ in processes.order("modules").values() for name in all_}
        classes, retained = _lasting(clients, processes)
    tree = Tree()
    functions = {function for _, function in executed}
    files = sorted({file for file, *_ in functions})
    lines = {(f, line) for f, first, last in functions for line in range(first, last + 1)}
    return Road(
        files=files,
        num_processes=len({process for process, _ in executed}),
        num_lines=sum((ROOT / file).read_bytes().count(b"\n") for file in files),
        num_function_lines=len(lines),
        modules=sorted(name for name in modules if name in tree.modules),
        classes=sorted(classes),
        retained=sorted(retained),
    )


@contextmanager
def _recorded(folder: Path) -> Iterator[tuple[list[Client], Processes]]:
    """A service with recorders, and clients that keep their connections."""
    recorded = folder / "recorded"
    recorded.mkdir()
    processes = Processes(recorded)
    paths = [str(RECORDER), str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {
        FOLDER_VARIABLE: str(recorded),
        OWNER_VARIABLE: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, variables))
        service = stack.enter_context(serve_command(folder, *SETTINGS))
        clients = [Client(service.url) for _ in range(NUM_STREAMS)]
        yield [stack.enter_context(closing(client)) for client in clients], processes


def _executed(client: Client, processes: Processes) -> set[tuple[int, _Function]]:
    """The functions that one request executes in each process, by the rule of the road."""

    def recorded(work: Callable[[], object]) -> set[tuple[int, tuple[_Function, ...]]]:
        processes.order("trace")
        work()
        return {
            (process, tuple(tuple(answer["functions"][str(number)]) for number in chain))
            for process, answer in processes.order("stop").items()
            for chain in answer["chains"]
        }

    def request() -> None:
        client.stream(NUM_TOKENS)
        time.sleep(SETTLE_S / 4)

    time.sleep(SETTLE_S)
    idle = recorded(lambda: time.sleep(IDLE_S))
    seen: Counter[tuple[int, _Function]] = Counter()
    for _ in range(NUM_REQUESTS):
        seen.update({(process, chain[-1]) for process, chain in recorded(request) - idle})
        time.sleep(SETTLE_S)
    return {function for function, num_seen in seen.items() if num_seen >= NUM_SEEN}


def _lasting(clients: list[Client], processes: Processes) -> tuple[set[str], set[str]]:
    """The classes with objects that live as long as a request, and those that stay longer."""
    for count in range(1, len(clients) + 1):  # what is kept by the number of rows is there then
        _stream_all(clients[:count], NUM_TOKENS)
    time.sleep(SETTLE_S)
    idle = _counts(processes, "count")
    time.sleep(2 * SETTLE_S)
    before = _counts(processes, "count")
    by_time = {name for name, count in before.items() if count > idle[name]}
    for _ in range(NUM_ATTEMPTS):
        if (during := _alive_during(clients, processes)) is not None:
            break
    else:
        raise TimeoutError(f"{LONG_TOKENS} tokens were streamed before all had been counted")
    risen = {n for n, count in during.items() if count - before[n] >= NUM_STREAMS} - by_time
    give_up_s = time.monotonic() + FREED_WITHIN_S
    staying = risen
    while staying and time.monotonic() < give_up_s:
        time.sleep(SETTLE_S)
        after = _counts(processes, "count")
        staying = {n for n in risen if after[n] - before[n] > (during[n] - before[n]) / 2}
    return risen - staying, staying


def _alive_during(clients: list[Client], processes: Processes) -> Counter[str] | None:
    """Count by class what lives while all streams run; None when one ended before that."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        begun, left = [Event() for _ in clients], Event()
        streams = [
            pool.submit(client.stream, LONG_TOKENS, event, left)
            for client, event in zip(clients, begun, strict=True)
        ]
        for event, stream in zip(begun, streams, strict=True):
            while not event.wait(1.0) and not stream.done():
                pass
        processes.order("hold")
        time.sleep(APART_S)
        during = _counts(processes, "still_alive")
        are_over = [stream.done() for stream in streams]
        left.set()
    for stream in streams:
        stream.result()
    return None if any(are_over) else during


def _counts(processes: Processes, verb: str) -> Counter[str]:
    return sum((Counter(answer) for answer in processes.order(verb).values()), Counter())


def _stream_all(clients: list[Client], num_tokens: int) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(lambda client: client.stream(num_tokens), clients))


class Client:
    """One connection, which reads streams with so little work that the service never waits."""

    def __init__(self, url: str) -> None:
        self._connection = HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_TIMEOUT_S)

    def close(self) -> None:
        self._connection.close()

    def stream(
        self, num_tokens: int, begun: Event | None = None, left: Event | None = None
    ) -> None:
        """Read one chat completion, and say when its first tokens are there.

        Args:
            left: Once it is set, the stream is left; else it is read to its end.
        """
        body = json.dumps(BODY | {"max_tokens": num_tokens, "ignore_eos": True})
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", body, headers)
        reply = self._connection.getresponse()
        num_bytes, tail = 0, b""
        while not tail.endswith(LAST_CHUNK):
            part = reply.fp.read1(1 << 16)
            assert part, tail
            num_bytes += len(part)
            tail = (tail + part)[-TAIL_BYTES:]
            if num_bytes > BEGUN_BYTES and begun is not None:
                begun.set()
            if left is not None and left.is_set():
                self._connection.close()
                return
            time.sleep(READ_PAUSE_S)
        reply.close()
        assert b"data: [DONE]\n\n" in tail, tail
