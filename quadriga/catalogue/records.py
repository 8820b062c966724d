"""What is on record of each model: the model repository of HELIOS, as plain values.

Source: HELIOS §3.3.1 (Model Repository).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from quadriga.catalogue.sizes import ModelSizes
from quadriga.checkpoint.exits import ExitSpec
from quadriga.errors import UnknownModel

EnergySource = Literal["nvml", "rapl", "estimate"]
Positive = Annotated[int, Field(ge=1)]
Quantity = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


def _pairs(steps: Any) -> Any:
    """Steps as a file has them, by the batch."""
    return tuple(steps.items()) if isinstance(steps, dict) else steps


@dataclass(frozen=True, slots=True)
class DepthRecord:
    """A model at one depth, as measured once; None where it was not.

    Attributes:
        depth: Layers 1..depth loaded; the last one's exit is left by every token.
        step_s: (sequences in the batch, seconds of one decode step), ascending.
        ttft_s: Prefill of a prompt of `prompt_tokens` until its first token.
        accuracy: Share of right answers to the bundled tasks, or to the operator's own.
        perplexity: Of the tokens it served, by its own log-probabilities.
        unchanged: Share of its tokens that the full depth says too, after the same text.
        memory_bytes: What the process grew by while it loaded.
        load_s: Seconds from opening the files to the first pass.
        joules_per_token: At the largest batch of `step_s`.
        coverage: Share of the tokens that leave here or before, where all of the model is loaded
            and every exit tested at the checkpoint's own threshold; at full depth it is 1.
        token_s: Seconds of a served token that leaves here, one sequence at a time, with the exits
            before it tested.
    """

    depth: Positive
    step_s: Annotated[
        tuple[tuple[Positive, Quantity], ...],
        BeforeValidator(_pairs),
        AfterValidator(lambda pairs: tuple(sorted(pairs))),
    ] = ()
    ttft_s: Quantity | None = None
    prompt_tokens: Positive | None = None
    accuracy: Share | None = None
    perplexity: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    unchanged: Share | None = None
    memory_bytes: Annotated[int, Field(ge=0)] | None = None
    load_s: Quantity | None = None
    joules_per_token: Quantity | None = None
    energy_source: EnergySource | None = None
    coverage: Share | None = None
    token_s: Quantity | None = None

    @property
    def best_tokens_per_s(self) -> float | None:
        """Decoded tokens a second at the best batch on record."""
        return max((batch / s for batch, s in self.step_s), default=None)


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """One model that may be served.

    Attributes:
        source: By what any node finds it; see `Checkpoint.source`.
        tokenizer: Fingerprint; models of one tokenizer may take each other's requests over.
        exits: As `exits.json` says.
        depths: What is on record, ascending by depth; may be empty.
    """

    id: str
    source: str
    architecture: str
    vocab_size: int
    tokenizer: str
    sizes: ModelSizes
    exits: ExitSpec
    depths: tuple[DepthRecord, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.sizes.num_layers

    @property
    def exit_depths(self) -> tuple[int, ...]:
        """Depths it may be loaded to: its exits, and all of it."""
        return (*self.exits.layers, self.num_layers)

    def record(self, depth: int) -> DepthRecord | None:
        """What is on record of a depth."""
        return next((r for r in self.depths if r.depth == depth), None)


@dataclass(frozen=True, slots=True)
class Measurement:
    """When, where and with which commit a catalogue was measured; empty where it was not."""

    at: str = ""
    machine: str = ""
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The models on offer.

    Attributes:
        source: The file or folder it was read from.
    """

    models: tuple[CatalogueModel, ...]
    source: str

    def find(self, model_id: str) -> CatalogueModel:
        """Return a model. Raises: UnknownModel."""
        for model in self.models:
            if model.id == model_id:
                return model
        raise UnknownModel(
            f"model: {model_id!r} is not in the catalogue {self.source}; it has "
            f"{', '.join(self.ids)}",
            param="model",
        )

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(m.id for m in self.models)


def depth_records(records: Iterable[DepthRecord]) -> tuple[DepthRecord, ...]:
    """In the order a catalogue keeps them."""
    return tuple(sorted(records, key=lambda r: r.depth))
