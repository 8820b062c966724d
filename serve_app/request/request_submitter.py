"""The way of a sequence to its prefill replica: admitted, submitted, again where that fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

from quadriga.checkpoint.exits import MAX_LAYERS
from quadriga.clock import Clock
from quadriga.config.ingress import IngressConfig
from quadriga.core.request import AUTO_MODEL
from quadriga.core.routing import Admission, AdmitRequest
from quadriga.errors import Overloaded, QuadrigaError, ReplicaDied, ReplicaError, Unavailable
from quadriga.scheduling.rebuild import num_prefill_tokens
from serve_app.ops.auto_reports import AutoReports
from serve_app.request.cancellation import CancellationBatcher
from serve_app.request.cluster import Cluster
from serve_app.request.cluster_state import ClusterStateCache
from serve_app.request.output_poller import OutputPoller
from serve_app.request.recovery import pause_s
from serve_app.request.sequence_request import SequenceRequest

LAUNCH_ATTEMPTS = 3
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0


class RequestSubmitter:
    """Brings sequences onto the road, new ones and those that are to be rebuilt.

    A new one is refused where the cluster is full, and after a few failures. A rebuilt one was
    admitted before: it waits for room, and for replicas that are being started, until
    `ingress.rebuild_patience_s`. The request's own deadline ends either.

    Args:
        rename: Has a sequence freed wherever it may be, and returns the new name under which it
            goes on: a submission that failed may still have arrived, and must not run twice.
    """

    def __init__(
        self,
        config: IngressConfig,
        cluster: Cluster,
        watch: ClusterStateCache,
        clock: Clock,
        output_poller: OutputPoller,
        cancellations: CancellationBatcher,
        *,
        rename: Callable[[SequenceRequest], str],
        reports: AutoReports | None = None,
    ) -> None:
        self._reports = reports
        self._config = config
        self._cluster = cluster
        self._watch = watch
        self._clock = clock
        self._output_poller = output_poller
        self._cancellations = cancellations
        self._rename = rename

    async def launch(self, choice: SequenceRequest, name: str) -> bool:
        """Have a sequence accepted that is called `name`.

        Returns:
            Whether it was; not where it ended, or was lost and got another name, before.

        "Nobody is ready" is often over in a moment: after a stall of the machine every report is
        old at once although the replicas live. So it is asked again, ever more rarely.

        Raises:
            QuadrigaError: Nobody takes it, or nobody did for too long.
        """
        is_rebuild = choice.num_rebuilds > 0
        patience = self._config.rebuild_patience_s if is_rebuild else None
        give_up_s = self._clock.now_s() + (patience or self._config.admission_patience_s)
        wait_s = FIRST_PAUSE_S
        num_failures = 0
        if is_rebuild:
            await asyncio.sleep(pause_s(choice.num_stalled - 1))
        while choice.is_called(name):
            try:
                admission = await self._watch.admit(_admit_request(choice))
            except (Unavailable, Overloaded) as exc:
                if isinstance(exc, Overloaded) and not is_rebuild:
                    raise
                wait_s = await self._wait(give_up_s, wait_s, exc)
                continue
            if not choice.is_called(name):
                return False
            try:
                if choice.is_auto:
                    self._take(choice, admission)
                await self._submit(choice, name, admission.prefill_replica)
                return True
            except QuadrigaError as exc:
                if not choice.is_called(name):  # it is on its way elsewhere, or over
                    return False
                if not isinstance(exc, ReplicaError | Overloaded | Unavailable):
                    raise
                num_failures += 1
                if isinstance(exc, ReplicaDied):
                    self._watch.forget(admission.prefill_replica)
                if not is_rebuild and num_failures == LAUNCH_ATTEMPTS:
                    raise
                name = self._rename(choice)
                if is_rebuild:
                    wait_s = await self._wait(give_up_s, wait_s, exc)
        return False

    def _take(self, choice: SequenceRequest, admission: Admission) -> None:
        """Note the model that was chosen, and what the cluster wants to know of the answer."""
        state, chosen = choice.state, admission.depth_class
        if state.model != chosen.model:
            # What another model said is taken as said by all layers of this one.
            state.exit_layers = [chosen.depth] * len(state.output_ids)
            state.model = chosen.model
        if admission.is_scored and state.sampling.num_logprobs is None:
            state.sampling = replace(state.sampling, num_logprobs=0)
        if self._reports is not None:
            self._reports.admitted(choice, admission.profile)

    async def _submit(self, choice: SequenceRequest, name: str, replica: str) -> None:
        choice.replica = replica
        self._output_poller.watch(replica, name)
        # A copy: it travels in a moment, with others, and the sequence may be renamed until then.
        state = choice.state
        await self._cluster.submit(
            replica,
            replace(
                state,
                output_ids=list(state.output_ids),
                exit_layers=list(state.exit_layers),
            ),
        )
        if choice.is_called(name):
            choice.heard_s = self._clock.now_s()
        else:  # it ended, or was lost, while it was being submitted
            self._cancellations.cancel(replica, name)

    async def _wait(self, give_up_s: float, wait_s: float, error: QuadrigaError) -> float:
        """Wait a moment; returns how long the next one is. Raises: `error`, at `give_up_s`."""
        left_s = give_up_s - self._clock.now_s()
        if left_s <= 0:
            raise error
        # Spread, so that those who wait do not all come back at once.
        await asyncio.sleep(min(left_s, wait_s * random.uniform(0.5, 1.0)))
        return min(2 * wait_s, MAX_PAUSE_S)


def _admit_request(choice: SequenceRequest) -> AdmitRequest:
    state, exits = choice.state, choice.state.exits
    num_tokens = num_prefill_tokens(state)
    needs_depth = exits.max_depth or MAX_LAYERS if exits.policy == "strict" else 0
    return AdmitRequest(
        sequence_id=state.sequence_id,
        model=AUTO_MODEL if choice.is_auto else state.model,
        num_prompt_tokens=num_tokens,
        max_tokens=state.max_total_tokens - num_tokens,
        priority=state.priority,
        deadline_unix_s=state.deadline_unix_s,
        needs_depth=needs_depth,
        is_rebuild=choice.num_rebuilds > 0,
        visitor=choice.visitor,
    )
