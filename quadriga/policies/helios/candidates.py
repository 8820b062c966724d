"""Step 1: at most three candidates, by the objective and by what the device holds.

Source: HELIOS §3.3.1 (Top-K of the model repository); same tokenizer only (Appendix A)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quadriga.catalogue.files import read_catalogue
from quadriga.catalogue.records import Catalogue, CatalogueModel
from quadriga.config.scheduling import HeliosConfig
from quadriga.errors import ConfigError
from quadriga.policies.helios.history import HistoryTable
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import ChosenDevice, Objective


@dataclass(frozen=True, slots=True)
class Refusal:
    """A model that is no candidate, and why."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Picked:
    """The candidates, best first, and everyone else with the reason."""

    candidates: tuple[CatalogueModel, ...]
    refusals: tuple[Refusal, ...]


def pick_candidates(
    models: Sequence[CatalogueModel],
    *,
    slo: Objective,
    device: ChosenDevice,
    context_tokens: int,
    max_candidates: int = 3,
) -> Picked:
    """Choose the models that are worth profiling.

    Profiling runs at full depth, so a candidate must fit whole, with one sequence. Models with a
    figure on record come before those without, which are ranked by size: small ones first for
    speed and energy, large ones for accuracy. The best one's tokenizer is everyone's.

    Args:
        context_tokens: Longest sequence the device must hold.

    Raises:
        ConfigError: No model is left, with each one's reason.
    """
    refusals: list[Refusal] = []
    fitting: list[CatalogueModel] = []
    for model in models:
        reason = _too_large(model, device, context_tokens)
        if reason is None:
            fitting.append(model)
        else:
            refusals.append(Refusal(model.id, reason))
    ranked = sorted(fitting, key=lambda m: _rank(m, slo))
    candidates: list[CatalogueModel] = []
    for place, model in enumerate(ranked, start=1):
        best = ranked[0]
        if (model.tokenizer, model.vocab_size) != (best.tokenizer, best.vocab_size):
            reason = (
                f"its tokenizer {model.tokenizer} is not {best.tokenizer} of {best.id}, the best "
                f"for {slo}: requests could not change between them"
            )
        elif len(candidates) == max_candidates:
            reason = f"place {place} for {slo}; at most {max_candidates} are profiled"
        else:
            candidates.append(model)
            continue
        refusals.append(Refusal(model.id, reason))
    if not candidates:
        shown = "; ".join(f"{r.model}: {r.reason}" for r in refusals) or "the catalogue is empty"
        raise ConfigError(f"helios.models: no candidate is left ({shown})", param="helios.models")
    return Picked(tuple(candidates), tuple(refusals))


def _too_large(model: CatalogueModel, device: ChosenDevice, context_tokens: int) -> str | None:
    """Why the device cannot hold the model whole, or None."""
    if context_tokens > model.sizes.max_positions:
        return f"made for {model.sizes.max_positions} positions, {context_tokens} are wanted"
    if device.memory_bytes is None:
        return None
    weights = model.sizes.weight_bytes(model.num_layers, device.value_bytes)
    kv = context_tokens * model.sizes.kv_bytes_per_token(model.num_layers, device.value_bytes)
    if weights + kv <= device.memory_bytes:
        return None
    return (
        f"weights of {_gib(weights)} and KV of one sequence of {context_tokens} tokens, "
        f"{_gib(kv)}, exceed the device's {_gib(device.memory_bytes)}"
    )


def _rank(model: CatalogueModel, slo: Objective) -> tuple[bool, float, int, str]:
    """Sort key, best first: with a figure or without, the figure, the size, the name."""
    full = model.record(model.num_layers)
    figure: float | None = None
    if full is not None:
        if slo == "throughput":
            rate = full.best_tokens_per_s
            figure = -rate if rate is not None else None
        elif slo == "response":
            figure = full.ttft_s
        elif slo == "accuracy":
            figure = full.perplexity if full.accuracy is None else -full.accuracy
        else:
            figure = full.joules_per_token
    size = model.sizes.total_params
    return (
        figure is None,
        figure if figure is not None else math.inf,
        -size if slo == "accuracy" else size,
        model.id,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


@dataclass(frozen=True, slots=True)
class Started:
    """A machine, and what it was made of."""

    machine: Helios
    picked: Picked
    catalogue: Catalogue


def start_helios(
    config: HeliosConfig,
    device: ChosenDevice,
    *,
    context_tokens: int,
    table: HistoryTable | None = None,
    catalogue: Catalogue | None = None,
) -> Started:
    """Make the machine of a deployment.

    Args:
        device: What one decode replica has.
        context_tokens: Longest sequence that is served.
        table: As kept by the process before.
        catalogue: As read before; None: it is read here.

    Raises:
        ConfigError: The catalogue or a checkpoint in it is unusable, named models differ in their
            tokenizer, or no model fits the device.
    """
    if catalogue is None:
        catalogue = read_catalogue(config.catalogue, only=config.models)
    picked = pick_candidates(
        catalogue.models,
        slo=config.slo,
        device=device,
        context_tokens=context_tokens,
        max_candidates=config.max_candidates,
    )
    return Started(Helios(picked.candidates, config, device, table), picked, catalogue)
