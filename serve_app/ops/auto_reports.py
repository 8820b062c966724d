"""Reports to the controller about requests whose model the cluster chose, once a second."""

from __future__ import annotations

from collections import Counter

from quadriga.core.replica import DepthClass
from quadriga.core.request import SequenceState
from quadriga.core.routing import AutoReport
from serve_app.request.cluster_client import ClusterClient
from serve_app.request.sequence_request import SequenceRequest

SAMPLED_EVERY = 8
"""One of so many greedy answers is sent along, to be scored again at full depth."""
MAX_SAMPLED_TOKENS = 1024
MAX_WAITING = 4096
"""Reports that a controller which is away does not get; the oldest are dropped."""


class AutoReports:
    """The reports of one ingress, numbered in order: the controller counts each once."""

    def __init__(self, cluster: ClusterClient, ingress_id: str) -> None:
        self._cluster = cluster
        self._ingress_id = ingress_id
        self._first = 0  # number of the first that waits
        self._waiting: list[AutoReport] = []
        self._num_greedy = 0

    def admitted(self, sequence: SequenceRequest, profile: str | None) -> None:
        """Report an admitted sequence that is part of a replica's profile."""
        self._lost(sequence)
        sequence.profile = profile
        if profile is not None:
            self._waiting.append(AutoReport("started", profile))

    def ended(self, sequence: SequenceRequest, arrived_s: float) -> None:
        """Report a sequence that is over, well or not; once."""
        spans, first_s = sequence.spans, sequence.first_token_s
        if sequence.finish is None or first_s is None or not spans or sequence.replica is None:
            self._lost(sequence)
            return
        classes = {(model, depth) for model, depth, _ in spans[1:]} or {spans[0][:2]}
        is_whole = len(classes) == 1 and all(model == spans[0][0] for model, _ in classes)
        model, depth = next(iter(classes))
        if not is_whole or sequence.num_rebuilds or sequence.was_adopted:
            self._lost(sequence)
            return
        state = sequence.state
        is_sampled = self._is_sampled(state)
        self._waiting.append(
            AutoReport(
                kind="finished",
                replica=sequence.profile or sequence.replica,
                depth_class=DepthClass(model, depth),
                # The first token is the prefill replica's, which may be deeper.
                exit_tokens=dict(Counter(min(k, depth) for k in sequence.state.exit_layers)),
                sure_tokens=dict(Counter(sequence.sure_layers)),
                nll=sequence.nll,
                scored_tokens=sequence.num_scored,
                prompt_tokens=len(sequence.state.prompt_ids),
                ttft_s=max(0.0, first_s - arrived_s),
                decode_s=max(0.0, sequence.last_token_s - first_s),
                prompt_ids=tuple(state.prompt_ids) if is_sampled else (),
                output_ids=tuple(state.output_ids) if is_sampled else (),
                exit_layers=tuple(state.exit_layers) if is_sampled else (),
            )
        )
        sequence.profile = None

    def _is_sampled(self, state: SequenceState) -> bool:
        """Whether an answer is sent along: greedy, plain, and its turn."""
        sampling = state.sampling
        is_plain = (
            sampling.greedy
            and sampling.repetition_penalty == 1.0
            and not (sampling.presence_penalty or sampling.frequency_penalty)
            and not sampling.logit_bias
            and sampling.grammar is None  # what the form forces, the model alone need not say
            and not sampling.min_tokens
            and state.num_tokens <= MAX_SAMPLED_TOKENS
        )
        if not is_plain:
            return False
        self._num_greedy += 1
        return self._num_greedy % SAMPLED_EVERY == 1

    async def send(self) -> None:
        """Send new reports to the controller; those that cannot be sent now are sent later."""
        self._forget(max(0, len(self._waiting) - MAX_WAITING))
        reports = list(self._waiting)
        if reports:
            await self._cluster.auto_reports(self._ingress_id, self._first, reports)
            self._forget(len(reports))

    def _forget(self, count: int) -> None:
        del self._waiting[:count]
        self._first += count

    def _lost(self, sequence: SequenceRequest) -> None:
        if sequence.profile is not None:
            self._waiting.append(AutoReport("lost", sequence.profile))
            sequence.profile = None
