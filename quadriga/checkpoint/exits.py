"""Where a model may be left early, and by which rule: pure records, no torch.

An exit is named by the number of layers run before it. The last loaded layer is always an exit; it
is left by every token, whatever its confidence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

from quadriga.checkpoint.json_files import read_object
from quadriga.errors import ConfigError, InvalidRequest

ExitKind = Literal["shared", "norm", "mlp", "head"]
Criterion = Literal["margin", "top"]
ExitPolicy = Literal["lossless", "bounded", "strict", "off"]
ExitMode = Literal["lossless", "bounded", "off"]
"""What requests that ask for nothing else get; see `ExitParams.policy`."""
SkippedKV = Literal["linear", "project", "alias", "copy", "replay"]
ExitUse = Literal[
    "tested",
    "drafts",
    "drafts_not_worth_it",
    "not_worth_it",
    "full_depth_asked",
    "not_loaded",
    "off",
    "idle",
]
"""Whether tokens may leave at an exit of a replica now, and if not, why.

`tested`: those that are sure enough leave. `drafts`: none leaves, and the exit drafts for requests
that want the whole model's answer. `drafts_not_worth_it`: it could, and full passes are faster by
what was measured. `not_worth_it`: the rebatching policy expects more tokens/s without it.
`full_depth_asked`: no running request lets tokens leave early.
`not_loaded`: it is not above the layers that are loaded. `off`: the configuration uses no exits.
`idle`: nothing has run here yet.
"""

EXITS_FILE = "exits.json"
EXITS_WEIGHTS = "exits.safetensors"
SKIPPED_KV_WEIGHTS = "skipped_kv.safetensors"
"""Fitted linear maps, `exits.{depth}.kv.{layer}.weight` and `.bias`: from the hidden state at an
exit, scaled to unit mean square, to K and V (before rotation) of a layer (from 0) behind it."""
MAX_LAYERS = 254
"""Of a model with early exits: a position's depth is kept in a byte."""
MAX_REPLAYED = 64
DEFAULT_THRESHOLD = 0.9
NEVER = 1.0
"""A threshold that no confidence passes: the full model, token for token."""
_BELOW = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class ExitSpec:
    """The exits of one model.

    Attributes:
        layers: Layers run before each non-final exit, ascending; may be empty.
        kind: What stands between an exit's hidden state and its logits. `shared`: the model's own
            final norm and head (LayerSkip); `norm`: a norm of its own, the head shared; `mlp`: an
            MLP of its own, whose result is added, then as `norm`; `head`: norm and head of its own.
        has_norm: `mlp` and `head` have the norm; without it the head reads the state as it is.
        own_head: `mlp` has a head of its own as well.
        criterion: `margin`: leave where p1 − p2 > threshold (DREX's code); `top`: where
            p1 ≥ threshold (HELIOS). Taken on the processed logits, before temperature.
        threshold: Default for requests that name none; 1 never leaves early.
        replay_newest: Where KV of skipped layers is made up by a map, run the newest so many of the
            skipped positions through the layers instead.
        mode: For requests that ask for nothing of the exits.
        sure_from: (layer, confidence) of exits whose confidence was calibrated: so sure must a
            token be there to count as sure as `calibrated_at`.
        calibrated_at: The threshold that the calibration stands for.
    """

    layers: tuple[int, ...] = ()
    kind: ExitKind = "shared"
    criterion: Criterion = "top"
    threshold: float = DEFAULT_THRESHOLD
    replay_newest: int = 0
    mode: ExitMode = "lossless"
    has_norm: bool = True
    own_head: bool = False
    sure_from: tuple[tuple[int, float], ...] = ()
    calibrated_at: float = DEFAULT_THRESHOLD

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that each exit has in `exits.safetensors`."""
        norm = ("norm.weight",) if self.has_norm else ()
        if self.kind == "mlp":
            head = ("head.weight",) if self.own_head else ()
            return ("mlp.norm.weight", "mlp.up.weight", "mlp.down.weight", *norm, *head)
        return {"shared": (), "norm": ("norm.weight",), "head": (*norm, "head.weight")}[self.kind]

    @property
    def has_own_head(self) -> bool:
        return self.kind == "head" or (self.kind == "mlp" and self.own_head)

    def calibrated(self, depth: int, confidences: list[float]) -> list[float]:
        """Confidences at an exit, on the scale that thresholds are named on.

        A straight line leads from 0 to the calibrated one, and another from there to 1.
        """
        sure = next((sure for layer, sure in self.sure_from if layer == depth), None)
        if sure is None:
            return confidences
        at = self.calibrated_at
        if sure >= NEVER:
            return [c * at * _BELOW for c in confidences]
        return [
            at + (c - sure) / (1 - sure) * (1 - at) if c >= sure else c / sure * at * _BELOW
            for c in confidences
        ]

    def raw(self, depth: int, confidence: float) -> float:
        """What the exit itself says where `calibrated` makes this confidence of it."""
        sure, at = dict(self.sure_from).get(depth), self.calibrated_at
        if sure is None or confidence >= NEVER:
            return confidence
        if sure >= NEVER:
            return confidence / at
        if confidence >= at:
            return sure + (confidence - at) / (1 - at) * (1 - sure)
        return confidence / at * sure

    def cut(self, depth: int) -> ExitSpec:
        """The exits that are left where only `depth` layers are loaded."""
        return replace(self, layers=tuple(k for k in self.layers if k < depth))


@dataclass(frozen=True, slots=True)
class ExitParams:
    """What one request asks of early exits; already validated, every default filled in.

    Attributes:
        threshold: In [0, 1]; 1 is the full model.
        policy: `bounded` lets tokens leave the deepest exit there is below the threshold, and
            counts them; `strict` forbids it. `lossless` lets none leave early: the first exit
            drafts, and the whole model verifies. `off` neither leaves early nor drafts. All but
            `bounded` wait for layers that are not loaded.
        max_depth: Run no token deeper than this many layers; 0 is no limit.
        sla_tbt_s: Longest time between two tokens that rebatching may plan for; 0 is the
            replica's default.
        quality_budget: In [0, 1]: share of the tokens that may leave below the threshold while the
            replica is under pressure; 0 is none.
    """

    threshold: float = NEVER
    policy: ExitPolicy = "strict"
    max_depth: int = 0
    sla_tbt_s: float = 0.0
    quality_budget: float = 0.0

    @property
    def is_strict(self) -> bool:
        """Whether it may not do with fewer layers than it asks for."""
        return self.policy != "bounded"

    @property
    def leaves_early(self) -> bool:
        """Whether its tokens may leave at an exit before the last."""
        return self.threshold < NEVER

    def depth_bounds(self, held: int, *, deterministic: bool) -> tuple[int, int]:
        """How many layers a replica needs for a sequence to move there, and may have at most.

        A strict sequence goes where it can do at least what it can here; so its tokens are the
        same. A bounded one may lose layers, and leave early below its threshold where it is then,
        as if its replica had shrunk. Where answers must not depend on load it goes nowhere else,
        unless its own limit makes the difference void.

        Args:
            held: Layers of its KV.

        Returns:
            (least, most); most is 0 for no bound.
        """
        least = min(held, self.max_depth or held)
        is_limited = 0 < self.max_depth <= held
        if self.is_strict:
            return least, 0
        if deterministic:
            return least, 0 if is_limited else held
        return 0, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, _VALUES_OF(self)


_VALUES_OF = attrgetter(*ExitParams.__match_args__)


@lru_cache(1024)
def shared(params: ExitParams) -> ExitParams:
    """The one object for all requests that ask for the same, as most do."""
    return params


def _received(*values: Any) -> ExitParams:
    return shared(ExitParams(*values))


def read_exit_params(
    asked: ExitParams | None,
    exits: ExitSpec,
    model: str,
    *,
    depth: int,
    full: int,
    sla_tbt_s: float = 0.0,
    quality_budget: float = 0.0,
    deterministic: bool = False,
) -> ExitParams:
    """Return what a request asks of a model's exits, if it can be had.

    Args:
        asked: None: what the model's mode says.
        exits: Those in use.
        depth: Layers that are loaded, of `full`.
        sla_tbt_s: Of a request that asks for nothing else.
        quality_budget: Where `asked` has none.
        deterministic: No answer may depend on the load.

    Raises:
        InvalidRequest: There are no exits, no such policy or threshold, no token can leave at
            `max_depth`, `strict` or `lossless` cannot be kept, or nothing can be spent of a quality
            budget.
    """
    if asked is not None:
        _check_asked(asked)
        quality_budget = quality_budget or asked.quality_budget
    if not exits.layers:
        if quality_budget:
            raise InvalidRequest(
                f"quality_budget: {model} has no early exits here; leave it out",
                param="quality_budget",
            )
        if asked is not None and (asked.threshold < NEVER or asked.max_depth):
            raise InvalidRequest(
                f"exits: {model} has no early exits here; leave it out", param="exits"
            )
        return FULL_DEPTH if depth == full else shared(ExitParams(NEVER, "bounded"))
    params = asked or _default_params(exits, depth, full, sla_tbt_s)
    params = replace(params, quality_budget=quality_budget)
    if params.policy == "off" and depth < full and params.threshold == NEVER:
        params = replace(params, policy="bounded")  # every layer that there is
    if params.max_depth and not exits.layers[0] <= params.max_depth <= full:
        raise InvalidRequest(
            f"max_depth: {params.max_depth} must be in {exits.layers[0]}..{full}; {model} can be "
            f"left after {', '.join(str(k) for k in exits.layers)} or {full} layers",
            param="max_depth",
        )
    limit = params.max_depth or depth
    what = "max_depth" if params.max_depth else "this deployment"
    if params.policy == "lossless" and limit < full:
        raise InvalidRequest(
            f"exit_policy: 'lossless' answers as the whole model does, but {what} ends at {limit} "
            f"of {full} layers; use 'bounded'",
            param="exit_policy",
        )
    if params.policy in ("lossless", "off") and params.threshold < NEVER:
        raise InvalidRequest(
            f"exit_threshold: {params.threshold} lets tokens leave early, which '{params.policy}' "
            "forbids; leave one of both out",
            param="exit_threshold",
        )
    if params.policy == "strict" and limit < full:
        raise InvalidRequest(
            f"exit_policy: 'strict' lets no token leave below its threshold, but {what} ends "
            f"at {limit} of {full} layers; use 'bounded'",
            param="exit_policy",
        )
    _check_quality_budget(params, deterministic=deterministic)
    return shared(params)


def _check_asked(asked: ExitParams) -> None:
    """Raises: InvalidRequest: It is none, or there is no such threshold or policy."""
    numbers = ("threshold", "max_depth", "sla_tbt_s", "quality_budget")
    if not all(isinstance(getattr(asked, name, None), Real) for name in numbers):
        text = (
            f"exits: must be ExitParams whose {', '.join(numbers)} are numbers, got {asked!r:.120}"
        )
        raise InvalidRequest(text, param="exits")
    if asked.policy not in (policies := get_args(ExitPolicy)):
        raise InvalidRequest(
            f"exit_policy: {asked.policy!r:.40} is none of {', '.join(policies)}",
            param="exit_policy",
        )
    if not 0.0 <= asked.threshold <= NEVER:  # NaN as well
        raise InvalidRequest(
            f"exit_threshold: {asked.threshold} must be in 0..1", param="exit_threshold"
        )


def _check_quality_budget(params: ExitParams, *, deterministic: bool) -> None:
    """Raises: InvalidRequest: It is outside [0, 1], or nothing could ever be spent of it."""
    budget = params.quality_budget
    if not 0.0 <= budget <= 1.0:
        raise InvalidRequest(
            f"quality_budget: {budget} must be in 0..1, the share of the tokens that may leave "
            "below the threshold",
            param="quality_budget",
        )
    if budget and (params.policy != "bounded" or params.threshold >= NEVER):
        what = f"'{params.policy}'" if params.policy != "bounded" else "exit_threshold 1"
        raise InvalidRequest(
            f"quality_budget: {budget} lets tokens leave below the threshold, which {what} "
            "forbids; use exit_policy 'bounded' with an exit_threshold below 1, or leave it out",
            param="quality_budget",
        )
    if budget and deterministic:
        raise InvalidRequest(
            f"quality_budget: {budget} is spent by the load, and this deployment is deterministic: "
            "its answers do not depend on the load; leave it out",
            param="quality_budget",
        )


def _default_params(exits: ExitSpec, depth: int, full: int, sla_tbt_s: float) -> ExitParams:
    """What a request gets that asks for nothing; fewer layers than there are lose in any case."""
    if exits.mode == "off":
        return ExitParams(NEVER, "off", 0, sla_tbt_s)
    if exits.mode == "lossless" and depth == full:
        return ExitParams(NEVER, "lossless", 0, sla_tbt_s)
    return ExitParams(exits.threshold, "bounded", 0, sla_tbt_s)


NO_EXITS = ExitSpec()
FULL_DEPTH = ExitParams()


@dataclass(slots=True)
class ExitCounters:
    """What happened at the exits of one replica since it started.

    Attributes:
        tokens: Layers run → tokens that left there.
        involuntary_exits: Tokens that left a non-final exit below their threshold; always 0
            except under the grouped baselines `eager` and `majority`.
        breaches: Tokens that left the deepest exit open to them below their threshold, because
            deeper layers are not loaded or `max_depth` forbids them.
        limited: Those of the breaches that the request's own `max_depth` asks for.
        lowered: Tokens that left a non-final exit below their threshold while the replica was
            under pressure, within the quality budgets of their requests.
        involuntary_stays: Tokens that could have left and were carried on with their batch.
        splits, stays, flushes: Decisions taken.
        surveys: Groups that were tested at every exit, for HELIOS: where could their tokens leave?
        explored: Decisions taken against the forecast, to keep its times fresh.
        predicted_profit_s, realised_profit_s: Sums over the splits: time saved against carrying
            the whole batch down, as forecast and as measured.
        buffer_age_s: Sum over buffered tokens of the time from entering a buffer to leaving it.
        buffered: Tokens that went through a buffer.
        filled_tokens: Positions × segments whose skipped KV was filled in for a deeper pass.
        copied_bytes: Hidden states moved for buffers and for later fills.
        drafted, accepted: Tokens that were drafted and verified; of these, those that agreed.
        verified: Passes that verified drafts.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    involuntary_exits: int = 0
    breaches: int = 0
    limited: int = 0
    lowered: int = 0
    involuntary_stays: int = 0
    splits: int = 0
    stays: int = 0
    flushes: int = 0
    surveys: int = 0
    explored: int = 0
    predicted_profit_s: float = 0.0
    realised_profit_s: float = 0.0
    buffer_age_s: float = 0.0
    buffered: int = 0
    filled_tokens: int = 0
    copied_bytes: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0

    def copy(self) -> ExitCounters:
        """A snapshot for other threads."""
        return ExitCounters(dict(self.tokens), *_COUNTS_OF(self))


