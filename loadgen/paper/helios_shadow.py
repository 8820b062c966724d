"""Answers read again at full depth, teacher-forced: which tokens would it have said, too?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.paper.helios_record import Request
from quadriga.interfaces import ModelRunner, PrefillChunk
from quadriga.types import SamplingParams, SequenceState


@dataclass(slots=True)
class Shadow:
    """Counts of tokens after the first ones, apart by how they left.

    Attributes:
        sure, sure_same: Left early above their threshold; of these, full depth says the same.
        breached, breached_same: Left the deepest loaded exit below it.
    """

    sure: int = 0
    sure_same: int = 0
    breached: int = 0
    breached_same: int = 0

    @property
    def sure_share(self) -> float | None:
        return self.sure_same / self.sure if self.sure else None

    @property
    def breached_share(self) -> float | None:
        return self.breached_same / self.breached if self.breached else None

    def add(self, request: Request, said: Sequence[int], num_layers: int) -> None:
        """Compare a request's tokens with what full depth says in their places."""
        rows = zip(request.token_ids, request.exit_layers, request.breached, said, strict=True)
        for token_id, layers, breached, full in list(rows)[1:]:
            if layers >= num_layers:
                continue
            same = token_id == full
            if breached > 0.5:
                self.breached += 1
                self.breached_same += same
            else:
                self.sure += 1
                self.sure_same += same


def reading(request: Request) -> SequenceState:
    """A request and its answer as a prompt, of whose tokens the probabilities are asked."""
    return SequenceState(
        sequence_id="shadow",
        request_id="shadow",
        model="",
        prompt_ids=[*request.prompt.token_ids, *request.token_ids],
        sampling=SamplingParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=1),
        ingress_id="",
        arrival_unix_s=0.0,
        deadline_unix_s=math.inf,
    )


def read_again(native: ModelRunner, request: Request, row: int = 0) -> list[int]:
    """What the engine, at full depth, says in the place of each token of the answer.

    Args:
        row: Nobody's.
    """
    prompt_ids, state = request.prompt.token_ids, reading(request)
    native.attach(row, state)
    read = native.prefill([PrefillChunk(row, state.prompt_ids, 0, True)])[0]
    native.detach(row)
    assert read is not None and read.prompt_logprobs is not None  # asked for
    return [row.top[0][0] for row in read.prompt_logprobs[len(prompt_ids) :]]
