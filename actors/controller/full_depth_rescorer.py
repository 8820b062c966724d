"""Finished answers are scored again at full depth: which of their tokens are the same there?

The scout's prefill replica gets prompt and answer as one prompt and returns, for every position,
the token that is most probable. Source: ours; perplexity rates a shallow, over-confident exit too
well.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence

from actors.rpc.ray_rpc import call
from quadriga.clock import Clock
from quadriga.core.output import PollReply
from quadriga.core.request import SamplingParams, SequenceState, TokenLogprob
from quadriga.core.routing import AutoReport
from quadriga.errors import QuadrigaError
from quadriga.policies.helios.messages import UnchangedSampled

logger = logging.getLogger(__name__)

DEADLINE_S = 20.0
POLL_S = 1.0


class FullDepthRescorer:
    """Scores answers one at a time; those that come meanwhile are left out."""

    def __init__(self, app: str, clock: Clock) -> None:
        self._ingress_id = f"{app}:helios:{uuid.uuid4().hex[:8]}"
        self._clock = clock
        self._acks: dict[str, int] = {}
        self.is_reading = False

    async def read(self, report: AutoReport, replica: str, model: str) -> UnchangedSampled | None:
        """Compare an answer with what `replica`, at full depth, would say; None: it did not."""
        if self.is_reading:
            return None
        self.is_reading = True
        try:
            said = await self._ask(replica, model, [*report.prompt_ids, *report.output_ids])
        except QuadrigaError as exc:
            logger.info("an answer was not read again: %s", exc)
            return None
        finally:
            self.is_reading = False
        if said is None:
            return None
        depth = report.depth_class.depth if report.depth_class is not None else None
        return UnchangedSampled(model, compared(report, said), depth)

    async def _ask(
        self, replica: str, model: str, token_ids: list[int]
    ) -> list[TokenLogprob] | None:
        now_s = self._clock.now_s()
        now_unix_s = self._clock.unix_s()
        state = SequenceState(
            sequence_id=uuid.uuid4().hex,
            request_id=self._ingress_id,
            model=model,
            prompt_ids=token_ids,
            sampling=SamplingParams(max_tokens=0, temperature=0.0, num_prompt_logprobs=1),
            ingress_id=self._ingress_id,
            arrival_unix_s=now_unix_s,
            deadline_unix_s=now_unix_s + DEADLINE_S,
        )
        await call(replica, "submit", state, timeout_s=DEADLINE_S)
        while self._clock.now_s() - now_s < DEADLINE_S:
            ack = self._acks.get(replica, 0)
            reply: PollReply = await call(
                replica, "poll", self._ingress_id, ack, POLL_S, timeout_s=POLL_S + DEADLINE_S
            )
            self._acks = {replica: reply.last_seq}
            for emission in reply.emissions:
                is_over = emission.finish is not None or emission.error is not None
                if emission.sequence_id == state.sequence_id and is_over:
                    return emission.prompt_logprobs
        await call(replica, "cancel", [state.sequence_id], timeout_s=DEADLINE_S)
        return None


def compared(report: AutoReport, said: Sequence[TokenLogprob]) -> dict[int, tuple[int, int]]:
    """Layers run → (tokens of the answer that full depth says too, tokens)."""
    exits: dict[int, tuple[int, int]] = {}
    first = len(report.prompt_ids)
    rows = zip(report.output_ids, report.exit_layers, said[first:], strict=False)
    for token_id, layers, row in rows:
        same, looked = exits.get(layers, (0, 0))
        best = row.top[0][0] if row.top else row.token_id
        exits[layers] = (same + (best == token_id), looked + 1)
    return exits
