"""How Hypothesis looks for examples in every folder, and what is served where no model is named.

The bundled model is: its answers can be checked, and it is there on every machine. Examples are
always the same ones, and none is timed: a machine that stands still for a moment shows
nothing about the code. `make fuzz` asks for other examples each time, and for those that failed
before first; `tests.hostile` says how many.
"""

from __future__ import annotations

from quadriga.checkpoint import packaged_models
from quadriga.ports import use_private_ray

packaged_models.DEFAULT_MODEL = "quadriga-s"
use_private_ray()

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass  # machines for tests/gpu may lack it
else:
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