_COUNTS_OF = attrgetter(*ExitCounters.__match_args__[1:])
"""All but the first field: it is copied after every step."""


def read_exits(path: Path, num_layers: int) -> ExitSpec:
    """Return what a checkpoint's `exits.json` says; no exits where there is none.

    Raises:
        ConfigError: The file has an unknown field, kind or criterion, a threshold outside [0, 1],
            or a layer outside 1..num_layers − 1.
    """
    file = path / EXITS_FILE
    if not file.is_file():
        return ExitSpec()
    data = read_object(file)
    known = [name for name in ExitSpec.__match_args__ if name != "mode"]  # which no file decides
    if unknown := sorted(data.keys() - set(known)):
        raise ConfigError(
            f"model: {file} says {unknown[0]!r:.60}; its fields are {', '.join(known)}",
            param="model",
        )
    return ExitSpec(
        layers=_layers(data.get("layers", []), num_layers, file),
        kind=_one_of(data, "kind", get_args(ExitKind), "shared", file),
        criterion=_one_of(data, "criterion", get_args(Criterion), "top", file),
        threshold=_threshold(data.get("threshold", DEFAULT_THRESHOLD), "threshold", file),
        replay_newest=_replay_newest(data.get("replay_newest", 0), file),
        has_norm=_flag(data, "has_norm", True, file),
        own_head=_flag(data, "own_head", False, file),
        sure_from=_sure_from(data.get("sure_from", {}), num_layers, file),
        calibrated_at=_threshold(
            data.get("calibrated_at", DEFAULT_THRESHOLD), "calibrated_at", file
        ),
    )


