"""A sequence whose replica was lost is prefilled once more: its prompt and what it has said so far.

Output token i ≥ 1 was sampled by running position P + i − 1 of a prompt of P tokens, to the depth
`exit_layers[i]`; the prompt itself ran all layers. The newest token has not been run at all: as
after any hand-off, it is the decode replica's next input. So what a rebuild computes is every
position but the newest token's, each to the depth it once ran, and it samples nothing.
"""

from __future__ import annotations

from quadriga.core.request import SequenceState
from quadriga.errors import InvariantViolation
from quadriga.interfaces import PrefillChunk


def is_rebuild(state: SequenceState) -> bool:
    """Whether a sequence that comes to a prefill replica has begun to speak before."""
    return bool(state.output_ids)


def num_prefill_tokens(state: SequenceState) -> int:
    """Tokens that a prefill replica computes: the prompt, and of a rebuild all but the newest."""
    return len(state.prompt_ids) + max(0, len(state.output_ids) - 1)


def chunk_of(
    state: SequenceState, *, row: int, start: int, stop: int, num_layers: int
) -> PrefillChunk:
    """The tokens at positions [start, stop) as a runner takes them.

    Raises:
        InvariantViolation: The exit record does not cover the output.
    """
    num_prompt = len(state.prompt_ids)
    if not is_rebuild(state):
        tokens = state.prompt_ids[start:stop]
        return PrefillChunk(row, tokens, start, is_last=stop == num_prompt)
    check_record(state)
    token_ids = state.prompt_ids[start:stop]
    depths = [num_layers] * len(token_ids)
    first = max(0, start - num_prompt)  # of the outputs
    last = max(0, stop - num_prompt)
    token_ids = token_ids + state.output_ids[first:last]
    depths += state.exit_layers[first + 1 : last + 1]
    return PrefillChunk(row, token_ids, start, is_last=False, depths=depths)


def check_record(state: SequenceState) -> None:
    """Raises: InvariantViolation: The exit record does not cover the output."""
    if len(state.exit_layers) != len(state.output_ids):
        raise InvariantViolation(
            f"{state.sequence_id} has {len(state.output_ids)} output tokens and the depths of "
            f"{len(state.exit_layers)}: it cannot be rebuilt"
        )
