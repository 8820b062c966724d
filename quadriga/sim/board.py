"""All replicas and sequences of a run as arrays: what the scheduler's tick looks at, at once.

The replicas themselves are advanced one by one, when something happens to them; between events
their state at any instant follows in closed form, for all together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.forecast import (
    FIXED,
    NUM_LOADS,
    PAUSED,
    REMAINING,
    RUNS,
    TOKENS,
    forecast_rows,
    memory_rows,
    tokens_ahead,
)
from quadriga.sim.decode import DecodeReplica
from quadriga.sim.prediction import Predictor
from quadriga.sim.profiles import CostProfile

NOWHERE = -1


class Board:
    """Arrays over n decode replicas and all requests of a run.

    Attributes:
        owner: Replica of each request, or NOWHERE.
        is_running: False for a sequence that is paused, or on its way to its owner.
        is_paused: Stands in host memory, its KV whole, and is not on its way back.
        base: Size of a running sequence less its replica's steps; of another, its size.
        moves, moved_s: Migrations so far, and when the last one was.
        is_draining: Replicas that take nothing new.
        num_paused: Sequences preempted and not back.
    """

    def __init__(
        self,
        names: list[str],
        profile: CostProfile,
        input_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
    ) -> None:
        n, num_requests = len(names), len(input_tokens)
        self.names, self.profile = names, profile
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
        self._anchor_s, self._steps, self._factor = np.zeros(n), np.zeros(n), np.ones(n)
        self._tokens, self._num = np.zeros(n), np.zeros(n)
        self._aside_tokens, self._num_held = np.zeros(n), np.zeros(n, dtype=np.int64)
        self.num_paused = np.zeros(n, dtype=np.int64)

    def note(self, index: int, replica: DecodeReplica) -> None:
        """A replica's state changed."""
        self._anchor_s[index] = replica.anchor_s
        self._steps[index] = replica.steps
        self._factor[index] = replica.factor
        self._tokens[index] = replica.tokens
        self._num[index] = len(replica.running)
        self._aside_tokens[index] = replica.held_tokens - replica.tokens
        self._num_held[index] = replica.num_held
        self.num_paused[index] = replica.num_halted

    def new_steps(self, now_s: float) -> NDArray[np.float64]:
        """Whole steps each replica has made since its anchor, [n]."""
        cost = self.profile.step
        passed_s = np.maximum(now_s - self._anchor_s, 0.0)
        half = self._factor * cost.per_token_s * self._num / 2.0
        linear = self._factor * self._first_step_s() - half
        root = 2.0 * passed_s / (linear + np.sqrt(linear * linear + 4.0 * half * passed_s))
        steps = np.floor(root)
        steps -= steps * linear + half * steps * steps > passed_s
        steps += (steps + 1.0) * linear + half * (steps + 1.0) ** 2 <= passed_s
        return np.where(self._num > 0, steps, 0.0)

    def _first_step_s(self) -> NDArray[np.float64]:
        cost = self.profile.step
        return cost.base_s + cost.per_sequence_s * self._num + cost.per_token_s * self._tokens

    def step_s(self, new_steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of the step each replica is at, [n]."""
        return self._first_step_s() + self.profile.step.per_token_s * self._num * new_steps

    def used_tokens(self, new_steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """KV tokens of running, paused and promised sequences, [n]."""
        return self._tokens + self._num * new_steps + self._aside_tokens

    @property
    def num_held(self) -> NDArray[np.int64]:
        return self._num_held

    @property
    def num_running(self) -> NDArray[np.float64]:
        return self._num

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
        predictor: Predictor | None,
    ) -> ClusterForecast:
        """What the packed snapshots of all living replicas would say at this moment."""
        new_steps = self.new_steps(now_s)
        alive = np.flatnonzero(self.is_alive)
        position = np.full(len(self.names), NOWHERE)
        position[alive] = np.arange(len(alive))
        step_s = self.step_s(new_steps)
        requests = self.held()
        owner = self.owner[requests]
        tokens = self.tokens_of(requests, new_steps)
        zero = np.zeros(len(requests))
        mean = lower = upper = zero
        if predictor is not None:
            remaining = self.final_tokens[requests] - tokens
            said = predictor.predict(requests, tokens - self.input_tokens[requests], remaining)
            mean, lower, upper = said.mean, said.lower, said.upper
        ahead = tokens_ahead(grid_s, step_s)
        cost = self.profile.step
        rows = forecast_rows(
            tokens=tokens,
            remaining=mean,
            lower=lower,
            upper=upper,
            ahead=ahead[owner],
            per_sequence_s=cost.per_sequence_s,
            per_token_s=cost.per_token_s,
            moves=self.moves[requests],
            since_move_s=now_s - self.moved_s[requests],
            movable=np.where(
                self.is_running[requests], RUNS, np.where(self.is_paused[requests], PAUSED, FIXED)
            ),
        )
        # From the rows as packed, in single precision, as a worker's own sums are.
        held = memory_rows(
            rows[:, TOKENS].astype(np.float64), rows[:, REMAINING].astype(np.float64), ahead[owner]
        )
        n = len(alive)
        at = position[owner]
        return ClusterForecast(
            names=[self.names[i] for i in alive],
            grid_s=grid_s,
            load_s=_summed(rows[:, :NUM_LOADS].astype(np.float64), at, n),
            tokens=_summed(held, at, n),
            base_s=np.full(n, cost.base_s),
            step_s=np.maximum(step_s[alive], 1e-9),
            capacity_tokens=np.full(n, capacity_tokens),
            free_slots=np.where(
                self.is_draining[alive], 0, self.profile.num_slots - self._num_held[alive]
            ),
            num_paused=self.num_paused[alive],
            rows=rows,
            owner=at,
            sequence_ids=[str(i) for i in requests.tolist()],
            has_predictions=predictor is not None,
        )


def _summed(
    values: NDArray[np.float64], owner: NDArray[np.int64], num_owners: int
) -> NDArray[np.float64]:
    """Sum rows by owner, [num_owners, columns], rounded to what a packed sum holds."""
    sums = np.zeros((num_owners, values.shape[1]))
    if len(owner):
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        sums[owner[starts]] = np.add.reduceat(values, starts, axis=0)
    return sums.astype(np.float32).astype(np.float64)
