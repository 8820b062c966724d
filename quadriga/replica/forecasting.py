"""A decode replica's forecast: asked for on the engine's thread, packed on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.clock import Clock
from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.forecast import LengthOutcome, LoadForecast
from quadriga.core.kv import TransferOffer
from quadriga.core.output import EngineOutput
from quadriga.core.request import SequenceState
from quadriga.policies.ares.expected_depth import ExpectedDepth, ForecastDepths
from quadriga.policies.ares.settings import horizon_s
from quadriga.scheduling.calibration import assumed_shape, measure_shape
from quadriga.scheduling.forecasts import (
    Asking,
    Outcomes,
    SequenceLengths,
    StepShape,
    StepTimes,
    forecast,
    hold,
)

if TYPE_CHECKING:
    from quadriga.interfaces import ModelRunner
    from quadriga.scheduling.decode_loop import DecodeLoop
    from quadriga.scheduling.forecasts import LengthModel

LOOK_EVERY_S = 0.25
"""Between two looks at the sequences held."""
MIN_LOOK_EVERY_S = 0.05
"""The same while sequences come and go: as often as there can be a report."""


def load_lengths(runner: object, spec: EngineSpec) -> LengthModel | None:
    """The length heads behind a runner; None where its checkpoint, or its kind, has none.

    Raises:
        ConfigError: The heads are there and cannot be right.
    """
    if spec.runner == "baton":
        return None  # the unmodified model keeps its hidden states to itself
    from quadriga.engine.early_exit.length_head import LengthHeads, RunnerLengths
    from quadriga.engine.model_runner import NativeRunner

    if not isinstance(runner, NativeRunner):
        return None
    checkpoint = spec.checkpoint
    heads = LengthHeads.load(checkpoint.heads_path, checkpoint.hidden_size, spec.depth, spec.device)
    return None if heads is None else RunnerLengths(runner, heads)


def predict_new(lengths: LengthModel | None) -> None:
    """Note with the sequences whose prompts are done how long they are expected to go on.

    Called after the pass that computed them.
    """
    asked = lengths.ask() if lengths is not None else None
    if asked is not None:
        states, answer = asked
        for state, prediction in zip(states, answer(), strict=True):
            state.prediction, state.predicted_at = prediction, len(state.output_ids)


@dataclass(frozen=True, slots=True)
class _SequenceSeen:
    """What the engine's thread last wrote down; never changed afterwards."""

    held: SequenceLengths
    shape: StepShape
    step_s: float
    front_share: float


class Forecasting:
    """The predictions of one decode replica, and the forecast made of them.

    `stepped` and `look` are called on the engine's thread, the rest on the event loop.

    Args:
        runner: As the loop uses it, pace included.
        lengths: None where there are no length heads; forecasts say so.
        coming: Sequences that will decode here, as `hold` takes them.
        leaving: Ids of those on their way elsewhere; from any thread.

    Attributes:
        is_wanted: The scheduler uses forecasts; while it does not they cost nothing.
        depth_pool: See `ReportOptions`; noted with the sequences that run here.
        seconds: Time of the engine's thread spent on noting which sequences are held.
    """

    def __init__(
        self,
        runner: ModelRunner,
        lengths: LengthModel | None,
        spec: EngineSpec,
        config: QuadrigaConfig,
        clock: Clock,
        *,
        coming: Callable[[], Iterable[TransferOffer | SequenceState]],
        leaving: Callable[[], Collection[str]],
    ) -> None:
        ares = config.scheduler.ares
        every = ares.predict_every_tokens
        self.asking = Asking(lengths, every) if lengths is not None and every else None
        self.is_wanted = False
        self.depth_pool = ""
        self.seconds = 0.0
        self._clock = clock
        self._coming, self._leaving = coming, leaving
        self._grid_s = horizon_s(ares.reference_step_s)
        self._depths = ExpectedDepth(spec.depth)
        self._deterministic = config.deterministic
        self.resized(spec)
        if spec.runner == "baton":
            shape = assumed_shape(spec.kv_capacity_tokens)
        else:
            shape = measure_shape(runner, clock, max_rows=spec.num_rows)
        self._times = StepTimes(shape)
        self._outcomes = Outcomes()
        self._looked_s = 0.0
        self._num_held = 0
        self._seen: _SequenceSeen | None = None
        self._packed_seen: _SequenceSeen | None = None
        self._packed: LoadForecast | None = None

    def resized(self, spec: EngineSpec) -> None:
        """The engine has another depth now."""
        self._is_known_idle = False
        self._bytes_per_token = float(
            spec.checkpoint.kv_bytes_per_token(spec.depth, DTYPE_BYTES[spec.dtype])
        )
        self._depths.depth = spec.depth

    def stepped(self, loop: DecodeLoop, emissions: list[tuple[str, EngineOutput]]) -> None:
        """After a step, once its tokens are on their way."""
        if self.is_wanted and self.asking is not None:
            counts = [len(e.token_ids) for _, e in emissions]
            self.asking.stepped(sum(counts), sum(map(bool, counts)), loop.num_running)
            self._outcomes.emitted(emissions)

    def look(self, loop: DecodeLoop) -> None:
        """Note which sequences are held, now and then."""
        if not self.is_wanted:
            self._is_known_idle = False
            return
        now_s = self._clock.now_s()
        num_held = loop.slots.num_held
        if num_held:
            pause_s = LOOK_EVERY_S if num_held == self._num_held else MIN_LOOK_EVERY_S
            if now_s - self._looked_s < pause_s:
                return
        elif self._is_known_idle:  # that the last sequence has gone was noted at once
            self._looked_s = now_s
            return
        self._looked_s, self._num_held = now_s, num_held
        states = loop.running
        if self.depth_pool:
            for state in states:
                state.depth_pool = self.depth_pool
        step_s = loop.step_time_s
        held = hold(
            states,
            self._coming(),
            num_running=loop.num_running,
            num_paused=loop.num_paused,
            leaving=self._leaving(),
            depths=self._depths,
            deterministic=self._deterministic,
        )
        self._is_known_idle = not (num_held or held.sequence_ids)
        shares = held.share[: loop.num_running]
        context = sum([n * share for n, share in zip(held.tokens, shares, strict=False)])
        self._times.observe(loop.pass_time_s, sum(shares), context)
        self._outcomes.look(states)
        self._seen = _SequenceSeen(held, self._times.shape, step_s, loop.front_share)
        self.seconds += self._clock.now_s() - now_s

    def forecast(self) -> LoadForecast | None:
        """The forecast for the snapshot; None while the scheduler wants none."""
        seen = self._seen
        if seen is None or not self.is_wanted:
            return None
        if seen is not self._packed_seen:
            self._packed_seen = seen
            self._packed = forecast(
                seen.held,
                seen.shape,
                grid_s=self._grid_s,
                step_s=seen.step_s,
                bytes_per_token=self._bytes_per_token,
                now_unix_s=self._clock.unix_s(),
                front_share=seen.front_share,
            )
        return self._packed

    @property
    def depths_by_tenth(self) -> dict[str, ForecastDepths]:
        """Layers a token as forecast and as run; from any thread."""
        return dict(self._depths.by_tenth)

    def take_outcomes(self) -> list[LengthOutcome]:
        """What came of predictions since the last call."""
        return self._outcomes.take()
