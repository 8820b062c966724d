"""No test of this folder starts Ray: what would start a cluster unasked finds none instead."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence

import pytest

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

Refused = Callable[[Callable[[list[str]], int], Sequence[str], str], None]


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    """Commands set variables for the processes that they start; no other test is to see them."""
    environment = os.environ
    before = dict(environment)
    yield
    for name in environment.keys() - before.keys():
        del environment[name]
    environment.update({k: v for k, v in before.items() if environment.get(k) != v})


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command whose status must be 2; what it says must match."""

    def run(main: Callable[[list[str]], int], words: Sequence[str], message: str) -> None:
        assert main(list(words)) == 2
        said = capsys.readouterr().err
        assert re.search(message, said), said

    return run
