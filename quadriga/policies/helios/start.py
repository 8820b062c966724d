"""From configuration to a machine: read the catalogue, check it, pick the candidates."""

from __future__ import annotations

from dataclasses import dataclass

from quadriga.catalogue.files import read_catalogue
from quadriga.catalogue.records import Catalogue
from quadriga.config.scheduling import HeliosConfig
from quadriga.policies.helios.candidates import Picked, pick_candidates
from quadriga.policies.helios.history import HistoryTable
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import ChosenDevice


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
    cache_dir: str | None = None,
) -> Started:
    """Make the machine of a deployment.

    Args:
        device: What one decode replica has.
        context_tokens: Longest sequence that is served.
        table: As kept by the process before.
        cache_dir: See `quadriga.checkpoint.folder.locate`.

    Raises:
        ConfigError: The catalogue or a checkpoint in it is unusable, named models differ in their
            tokenizer, or no model fits the device.
    """
    catalogue = read_catalogue(config.catalogue, only=config.models, cache_dir=cache_dir)
    picked = pick_candidates(
        catalogue.models,
        slo=config.slo,
        device=device,
        context_tokens=context_tokens,
        max_candidates=config.max_candidates,
    )
    return Started(Helios(picked.candidates, config, device, table), picked, catalogue)
