"""A sequence whose replica was lost is prefilled once more: its prompt and what it has said so far.

Output token i ≥ 1 was sampled by running position P + i − 1 of a prompt of P tokens, to the depth
`exit_layers[i]`; the prompt itself ran all layers. The newest token has not been run at all: as
after any hand-off, it is the decode replica's next input. So what a rebuild computes is every
position but the newest token's, each to the depth it once ran, and it samples nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

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
        ends: Layers run at the end of each segment, ascending.
        newest: So many positions right before a token that goes deeper go with it.
        is_exact: Rebuilt, a sequence goes on as if nothing had been lost: `rewound`.
    """

    ends: tuple[int, ...]
    newest: int
    is_exact: bool = False

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

    def rewound(self, state: SequenceState) -> SequenceState:
        """A sequence that is to be rebuilt, without the tokens after its last deep one.

        Which of their positions will go deep, and how, the next deep token decides. They are said
        again, which no client sees: in a deterministic deployment they are the same.
        """
        if not (self.is_exact and self.newest and state.output_ids):
            return state
        most = min(state.exits.max_depth or self.ends[-1], self.ends[-1])
        enough = max((end for end in self.ends if end <= most), default=self.ends[0])
        deep = [i for i, layers in enumerate(state.exit_layers) if layers >= enough]
        kept = 1 + max(deep, default=0)
        return replace(
            state,
            output_ids=state.output_ids[:kept],
            exit_layers=state.exit_layers[:kept],
            logprobs=state.logprobs[:kept],
        )


def replays_of(spec: EngineSpec, *, is_exact: bool) -> Replays | None:
    """What is replayed where sequences are rebuilt; None: nothing, or their depth may change."""
    is_mapped = spec.skipped_kv in ("linear", "project")
    if not (spec.replay_newest and is_mapped and spec.exits.layers):
        return None
    return Replays((*spec.exits.layers, spec.depth), spec.replay_newest, is_exact)


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
    depths = [num_layers] * num_prompt + state.exit_layers[1:]
    if replays is not None and replays.newest:
        depths = replays.depths(depths)
    return PrefillChunk(row, token_ids, start, is_last=False, depths=depths[start:stop])


def check_record(state: SequenceState) -> None:
    """Raises: InvariantViolation: The exit record does not cover the output."""
    if len(state.exit_layers) != len(state.output_ids):
        raise InvariantViolation(
            f"{state.sequence_id} has {len(state.output_ids)} output tokens and the depths of "
            f"{len(state.exit_layers)}: it cannot be rebuilt"
        )
