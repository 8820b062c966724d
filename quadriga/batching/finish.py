"""When a sequence is over: the one rule that prefill and decode share."""

from __future__ import annotations

from quadriga.types import FinishReason, SampledToken, SequenceState


def append_token(state: SequenceState, token: SampledToken) -> None:
    """Record a sampled token in its sequence's state."""
    state.output_ids.append(token.token_id)
    state.exit_layers.append(token.exit_layer)


def finish_reason(
    state: SequenceState, *, eos_token_ids: tuple[int, ...], row_capacity_tokens: int
) -> FinishReason | None:
    """Why the sequence is over with its last output token, or None while it goes on.

    The end token, or the stop id, that ended the sequence stays in `output_ids`: it was
    generated and is counted; the ingress does not render it.
    """
    params = state.sampling
    num_output = len(state.output_ids)
    if num_output and num_output >= params.min_tokens:
        last = state.output_ids[-1]
        if last in params.stop_token_ids:
            return FinishReason.STOP
        if not params.ignore_eos and last in eos_token_ids:
            return FinishReason.STOP
    if num_output >= params.max_tokens or state.num_tokens >= row_capacity_tokens:
        return FinishReason.LENGTH
    return None
