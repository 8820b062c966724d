"""Models that something else fetches, as the chart's job does, are waited for."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from quadriga.config.engine import PoolConfig

FETCHED_FILE = ".quadriga-complete"
"""In a model's folder, written last: from where it was fetched."""
LOOK_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


def await_models(pools: Iterable[PoolConfig]) -> None:
    """Return once all are there. Serve interrupts it for another configuration."""
    for pool in pools:
        while not is_fetched(pool):
            logger.warning("%s: waiting until %s is fetched", pool.model, pool.fetched_from)
            time.sleep(LOOK_INTERVAL_S)


def is_fetched(pool: PoolConfig) -> bool:
    """Whether nothing of the model is missing."""
    file, origin = Path(pool.model) / FETCHED_FILE, pool.fetched_from
    return origin is None or (file.is_file() and file.read_text(encoding="utf-8").strip() == origin)
