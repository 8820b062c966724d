"""A prefill replica: the cluster's own queue, one pass after the other, in modelled time."""

from __future__ import annotations

import math

from quadriga.config.engine import PrefillConfig
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.scheduling.prefill_queue import PrefillQueue
from quadriga.scheduling.sequence import RunningSequence
from quadriga.sim.profiles import CostProfile


class SimulatedPrefillReplica:
    """Takes prompts from its queue, several in one pass, while tokens fit the budget.

    Attributes:
        blocked_since_s: Since when it stands still with a queue for want of free rows, or None.
    """

    def __init__(self, name: str, profile: CostProfile, config: PrefillConfig) -> None:
        self.name = name
        self.profile = profile
        self.is_busy = False
        self.in_pass: list[int] = []
        self.blocked_since_s: float | None = None
        self._pass_tokens = 0
        self._queue = PrefillQueue(
            max_sequences=config.max_queued_sequences,
            max_tokens=config.max_queued_tokens,
            max_age_s=config.max_age_s,
        )

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Tokens not computed yet: in the queue, and in the pass under way."""
        return self._queue.num_tokens + self._pass_tokens

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens a second at full speed."""
        return 1.0 / self.profile.prefill_per_token_s

    def push(self, index: int, num_tokens: int, arrival_s: float, *, now_s: float) -> None:
        """Queue a prompt. Raises: Overloaded."""
        state = SequenceState(
            sequence_id=str(index),
            request_id=str(index),
            model="",
            prompt_ids=[0] * num_tokens,
            sampling=SamplingParams(max_tokens=self.profile.max_tokens),
            ingress_id="",
            arrival_unix_s=arrival_s,
            deadline_unix_s=math.inf,
        )
        self._queue.push(RunningSequence(state), now_s=now_s, drain_tokens_per_s=self.tokens_per_s)

    def end_pass(self) -> None:
        """The pass under way is over."""
        self.is_busy = False
        self._pass_tokens = 0

    def start_pass(self, *, now_s: float) -> float | None:
        """Begin the next pass; returns its seconds, or None where nothing waits."""
        lengths: list[int] = []
        self.in_pass, self._pass_tokens = [], 0

        def start(sequence: RunningSequence) -> bool:
            if self._pass_tokens >= self.profile.prefill_budget_tokens:
                return False
            self.in_pass.append(int(sequence.state.sequence_id))
            lengths.append(len(sequence.state.prompt_ids))
            self._pass_tokens += lengths[-1]
            return True

        self._queue.take(start, now_s=now_s)
        self.is_busy = bool(lengths)
        return self.profile.prefill_s(lengths) if lengths else None
