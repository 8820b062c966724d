"""Each line is had as soon as it is there, however many came with it."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator
from types import SimpleNamespace
from typing import IO, Any

import pytest

from quadriga.pipes import read_line
from serve_app.openai import grammar_checker

SOON_S = 60.0


@pytest.fixture(params=[0, 1024], ids=["", "a high descriptor"])
def pipe(request: pytest.FixtureRequest) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ends = os.pipe()
    reading = fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, request.param)
    os.close(ends[0])
    with os.fdopen(reading, "rb") as source, os.fdopen(ends[1], "wb", buffering=0) as sink:
        yield source, sink
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_lines_that_come_together_are_read_one_by_one(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    source, sink = pipe
    sink.write("ray\nserve \u00fc\n\n".encode())
    assert [read_line(source, SOON_S) for _ in range(3)] == ["ray", "serve \u00fc", ""]


def test_what_is_said_of_a_grammar_is_such_a_line(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    process: Any = SimpleNamespace(stdout=pipe[0])
    pipe[1].write(b'{"error": ""}\n')
    assert grammar_checker._receive(process, SOON_S) == {"error": ""}
    assert grammar_checker._receive(process, 0.05) is None


def test_half_a_line_is_waited_for_no_longer_than_allowed(
    pipe: tuple[IO[bytes], IO[bytes]],
) -> None:
    source, sink = pipe
    sink.write(b"ser")
    with pytest.raises(TimeoutError, match=r"said nothing within 0\.05 s"):
        read_line(source, 0.05)


def test_an_end_in_the_middle_is_an_end(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    source, sink = pipe
    sink.write(b"ser")
    sink.close()
    with pytest.raises(EOFError, match="has ended"):
        read_line(source, SOON_S)