def to_json(spec: ExitSpec) -> dict[str, Any]:
    """What `read_exits` reads."""
    said: dict[str, Any] = {
        "kind": spec.kind,
        "layers": list(spec.layers),
        "criterion": spec.criterion,
        "threshold": spec.threshold,
        "replay_newest": spec.replay_newest,
    }
    if not spec.has_norm:
        said["has_norm"] = False
    if spec.own_head:
        said["own_head"] = True
    if spec.sure_from:
        said["sure_from"] = {str(layer): sure for layer, sure in spec.sure_from}
        said["calibrated_at"] = spec.calibrated_at
    return said


def _flag(data: dict[str, Any], key: str, default: bool, file: Path) -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"model: {file} says {key} {value!r}; use true or false", param="model")
    return value


def _sure_from(value: Any, num_layers: int, file: Path) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or not all(
        k.isascii() and k.isdecimal() and 0 < int(k[:6]) < num_layers for k in value
    ):
        raise ConfigError(
            f"model: {file} says sure_from {value!r:.200}; it must be an object of layers, 1 to "
            f"{num_layers - 1}, and confidences",
            param="model",
        )
    sure_from = {int(k): _threshold(sure, "sure_from", file) for k, sure in value.items()}
    return tuple(sorted(sure_from.items()))


