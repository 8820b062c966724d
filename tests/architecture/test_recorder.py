"""The recorder sees calls in threads that ran before, and which objects stay alive."""

from __future__ import annotations

import threading
from queue import Queue

from quadriga import ports
from quadriga.clock import SystemClock
from tests.architecture.recorder.sitecustomize import Recorder


def test_calls_are_recorded_in_threads_that_began_before() -> None:
    recorder = Recorder()
    go, done = Queue[bool](), Queue[int]()

    def work() -> None:
        go.get(timeout=60)
        done.put(ports.free_port())

    thread = threading.Thread(target=work)
    thread.start()
    recorder.trace()
    go.put(True)
    done.get(timeout=60)
    thread.join(60)
    answer = recorder.stop()
    ports.free_port()
    files = {answer["functions"][chain[-1]][0] for chain in answer["chains"]}
    first = {answer["functions"][chain[-1]][1] for chain in answer["chains"]}
    assert files == {"quadriga/ports.py"}
    assert ports.free_port.__code__.co_firstlineno in first
    assert recorder.stop()["chains"] == []


def test_objects_count_that_outlive_the_moment() -> None:
    recorder = Recorder()
    name = f"{SystemClock.__module__}.SystemClock"
    before = recorder.count().get(name, 0)
    short, long = [SystemClock() for _ in range(3)], [SystemClock() for _ in range(2)]
    assert recorder.count()[name] == before + 5
    recorder.hold()
    short.clear()
    assert recorder.still_alive()[name] == before + len(long)
    assert recorder.still_alive() == {}
