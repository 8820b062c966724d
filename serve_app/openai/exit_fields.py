"""What a request asks of early exits, checked against the model's."""

from __future__ import annotations

from quadriga.checkpoint.exits import NEVER, ExitParams, read_exit_params
from quadriga.errors import InvalidRequest
from serve_app.openai.models import ServedModel
from serve_app.openai.schema import GenerationFields

_FIELDS = ("exit_threshold", "exit_policy", "max_depth", "sla_tbt_ms")


def read_exit_fields(body: GenerationFields, model: ServedModel) -> ExitParams:
    """Check the exit fields and fill in the model's defaults.

    Raises: InvalidRequest.
    """
    if not model.exits.layers:
        for field in _FIELDS:
            if getattr(body, field) is not None:
                raise InvalidRequest(
                    f"{field}: {model.id} has no early exits here; leave it out", param=field
                )
        return ExitParams(threshold=NEVER)
    threshold = model.exits.threshold if body.exit_threshold is None else body.exit_threshold
    policy, gap_s = body.exit_policy or "bounded", (body.sla_tbt_ms or 0.0) / 1000
    asked = ExitParams(threshold, policy, body.max_depth or 0, gap_s)
    full = model.checkpoint.num_layers
    return read_exit_params(asked, model.exits, model.id, depth=model.depth, full=full)
