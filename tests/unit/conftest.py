"""No test of this folder starts Ray: what would start a cluster unasked finds none instead."""

from __future__ import annotations

import os

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
