"""How Hypothesis looks for examples in every folder.

Always the same ones, and no example is timed: a machine that stands still for a moment shows
nothing about the code. `make fuzz` asks for other examples each time, and for those that failed
before first; `tests.hostile` says how many.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.hostile import EXAMPLES

settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fuzz", deadline=None, derandomize=False)
settings.load_profile("fuzz" if EXAMPLES else "steady")
