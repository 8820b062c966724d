"""Threads of the tests of tuning, and how much they time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quadriga.tune import outcome, tuning


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These products are small: a second thread would cost more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def short_timed_answers() -> Iterator[None]:
    """Nine or more runs are timed for each report; how long they are changes no other figure."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (outcome, tuning):
            patched.setattr(module, "SPEED_TOKENS", 16)
        yield
