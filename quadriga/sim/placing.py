"""Where a prefilled sequence goes, in a simulation: the policy's choice, on the board's state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quadriga.core.forecast import LengthPrediction
from quadriga.core.replica import ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.routing import PlaceRequest
from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.depth_pools import DepthPools, is_due, plan_pools
from quadriga.policies.ares.forecast import load_rows, memory_rows, shares, tokens_ahead
from quadriga.policies.ares.governor import DriftMonitor
from quadriga.policies.ares.overload import OverloadPlan, is_overdue, plan_overload
from quadriga.policies.ares.placement import best_replica
from quadriga.policies.ares.settings import horizon_s
from quadriga.sim.board import Board
from quadriga.sim.config import DEPTH_CLASS, SimConfig
from quadriga.sim.policies import PolicySet
from quadriga.sim.prediction import NoisyPredictor, OraclePredictor, Predictions, RemainingPredictor


@dataclass(frozen=True, slots=True)
class RoomlessSequence:
    """A prefilled sequence for which no decode replica had room.

    Attributes:
        tokens: Of its KV cache.
        prediction: None where the policy does not foresee.
    """

    since_s: float
    tokens: int
    prediction: LengthPrediction | None

    @property
    def total_tokens(self) -> float:
        """What it is predicted to come to."""
        return self.tokens + (0.0 if self.prediction is None else self.prediction.mean)


class Placing:
    """Predictions, the last tick's forecast with what was placed since, and the choice by it.

    Where nothing is foreseen the choice is by the last reports, with what was placed since.

    Attributes:
        predictor: None for policies that do not foresee.
        forecast: Of the last tick; None where the policy does not look ahead, or replicas changed.
        overload: What the overload that the last tick saw calls for; None without one.
        pools: Whether shallow and deep sequences run apart; None where there is no choice.
    """

    def __init__(
        self,
        config: SimConfig,
        policy: PolicySet,
        board: Board,
        output_tokens: NDArray[np.int64],
        predictor: RemainingPredictor | None,
    ) -> None:
        self._config, self._policy, self._board = config, policy, board
        self.predictor: RemainingPredictor | None = None
        if policy.foresees:
            own = OraclePredictor if policy.knows else None
            self.predictor = predictor or (
                own() if own else NoisyPredictor(output_tokens, seed=config.seed)
            )
        self.forecast: ClusterForecast | None = None
        self.overload: OverloadPlan | None = None
        self.pools: DepthPools | None = None
        self._last_pools: DepthPools | None = None  # of before a lull, too
        self.drift = DriftMonitor()
        reference_s = config.reference_step_s or config.profile.half_memory_step_s
        self.grid_s = np.array(horizon_s(reference_s))
        self._snapshots = [self._blank(name) for name in board.names]
        self._index = {name: i for i, name in enumerate(board.names)}
        self._said: dict[int, LengthPrediction] = {}
        self._firsts: Predictions | None = None  # of all requests, right after their prefill
        # Of each replica's last report, and of what was placed there since.
        self._reported_tokens = np.zeros(len(board.names))
        self._reported_reserved = np.zeros(len(board.names))
        self._reported_prompts = np.zeros(len(board.names))
        self._reported_held = np.zeros(len(board.names), dtype=np.int64)
        self._reported_paused = np.zeros(len(board.names), dtype=np.int64)

    @property
    def any_snapshot(self) -> ReplicaSnapshot:
        """A decode replica as admission wants one: all have one class and one capacity."""
        return self._snapshots[0]

    def choose(
        self, now_s: float, index: int, tokens: int, waited_s: float
    ) -> tuple[int, int] | None:
        """The decode replica for a prefilled sequence, and the tokens that it promises there.

        None where it must wait.

        Args:
            tokens: Of its KV cache.
            waited_s: Since it was prefilled.
        """
        new_steps = self._board.new_steps(now_s)
        reserved = self._board.reserved_tokens(new_steps)
        room = self._room(reserved)
        prediction = self.predict(index, tokens)
        # A place is chosen while the prompt is computed; lengths are predicted after it. Under
        # overload it is chosen then.
        is_first = tokens == self._board.input_tokens[index] + 1
        is_unknown = is_first and self.overload is None and not self._policy.knows
        known = None if is_unknown else prediction
        by_forecast = self.overload is not None and prediction is not None
        longest = tokens + 1
        if self._config.memory.reservation == "used":
            longest = int(self._board.input_tokens[index]) + self._config.profile.max_tokens
        wanted = self._wanted(tokens, longest, known, by_forecast=by_forecast)
        takes = (wanted <= room) & self._board.has_layers(index)
        if self.overload is not None and prediction is not None:
            takes = self._open(self.overload, takes, tokens, prediction, waited_s)
        if self._sees_room and not takes.any():
            return None  # what no policy places
        request = PlaceRequest(
            sequence_id=str(index),
            depth_class=DEPTH_CLASS,
            num_tokens=tokens,
            max_total_tokens=longest,
            prediction=known,
            waited_s=waited_s,
            by_forecast=by_forecast,
            leaves_early=bool(self._board.stays[index] < 1.0),
        )
        cluster, used = self.forecast, self._board.used_tokens(new_steps)
        if prediction is None or cluster is None or self.drift.is_drifting:
            chosen = self._by_present(request, used, reserved)
        else:
            chosen = self._by_forecast(cluster, request, known or self._usual(), takes)
        if chosen is None:
            return None
        promised = int(wanted[chosen])
        self._reported_tokens[chosen] += tokens
        self._reported_reserved[chosen] += promised
        self._reported_prompts[chosen] += tokens
        self._reported_held[chosen] += 1
        if prediction is not None:
            self._said.setdefault(index, prediction)
        return chosen, promised

    def _open(
        self,
        plan: OverloadPlan,
        takes: NDArray[np.bool_],
        tokens: int,
        prediction: LengthPrediction,
        waited_s: float,
    ) -> NDArray[np.bool_]:
        """Those of the replicas with room that overload leaves open to a sequence, [n]."""
        is_open = np.zeros_like(takes)
        if self.forecast is not None and takes.any():
            alive = np.flatnonzero(self._board.is_alive)
            is_open[alive] = plan.open_to(self.forecast, takes[alive], tokens, prediction, waited_s)
        return is_open

    def waiting(self, now_s: float, index: int, tokens: int) -> RoomlessSequence:
        """A prefilled sequence found no room. Arguments as in `choose`."""
        return RoomlessSequence(now_s, tokens, self.predict(index, tokens))

    def is_overdue(self, now_s: float, waiting: RoomlessSequence) -> bool:
        """Whether a sequence has waited for too long; never where lengths are not predicted."""
        if waiting.prediction is None or not self._board.is_alive.any():
            return False
        return is_overdue(now_s - waiting.since_s, waiting.prediction, self._step_s(now_s))

    def look_for_overload(self, cluster: ClusterForecast, num_held: int) -> None:
        """Look at a tick's forecast, and at how many sequences have no decode replica."""
        may = self._policy.places_ahead and self._policy.settings.overload
        if not may or self.drift.is_drifting:
            self.overload = None
            return
        self.overload = plan_overload(cluster, self.overload, num_held=num_held)

    def look_at_depths(self, cluster: ClusterForecast, now_s: float) -> None:
        """Look at a tick's forecast, and whether shallow and deep sequences shall run apart."""
        may = self._policy.places_ahead and self._policy.settings.depth_pools
        if not may or not cluster.is_one_class:
            self.pools = None
        elif self.pools is None or is_due(self._last_pools, cluster.names, now_s):
            self.pools = plan_pools(cluster, self._policy.settings, self._last_pools, now_s)
            self._last_pools = self.pools or self._last_pools

    def reported(self, now_s: float, replica: int) -> None:
        """A replica reports what it holds, what is on its way to it included."""
        board = self._board
        new_steps = board.new_steps(now_s)
        self._reported_tokens[replica] = board.used_tokens(new_steps)[replica]
        self._reported_reserved[replica] = board.reserved_tokens(new_steps)[replica]
        self._reported_prompts[replica] = board.prompt_tokens[replica]
        self._reported_held[replica] = board.num_held[replica]
        self._reported_paused[replica] = board.num_paused[replica]

    def finished(self, index: int, output_tokens: int) -> None:
        """A sequence ended: what came of its prediction at placement."""
        prediction = self._said.pop(index, None)
        if prediction is not None:
            self.drift.ended(prediction, output_tokens - 1)

    def _step_s(self, now_s: float) -> float:
        """Of the replicas that serve, on average."""
        board = self._board
        return float(board.pace_s(board.new_steps(now_s))[board.is_alive].mean())

    def predict(self, index: int, tokens: int) -> LengthPrediction | None:
        """What is predicted of a sequence with so many KV tokens; None where nothing is."""
        if self.predictor is None:
            return None
        board = self._board
        if tokens == board.input_tokens[index] + 1:
            if self._firsts is None:
                one = np.ones(len(board.input_tokens))
                left = board.final_tokens - (board.input_tokens + 1)
                self._firsts = self.predictor.predict(np.arange(len(one)), one, left)
            return self._firsts.of(index)
        produced = tokens - board.input_tokens[index : index + 1]
        remaining = self._board.final_tokens[index : index + 1] - tokens
        return self.predictor.predict(np.array([index]), produced, remaining).of(0)

    def _by_forecast(
        self,
        cluster: ClusterForecast,
        request: PlaceRequest,
        expected: LengthPrediction,
        takes: NDArray[np.bool_],
    ) -> int | None:
        alive = np.flatnonzero(self._board.is_alive)
        row = best_replica(
            cluster, request, expected, takes[alive], self._policy.settings, self.pools
        )
        if row is None:
            return None
        # Until the next tick, what was just placed counts too: by its own layers where all tokens
        # run them all, else as many as those there run.
        # What it changes in the costs (`with_deep_passes`) waits for the tick; live it does not.
        size, mean = np.array([float(request.num_tokens)]), np.array([expected.mean])
        there = shares(cluster.rows[cluster.owner == row])
        is_usual = request.leaves_early and len(there)
        share = there.mean(keepdims=True) if is_usual else np.ones(1)
        if not cluster.is_one_class:
            share *= cluster.depth[row]
        cluster.load_s[row] += load_rows(size, mean, cluster.costs, share=share)[0]
        ahead = tokens_ahead(cluster.grid_s, cluster.step_s[row])[None, :]
        cluster.tokens[row] += memory_rows(size, mean, ahead)[0]
        return int(alive[row])

    def _usual(self) -> LengthPrediction:
        """What answers have been lately; see `policies.least_work.expected_length`."""
        board = self._board
        mean = float(board.usual_tokens[board.is_alive].mean())
        return LengthPrediction(mean, 0.0, max(mean, float(board.upper_tokens.max())))

    @property
    def _sees_room(self) -> bool:
        """Whether what is chosen has room at this moment, and not at the last reports."""
        return self._config.report_every_s == 0.0 or self.overload is not None

    def most_room(self, now_s: float) -> float:
        """No sequence of so many KV tokens or more has a place now: it is promised one ahead."""
        if not self._sees_room:
            return np.inf
        return float(self._room(self._board.reserved_tokens(self._board.new_steps(now_s))).max())

    def _room(self, reserved: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens that each replica may promise one more sequence, [n]; -inf: it takes none.

        That and `_wanted` are `policies.load.has_room` for all at once.

        Args:
            reserved: Tokens promised by each, [n].
        """
        board = self._board
        room = self._config.admitted_tokens - reserved
        takes = board.is_alive & ~board.is_draining
        takes &= board.num_held < self._config.profile.num_slots
        if self._config.memory.reservation == "used":
            room[board.num_held == 0] = np.inf
            takes &= board.num_paused == 0
        room[~takes] = -np.inf
        return room

    def _wanted(
        self, tokens: int, longest: int, known: LengthPrediction | None, *, by_forecast: bool
    ) -> NDArray[np.float64]:
        """What each replica would promise the sequence, [n]: `promised_tokens` for all at once."""
        board = self._board
        ahead = np.ones(len(board.names)) if by_forecast else board.upper_tokens.astype(np.float64)
        if known is not None:
            ahead = np.minimum(ahead, known.upper)
        part = np.sqrt(board.num_held + 1) - np.sqrt(board.num_held)
        wanted = tokens + np.maximum(1.0, np.ceil(part * ahead))
        return np.asarray(np.minimum(wanted, max(longest, tokens + 1)))

    def _by_present(
        self, request: PlaceRequest, used: NDArray[np.float64], reserved: NDArray[np.float64]
    ) -> int | None:
        """By what is there now, or was at the last reports."""
        if self._config.report_every_s > 0.0:
            used, reserved = self._reported_tokens, self._reported_reserved
            prompts = self._reported_prompts
            held, paused = self._reported_held, self._reported_paused
        else:
            prompts = self._board.prompt_tokens
            held, paused = self._board.num_held, self._board.num_paused
        upper = self._board.upper_tokens
        lists = (v.tolist() for v in (used, reserved, upper, prompts, held, paused))
        for snapshot, tokens, all_promised, answer, prompt, count, halted in zip(
            self._snapshots, *lists, strict=True
        ):
            snapshot.used_tokens, snapshot.reserved_tokens = int(tokens), int(all_promised)
            snapshot.upper_tokens = answer
            snapshot.prompt_tokens, snapshot.generated_tokens = int(prompt), int(tokens - prompt)
            snapshot.num_running, snapshot.num_paused = count, halted
        board = self._board
        may = board.is_alive & ~board.is_draining & board.has_layers(int(request.sequence_id))
        takes = may.tolist()
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
