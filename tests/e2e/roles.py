"""Which replicas the end-to-end tests serve with.

`QUADRIGA_E2E_ROLES=mixed` runs every service that the suite starts with mixed replicas, as many as
it has decode replicas otherwise.
"""

from __future__ import annotations

import os

from quadriga.core.replica import Role

VARIABLE = "QUADRIGA_E2E_ROLES"
IS_MIXED = os.environ.get(VARIABLE, "apart") == "mixed"
PREFILL = Role.MIXED if IS_MIXED else Role.PREFILL
"""The role of the replicas that requests are submitted to."""
DECODE = Role.MIXED if IS_MIXED else Role.DECODE
"""The role of the replicas that generate."""
NUM_REPLICAS = 2 if IS_MIXED else 3
"""Of the session's service."""


def settings(decode_replicas: int) -> dict[str, float]:
    """Numbers of replicas, with so many that generate.

    Of several mixed ones a prompt goes where it was computed before, as where one replica alone
    computes prompts, whatever runs there.
    """
    numbers: dict[str, float] = {f"{DECODE}_replicas": decode_replicas}
    return numbers | ({"scheduler.prefix_weight": 100.0} if IS_MIXED else {})


def argument(decode_replicas: int) -> str:
    """The same on a command line."""
    return f"{DECODE}_replicas={decode_replicas}"
