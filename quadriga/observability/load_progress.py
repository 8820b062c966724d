"""How far this process's engine is before it serves: in the log, and for who asks a replica."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
"""Between two lines of the log about one stage."""


class LoadProgress:
    """What an engine does before it serves; one thread writes, others may read.

    Attributes:
        text: The stage, with the share of it that is done where that is known; empty before the
            first. Bytes would be of the engine's dtype, and not those of the files.
    """

    def __init__(self) -> None:
        self.text = self._stage = ""
        self._done_bytes = self._total_bytes = 0
        self._logged_s = 0.0

    def begin(self, stage: str, total_bytes: int = 0) -> None:
        """Another stage begins; it fills so much memory, or 0 where that is not known."""
        self._stage, self._done_bytes, self._total_bytes = stage, 0, total_bytes
        self._say(time.monotonic())

    def add(self, num_bytes: int) -> None:
        """So many bytes more are read; what follows the last of a stage does not count."""
        if self._done_bytes < self._total_bytes:
            self._done_bytes = min(self._done_bytes + num_bytes, self._total_bytes)
            self._say(self._logged_s + LOG_EVERY_S)

    def _say(self, due_s: float) -> None:
        done, total = self._done_bytes, self._total_bytes
        self.text = f"{self._stage}: {done / total:.0%}" if total else self._stage
        if (now_s := time.monotonic()) >= due_s:
            self._logged_s = now_s
            logger.info("%s", self.text)


LOADING = LoadProgress()
"""Of this process, as a replica has one engine."""