def _layers(value: Any, num_layers: int, file: Path) -> tuple[int, ...]:
    if value == "all":
        return tuple(range(1, num_layers))
    is_list = isinstance(value, list)
    if not is_list or not all(type(k) is int and 0 < k < num_layers for k in value):
        raise ConfigError(
            f"model: {file} names exits {value!r}; each must be a whole number in "
            f'1..{num_layers - 1}, or write "all"',
            param="model",
        )
    return tuple(sorted(set(value)))


def _one_of(
    data: dict[str, Any], key: str, allowed: tuple[str, ...], default: str, file: Path
) -> Any:
    value = data.get(key, default)
    if value not in allowed:
        raise ConfigError(
            f"model: {file} says {key} {value!r}; use one of {', '.join(allowed)}", param="model"
        )
    return value


def _replay_newest(value: Any, file: Path) -> int:
    if type(value) is not int or not 0 <= value <= MAX_REPLAYED:
        raise ConfigError(
            f"model: {file} says replay_newest {value!r}; it must be a whole number in "
            f"0..{MAX_REPLAYED}",
            param="model",
        )
    return value


def _threshold(value: Any, key: str, file: Path) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1 or not (value or key == "threshold"):
        above = "" if key == "threshold" else ", and above 0"
        raise ConfigError(
            f"model: {file} says {key} {value!r}; it must be a number in 0..1{above}", param="model"
        )
    return float(value)
