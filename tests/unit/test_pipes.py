"""Each line is had as soon as it is there, however many came with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO

import pytest

from quadriga.pipes import read_line

SOON_S = 5.0


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    ends = os.pipe()
    with os.fdopen(ends[0], "rb") as source, os.fdopen(ends[1], "wb", buffering=0) as sink:
        yield source, sink


def test_lines_that_come_together_are_read_one_by_one(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    source, sink = pipe
    sink.write("ray\nserve \u00fc\n\n".encode())
    assert [read_line(source, SOON_S) for _ in range(3)] == ["ray", "serve \u00fc", ""]


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
