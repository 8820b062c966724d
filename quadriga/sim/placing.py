"""Where a prefilled sequence goes, in a simulation: the policy's choice, on the board's state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quadriga.policies.ares import DriftMonitor, StepCosts, horizon_s
from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.forecast import load_rows, memory_rows, tokens_ahead
from quadriga.policies.ares.placement import best_replica
from quadriga.sim.board import Board
from quadriga.sim.config import DEPTH_CLASS, SimConfig
from quadriga.sim.policies import PolicySet
from quadriga.sim.prediction import NoisyPredictor, OraclePredictor, Predictor
from quadriga.types import LengthPrediction, PlaceRequest, ReplicaInfo, ReplicaSnapshot, Role


class Placing:
    """Predictions, the last tick's forecast with what was placed since, and the choice by it.

    Where nothing is foreseen the choice is by the last reports, with what was placed since.

    Attributes:
        predictor: None for policies that do not foresee.
        forecast: Of the last tick; None where the policy does not look ahead, or replicas changed.
    """

    def __init__(
        self,
        config: SimConfig,
        policy: PolicySet,
        board: Board,
        output_tokens: NDArray[np.int64],
        predictor: Predictor | None,
    ) -> None:
        self._config, self._policy, self._board = config, policy, board
        self.predictor: Predictor | None = None
        if policy.foresees:
            own = OraclePredictor if policy.knows else None
            self.predictor = predictor or (
                own() if own else NoisyPredictor(output_tokens, seed=config.seed)
            )
        self.forecast: ClusterForecast | None = None
        self.drift = DriftMonitor()
        reference_s = config.reference_step_s or config.profile.half_memory_step_s
        self.grid_s = np.array(horizon_s(reference_s))
        step = config.profile.step
        self._costs = StepCosts(step.per_sequence_s, step.per_token_s)
        self._snapshots = [self._blank(name) for name in board.names]
        self._index = {name: i for i, name in enumerate(board.names)}
        self._said: dict[int, LengthPrediction] = {}
        # Of each replica's last report, and of what was placed there since.
        self._reported_tokens = np.zeros(len(board.names))
        self._reported_held = np.zeros(len(board.names), dtype=np.int64)
        self._reported_paused = np.zeros(len(board.names), dtype=np.int64)

    @property
    def any_snapshot(self) -> ReplicaSnapshot:
        """A decode replica as admission wants one: all have one class and one capacity."""
        return self._snapshots[0]

    def choose(self, now_s: float, index: int, tokens: int, waited_s: float) -> int | None:
        """The decode replica for a prefilled sequence, or None where it must wait.

        Args:
            tokens: Of its KV cache.
            waited_s: Since it was prefilled.
        """
        prediction = self._predict(index, tokens)
        used = self._board.used_tokens(self._board.new_steps(now_s))
        request = PlaceRequest(
            sequence_id=str(index),
            depth_class=DEPTH_CLASS,
            num_tokens=tokens,
            max_total_tokens=tokens + 1,  # memory is promised as it is used
            prediction=prediction,
            waited_s=waited_s,
        )
        cluster = self.forecast
        if prediction is None or cluster is None or self.drift.is_drifting:
            chosen = self._by_present(request, used)
        else:
            chosen = self._by_forecast(cluster, request, used)
        if chosen is not None:
            self._reported_tokens[chosen] += tokens
            self._reported_held[chosen] += 1
        if chosen is not None and prediction is not None:
            self._said.setdefault(index, prediction)
        return chosen

    def reported(self, now_s: float, replica: int) -> None:
        """A replica tells what it holds, what is on its way to it included."""
        board = self._board
        self._reported_tokens[replica] = board.used_tokens(board.new_steps(now_s))[replica]
        self._reported_held[replica] = board.num_held[replica]
        self._reported_paused[replica] = board.num_paused[replica]

    def finished(self, index: int, output_tokens: int) -> None:
        """A sequence ended: what came of its prediction at placement."""
        prediction = self._said.pop(index, None)
        if prediction is not None:
            self.drift.ended(prediction, output_tokens - 1)

    def _predict(self, index: int, tokens: int) -> LengthPrediction | None:
        if self.predictor is None:
            return None
        produced = tokens - self._board.input_tokens[index : index + 1]
        remaining = self._board.final_tokens[index : index + 1] - tokens
        return self.predictor.predict(np.array([index]), produced, remaining).of(0)

    def _by_forecast(
        self, cluster: ClusterForecast, request: PlaceRequest, used: NDArray[np.float64]
    ) -> int | None:
        alive = np.flatnonzero(self._board.is_alive)
        able = self._board.num_held[alive] < self._config.profile.num_slots
        able &= ~self._board.is_draining[alive]
        able &= self._has_room(used, request)[alive]
        row = best_replica(cluster, request, able, self._policy.settings, self._costs)
        if row is None or request.prediction is None:
            return None
        # Until the next tick, what was just placed counts too.
        size, mean = np.array([float(request.num_tokens)]), np.array([request.prediction.mean])
        ahead = tokens_ahead(cluster.grid_s, cluster.step_s[row])[None, :]
        cluster.load_s[row] += load_rows(
            size,
            mean,
            ahead,
            per_sequence_s=self._costs.per_sequence_s,
            per_token_s=self._costs.per_token_s,
        )[0]
        cluster.tokens[row] += memory_rows(size, mean, ahead)[0]
        return int(alive[row])

    def _has_room(self, used: NDArray[np.float64], request: PlaceRequest) -> NDArray[np.bool_]:
        """`policies.load.has_room` for all replicas at once, [n]."""
        fits = used + request.max_total_tokens <= self._config.admitted_tokens
        if self._config.memory.reservation == "used":
            fits = (fits | (self._board.num_held == 0)) & (self._board.num_paused == 0)
        return fits

    def _by_present(self, request: PlaceRequest, used: NDArray[np.float64]) -> int | None:
        """By the baselines."""
        held, paused = self._board.num_held, self._board.num_paused
        if self._config.report_every_s > 0.0:
            used, held, paused = self._reported_tokens, self._reported_held, self._reported_paused
        for snapshot, tokens, count, halted in zip(
            self._snapshots, used.tolist(), held.tolist(), paused.tolist(), strict=True
        ):
            snapshot.used_tokens = snapshot.reserved_tokens = int(tokens)
            snapshot.num_running, snapshot.num_paused = count, halted
        takes = (self._board.is_alive & ~self._board.is_draining).tolist()
        snapshots = [s for s, does in zip(self._snapshots, takes, strict=True) if does]
        name = self._policy.placement.choose(request, snapshots)
        return None if name is None else self._index[name]

    def _blank(self, name: str) -> ReplicaSnapshot:
        info = ReplicaInfo(
            name,
            Role.DECODE,
            DEPTH_CLASS,
            name,
            name,
            self._config.profile.num_slots,
            self._config.profile.kv_capacity_tokens,
            reservation=self._config.memory.reservation,
        )
        return ReplicaSnapshot(info=info, taken_unix_s=0.0)
