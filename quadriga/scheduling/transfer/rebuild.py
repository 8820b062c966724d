"""A sequence whose replica was lost is prefilled once more: its prompt and what it has said so far.

Output token i ≥ 1 was sampled by running position P + i − 1 of a prompt of P tokens, to the depth
`exit_layers[i]`; the prompt itself ran all layers. The newest token has not been run at all: as
after any hand-off, it is the decode replica's next input. So what a rebuild computes is every
position but the newest token's, each to the depth it once ran, and it samples nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SequenceState
from quadriga.errors import InvariantViolation
from quadriga.interfaces import PrefillChunk


def is_rebuild(state: SequenceState) -> bool:
    """Whether a sequence that comes to a prefill replica has begun to speak before."""
    return bool(state.output_ids)


def num_prefill_tokens(state: SequenceState) -> int:
    """Tokens that a prefill replica computes: the prompt, and of a rebuild all but the newest."""
    return len(state.prompt_ids) + max(0, len(state.output_ids) - 1)


@dataclass(frozen=True, slots=True)
class Replays:
    """Which skipped positions went through the layers after all, and are to do so again.

    Attributes:
        ends: Layers run at the end of each segment of the whole model, ascending: what is loaded
            may change.
        newest: So many positions right before a token that goes deeper go with it.
    """

    ends: tuple[int, ...]
    newest: int

    def depths(self, recorded: Sequence[int]) -> list[int]:
        """Layers that each position of a sequence has run, by itself or with a later token."""
        last = len(self.ends) - 1
        own = [self.ends[min(bisect_left(self.ends, k), last)] for k in recorded]
        found = list(own)
        for first, end in pairwise(self.ends):
            deeper = len(own) + self.newest
            for position in range(len(own) - 1, -1, -1):
                if own[position] > first:
                    deeper = position
                elif found[position] == first and deeper - position <= self.newest:
                    found[position] = end
        return found


def replays_of(spec: EngineSpec) -> Replays | None:
    """What is replayed where positions are computed again; None: nothing."""
    is_mapped = spec.skipped_kv in ("linear", "project")
    if not (spec.replay_newest and is_mapped and spec.exit_plan.layers):
        return None
    return Replays((*spec.exit_plan.layers, spec.checkpoint.num_layers), spec.replay_newest)


def depths_of(state: SequenceState, num_layers: int, replays: Replays | None) -> list[int]:
    """Layers that each position of a sequence ran, but for the newest token's: a prompt all."""
    recorded = [num_layers] * len(state.prompt_ids) + state.exit_layers[1:]
    return recorded if replays is None else replays.depths(recorded)


def num_open(state: SequenceState, full_depth: int) -> int:
    """Tokens that left early since the last that ran all layers: a later one may replay them."""
    return sum(1 for _ in takewhile(lambda k: k < full_depth, reversed(state.exit_layers[1:])))


def chunk_of(
    state: SequenceState,
    *,
    row: int,
    start: int,
    stop: int,
    num_layers: int,
    replays: Replays | None = None,
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
    first = max(0, start - num_prompt)  # of the outputs
    last = max(0, stop - num_prompt)
    token_ids = token_ids + state.output_ids[first:last]
    depths = depths_of(state, num_layers, replays)
    return PrefillChunk(row, token_ids, start, is_last=False, depths=depths[start:stop])


def check_record(state: SequenceState) -> None:
    """Raises: InvariantViolation: The exit record does not cover the output."""
    if len(state.exit_layers) != len(state.output_ids):
        raise InvariantViolation(
            f"{state.sequence_id} has {len(state.output_ids)} output tokens and the depths of "
            f"{len(state.exit_layers)}: it cannot be rebuilt"
        )
