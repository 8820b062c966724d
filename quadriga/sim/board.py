"""All replicas and sequences of a run as arrays: what the scheduler's tick looks at, at once.

The replicas themselves are advanced one by one, when something happens to them; between events
their state at any instant follows in closed form, for all together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from quadriga.policies.ares.cluster import ClusterForecast, class_loads, with_deep_passes
from quadriga.policies.ares.forecast import (
    FIXED,
    PAUSED,
    RUNS,
    StepCosts,
    forecast_rows,
    load_sums,
    memory_rows,
    shares,
    sizes,
    tokens_ahead,
)
from quadriga.policies.slot_reservation import ASSUMED_TOKENS
from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.prediction import RemainingPredictor
from quadriga.sim.profiles import CostProfile

NOWHERE = -1


class Board:
    """Arrays over n decode replicas and all requests of a run.

    Attributes:
        owner: Replica of each request, or NOWHERE; changed by `give` alone.
        prompt_tokens: Of all requests that each replica owns.
        is_running: False for a sequence that is paused, or on its way to its owner.
        is_paused: Stands in host memory, its KV whole, and is not on its way back.
        base: Size of a running sequence less its replica's steps; of another, its size.
        moves, moved_s: Migrations so far, and when the last one was.
        is_draining: Replicas that take nothing new.
        num_held, num_running: Sequences that each replica has or expects; in its batch.
        num_paused: Sequences preempted and not back.
        upper_tokens, usual_tokens: Of the answers at each replica; see `policies.slot_reservation`.
        depth: Layers of each replica.
        is_strict: Requests that need the deepest.
        is_lock_step: A step of all takes as long as the slowest one's.
        stays: How often a token of each request goes on behind the first exit.
        front_share: Of the layers, those before that exit; 1 without one.
    """

    def __init__(
        self,
        names: list[str],
        profile: CostProfile,
        input_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
        depths: Sequence[int] = (),
        *,
        is_lock_step: bool = False,
    ) -> None:
        n, num_requests = len(names), len(input_tokens)
        self.names, self.profile, self.is_lock_step = names, profile, is_lock_step
        self.depth = np.array(depths or [1] * n, dtype=np.int64)
        self._is_deepest = self.depth == self.depth.max()
        self.is_strict = np.zeros(num_requests, dtype=bool)
        self.stays, self.front_share = np.ones(num_requests), 1.0
        self.input_tokens = input_tokens.astype(np.float64)
        self.final_tokens = (input_tokens + output_tokens).astype(np.float64)
        self.owner = np.full(num_requests, NOWHERE, dtype=np.int64)
        self.is_running = np.zeros(num_requests, dtype=bool)
        self.is_paused = np.zeros(num_requests, dtype=bool)
        self.base = np.zeros(num_requests)
        self.moves = np.zeros(num_requests)
        self.moved_s = np.full(num_requests, -np.inf)
        self.is_alive = np.ones(n, dtype=bool)
        self.is_draining = np.zeros(n, dtype=bool)
        self._anchor_s, self._steps = np.zeros(n), np.zeros(n)
        self._tokens, self.num_running = np.zeros(n), np.zeros(n)
        # k steps from the anchor take linear · k + half · k²; the first one, by the profile, first.
        base_s: NDArray[np.float64] = profile.step.base_s * self.depth / self.depth.max()
        self._first_s, self._slope_s = base_s, np.zeros(n)
        self._linear_s, self._half_s = base_s.copy(), np.zeros(n)
        self._aside_tokens, self.num_held = np.zeros(n), np.zeros(n, dtype=np.int64)
        self.num_paused = np.zeros(n, dtype=np.int64)
        self.prompt_tokens = np.zeros(n)
        self.upper_tokens = np.full(n, ASSUMED_TOKENS)
        self.usual_tokens = np.full(n, ASSUMED_TOKENS)
        self._spare_tokens, self._num_growing = np.zeros(n), np.zeros(n)
        self._now_s: float | None = None  # of `_new_steps`
        self._new_steps = np.zeros(n)

    def give(self, request: int, replica: int) -> None:
        """A request has another owner, or NOWHERE."""
        before = self.owner[request]
        if before != NOWHERE:
            self.prompt_tokens[before] -= self.input_tokens[request]
        if replica != NOWHERE:
            self.prompt_tokens[replica] += self.input_tokens[request]
        self.owner[request] = replica

    def has_layers(self, request: int) -> NDArray[np.bool_]:
        """Which replicas have the layers that a request needs, [n]."""
        return np.asarray(self._is_deepest | ~self.is_strict[request])

    def note(self, index: int, replica: SimulatedDecodeReplica) -> None:
        """A replica's state changed."""
        self._now_s = None
        self._anchor_s[index] = replica.anchor_s + replica.held_up_s
        self._steps[index] = replica.steps
        self._tokens[index] = replica.tokens
        self.num_running[index] = num = len(replica.running)
        cost = replica.profile.step
        self._first_s[index] = replica.modelled_step_s
        self._slope_s[index] = cost.per_token_s * replica.work
        self._half_s[index] = half_s = replica.slope_s / 2.0
        self._linear_s[index] = replica.first_step_s - half_s
        self._aside_tokens[index] = replica.held_tokens - replica.tokens
        spare = replica.spare_tokens()
        self._spare_tokens[index] = sum(spare)
        self._num_growing[index] = num - len(spare)
        self.upper_tokens[index] = replica.answers.upper_tokens
        self.usual_tokens[index] = replica.answers.usual_tokens
        self.num_held[index] = replica.num_held
        self.num_paused[index] = replica.num_halted

    def new_steps(self, now_s: float) -> NDArray[np.float64]:
        """Whole steps each replica has made since its anchor, [n]; not to be written to."""
        if now_s != self._now_s:
            self._now_s, self._new_steps = now_s, self._steps_until(now_s)
        return self._new_steps

    def _steps_until(self, now_s: float) -> NDArray[np.float64]:
        linear, half = self._linear_s, self._half_s
        passed_s = np.maximum(now_s - self._anchor_s, 0.0)
        root = 2.0 * passed_s / (linear + np.sqrt(linear * linear + 4.0 * half * passed_s))
        steps = np.floor(root)
        steps -= steps * linear + half * steps * steps > passed_s
        more = steps + 1.0
        steps += more * linear + half * (more * more) <= passed_s
        return np.where(self.num_running > 0, steps, 0.0)

    def step_s(self, new_steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of the step each replica is at, [n]; in lock step of its own work in it."""
        return self._first_s + self._slope_s * new_steps

    def pace_s(self, new_steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds between two tokens of a sequence on each replica, [n]."""
        step_s = self.step_s(new_steps)
        if not self.is_lock_step:
            return step_s
        return np.full(len(step_s), step_s[self.is_alive].max(initial=0.0))

    def running_tokens(self, new_steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """KV tokens of running sequences: what a replica's memory really holds, [n]."""
        return self._tokens + self.num_running * new_steps

    def used_tokens(self, new_steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """KV tokens of running, paused and promised sequences, [n]."""
        return self.running_tokens(new_steps) + self._aside_tokens

    def reserved_tokens(self, new_steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same with what the running were promised and do not use yet, [n]."""
        running = self._tokens + self._spare_tokens + self._num_growing * new_steps
        return np.asarray(running + self._aside_tokens)

    def held(self) -> NDArray[np.int64]:
        """Requests on a decode replica, by replica, then by index."""
        requests = np.flatnonzero(self.owner >= 0)
        return requests[np.argsort(self.owner[requests], kind="stable")]

    def tokens_of(
        self, requests: NDArray[np.int64], new_steps: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Their sizes now, [num_requests]."""
        steps = (self._steps + new_steps)[self.owner[requests]]
        return self.base[requests] + np.where(self.is_running[requests], steps, 0.0)

    def forecast(
        self,
        now_s: float,
        grid_s: NDArray[np.float64],
        capacity_tokens: float,
        predictor: RemainingPredictor | None,
    ) -> ClusterForecast:
        """What the packed snapshots of all living replicas would say at this moment."""
        new_steps = self.new_steps(now_s)
        alive = np.flatnonzero(self.is_alive)
        step_s = self.pace_s(new_steps)
        requests = self.held()
        owner = self.owner[requests]
        at = np.searchsorted(alive, owner)  # a replica that holds a request is alive
        tokens = self.tokens_of(requests, new_steps)
        mean = lower = upper = np.zeros(len(requests))
        if predictor is not None:
            remaining = self.final_tokens[requests] - tokens
            predicted = predictor.predict(requests, tokens - self.input_tokens[requests], remaining)
            mean, lower, upper = predicted.mean, predicted.lower, predicted.upper
        rows = forecast_rows(
            tokens=tokens,
            remaining=mean,
            lower=lower,
            upper=upper,
            moves=self.moves[requests],
            since_move_s=now_s - self.moved_s[requests],
            movable=np.where(
                self.is_running[requests], RUNS, np.where(self.is_paused[requests], PAUSED, FIXED)
            ),
            share=self.front_share + (1.0 - self.front_share) * self.stays[requests],
            least_layers=np.where(self.is_strict[requests], self.depth[owner], 0),
        )
        # From the rows as packed, in single precision, as a worker's own sums are.
        size, remaining = sizes(rows)
        layers = self.depth if (self.depth != self.depth[0]).any() else np.ones(len(self.depth))
        running, context = load_sums(size, remaining, shares(rows) * layers[owner])
        held = memory_rows(size, remaining, tokens_ahead(grid_s, step_s)[owner])
        step, most = self.profile.step, layers.max()
        measured = StepCosts(step.per_sequence_s / most, step.per_token_s / most)
        n = len(alive)
        sums = _summed(np.concatenate((running, context, held), axis=1), at, n)
        all_running, all_context, all_held = np.split(sums, 3, axis=1)
        num_each, share_each = len(requests) / n, float(all_running[:, 0].mean())
        costs = with_deep_passes(measured, step.base_s, self.front_share, num_each, share_each)
        return ClusterForecast(
            names=[self.names[i] for i in alive],
            costs=costs,
            measured=measured,
            depth=self.depth[alive],
            load_s=class_loads(costs, all_running, all_context),
            grid_s=grid_s,
            tokens=np.ascontiguousarray(all_held),
            step_s=np.maximum(step_s[alive], 1e-9),
            capacity_tokens=np.full(n, capacity_tokens),
            longest=np.full(n, capacity_tokens, dtype=np.int64),
            promised_tokens=self.reserved_tokens(new_steps)[alive],
            free_slots=np.where(
                self.is_draining[alive], 0, self.profile.num_slots - self.num_held[alive]
            ),
            num_paused=self.num_paused[alive],
            rows=rows,
            row_load_s=class_loads(costs, running, context).astype(np.float32),
            owner=at,
            sequence_ids=_Ids(requests),
            has_predictions=predictor is not None,
            base_s=step.base_s,
            front_share=self.front_share,
        )


class _Ids(Sequence[str]):
    """Names of requests, made when one is asked for: a tick names none but those it moves."""

    def __init__(self, requests: NDArray[np.int64]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice):
            return [str(i) for i in self._requests[at].tolist()]
        return str(int(self._requests[at]))


def _summed(
    values: NDArray[np.float64], owner: NDArray[np.int64], num_owners: int
) -> NDArray[np.float64]:
    """Sum rows by owner, [num_owners, columns], rounded to what a packed sum holds."""
    bounds = np.searchsorted(owner, np.arange(num_owners + 1))
    holds = bounds[1:] > bounds[:-1]
    if holds.all():
        sums = np.add.reduceat(values, bounds[:-1], axis=0)
    else:  # `reduceat` has no sum of nothing
        sums = np.zeros((num_owners, values.shape[1]))
        if holds.any():
            sums[holds] = np.add.reduceat(values, bounds[:-1][holds], axis=0)
    return sums.astype(np.float32).astype(np.float64)
