"""What a request asks of early exits, checked against the model's."""

from __future__ import annotations

from quadriga.errors import InvalidRequest
from quadriga.exits import NEVER, ExitParams
from serve_app.models import ServedModel
from serve_app.openai_schema import GenerationFields

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
    policy = body.exit_policy or "bounded"
    max_depth = body.max_depth or 0
    if body.max_depth is not None:
        _check_depth(body.max_depth, model)
    if policy == "strict" and threshold < NEVER:
        limit = max_depth or model.depth
        if limit < model.checkpoint.num_layers:
            what = "max_depth" if max_depth else "this deployment"
            raise InvalidRequest(
                f"exit_policy: 'strict' lets no token leave below its threshold, but {what} ends "
                f"at {limit} of {model.checkpoint.num_layers} layers; use 'bounded'",
                param="exit_policy",
            )
    return ExitParams(threshold, policy, max_depth, (body.sla_tbt_ms or 0.0) / 1000)


def _check_depth(max_depth: int, model: ServedModel) -> None:
    layers, shallowest = model.checkpoint.num_layers, model.exits.layers[0]
    if not shallowest <= max_depth <= layers:
        exits = ", ".join(str(k) for k in model.exits.layers)
        raise InvalidRequest(
            f"max_depth: {max_depth} must be in {shallowest}..{layers}; {model.id} can be left "
            f"after {exits} or {layers} layers",
            param="max_depth",
        )
