"""What tests of thousands of failing runs share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet() -> Iterator[None]:
    """What fails is meant to, and is not logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
