"""When a sequence is over: the one rule that prefill and decode share."""

from __future__ import annotations

from dataclasses import dataclass

from quadriga.core.request import FinishReason, SampledToken, SequenceState


def append_token(state: SequenceState, token: SampledToken) -> None:
    """Record a sampled token in its sequence's state."""
    state.output_ids.append(token.token_id)
    state.exit_layers.append(token.exit_layer)


@dataclass(frozen=True, slots=True)
class FinishRule:
    """When one sequence is over, worked out once, for it is asked after every token.

    The end token, or the stop id, that ended the sequence stays in `output_ids`: it was
    generated and is counted; the ingress does not render it.

    Attributes:
        ends: Tokens that end it, from `min_tokens` output tokens on.
        max_tokens: Output tokens at which it is over in any case.
    """

    ends: frozenset[int]
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(
        cls, state: SequenceState, *, eos_token_ids: tuple[int, ...], row_capacity_tokens: int
    ) -> FinishRule:
        params = state.sampling
        ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids + eos_token_ids
        most = min(params.max_tokens, row_capacity_tokens - len(state.prompt_ids))
        return cls(frozenset(ends), params.min_tokens, most)

    def reason(self, output_ids: list[int]) -> FinishReason | None:
        """Why the sequence is over with its last output token, or None while it goes on."""
        count = len(output_ids)
        if count and output_ids[-1] in self.ends and count >= self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.max_tokens else None


def finish_reason(
    state: SequenceState, *, eos_token_ids: tuple[int, ...], row_capacity_tokens: int
) -> FinishReason | None:
    """Why the sequence is over with its last output token, or None while it goes on."""
    rule = FinishRule.of(
        state, eos_token_ids=eos_token_ids, row_capacity_tokens=row_capacity_tokens
    )
    return rule.reason(state.output_ids)
