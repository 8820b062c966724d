"""What HELIOS needs before it may run: the candidates, the machine, and what can be spawned."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quadriga.catalogue.files import read_catalogue
from quadriga.catalogue.inspection import inspect, tokenizer_fingerprint
from quadriga.catalogue.records import Catalogue
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.config.loader import QuadrigaConfig
from quadriga.config.resolve import Hardware, ReplicaSpec, num_replicas, replica_room, resolve
from quadriga.config.scheduling import HeliosConfig
from quadriga.control.replica_record import PlaceKey
from quadriga.core.replica import PARTS, DepthClass, Role
from quadriga.errors import ConfigError
from quadriga.policies.helios.candidates import Started, start_helios
from quadriga.policies.helios.history import HistoryTable
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import ChosenDevice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeliosSetup:
    """All that is known before the machine may run.

    Attributes:
        specs: What to spawn for every class a place may hold.
        base: What the places hold at first.
        fixed: Places of the pools behind the first, which hold what they are configured to.
    """

    config: QuadrigaConfig
    machine: Helios
    refusals: Mapping[str, str]
    specs: Mapping[tuple[Role, DepthClass], ReplicaSpec]
    base: Mapping[PlaceKey, DepthClass]
    scouts: frozenset[PlaceKey]
    fixed: Mapping[PlaceKey, ReplicaSpec]


def set_up(
    config: QuadrigaConfig,
    hardware: Hardware,
    places: Mapping[PlaceKey, ReplicaSpec],
    table: HistoryTable,
) -> HeliosSetup:
    """Read the catalogue and decide what may run; blocks on files.

    What is chosen runs in the places of the first pool, which `quadriga-auto` means.

    Args:
        places: Of all pools.
        table: The history that an earlier controller stored.

    Raises:
        ConfigError: The configuration cannot be served by choosing, or the catalogue is unusable.
    """
    pool = config.pools[0]
    device = next(iter(places.values())).engine.device
    num_own = num_replicas(pool, replica_room(config, hardware, device), may_mix=False)
    own = {key: spec for key, spec in places.items() if key[1] < num_own.get(key[0], 0)}
    decode = own[Role.DECODE, 0].engine
    checkpoint = decode.checkpoint
    catalogue = check_catalogue(config, checkpoint)
    started = start_helios(
        config.helios,
        _device(decode),
        context_tokens=decode.row_capacity_tokens,
        table=table,
        catalogue=catalogue,
    )
    _require_tokenizer(checkpoint, started)
    specs: dict[tuple[Role, DepthClass], ReplicaSpec] = {}
    for model in started.picked.candidates:
        for depth in model.exit_depths:
            for spec in _specs_at(config, hardware, model.source, depth, decode.kv_memory_bytes):
                like = own[spec.role, 0]
                specs[spec.role, DepthClass(model.id, depth)] = replace(
                    spec,
                    num_cpus=like.num_cpus,
                    num_gpus=like.num_gpus,
                    node_labels=like.node_labels,
                    kv_share=like.kv_share,
                )
    if len({depth_class for _, depth_class in specs}) == 1:
        raise ConfigError(
            f"helios.enabled: there is nothing to choose: {started.catalogue.source} has no model "
            f"beside {checkpoint.id} that fits, and that has no exits; add a model, or set it to "
            "false",
            param="helios.enabled",
        )
    base = {key: spec.engine.depth_class for key, spec in own.items()}
    for key, spec in own.items():
        specs.setdefault((key[0], spec.engine.depth_class), spec)
    if device == "cpu":  # on a GPU a process at the new depth takes the place of the old one
        specs = {kind: replace(spec, changes_depth=True) for kind, spec in specs.items()}
    scouts: set[PlaceKey] = set()
    if config.helios.scout:
        full = DepthClass(checkpoint.id, checkpoint.num_layers)
        for role in PARTS:
            key = (role, sum(k[0] is role for k in places))
            scouts.add(key)
            base[key] = full if (role, full) in specs else next(c for r, c in specs if r is role)
    refusals = {r.model: r.reason for r in started.picked.refusals}
    fixed = {key: spec for key, spec in places.items() if key not in own}
    return HeliosSetup(config, started.machine, refusals, specs, base, frozenset(scouts), fixed)


def with_a_choice(config: QuadrigaConfig) -> QuadrigaConfig:
    """Turn HELIOS off where its catalogue was only named, and has nothing to choose from; blocks.

    Where it was asked for by `helios.enabled`, or the catalogue is at fault, `set_up` says so.
    """
    helios = config.helios
    if not helios.enabled or "enabled" in helios.model_fields_set:
        return config
    cache_dir, pool = config.engine.cache_dir, config.pools[0]
    try:
        catalogue = read_catalogue(helios.catalogue, only=helios.models, cache_dir=cache_dir)
        if [len(model.exit_depths) for model in catalogue.models] != [1]:
            return config
        mine = read_checkpoint(pool.model, cache_dir=cache_dir, heads=pool.exits.folder)
    except ConfigError:
        return config
    if mine.source != catalogue.models[0].source:
        return config
    logger.warning(
        "helios.catalogue: %s has no model beside %s, which has no exits: nothing is chosen",
        catalogue.source,
        mine.id,
    )
    off = HeliosConfig.model_validate({**helios.model_dump(), "enabled": False})
    return config.model_copy(update={"helios": off})


def check_catalogue(config: QuadrigaConfig, checkpoint: Checkpoint) -> Catalogue:
    """Read the catalogue from which is chosen; all that can be checked without a cluster.

    Args:
        checkpoint: The first pool's model.

    Raises:
        ConfigError: No token may leave early, the catalogue is unusable, or it lacks the model:
            others would answer in its name, perhaps with another tokenizer than the ingress has.
    """
    if config.decode.rebatching == "off":
        raise ConfigError(
            "helios.enabled: it chooses by what leaves early, and decode.rebatching is 'off'; set "
            "it to 'drex'",
            param="decode.rebatching",
        )
    helios = config.helios
    catalogue = read_catalogue(
        helios.catalogue, only=helios.models, cache_dir=config.engine.cache_dir
    )
    known = {model.id: model.source for model in catalogue.models}
    if known.get(checkpoint.id) != checkpoint.source:
        called_so = checkpoint.id in known
        raise ConfigError(
            f"pools.0.model: {checkpoint.source} is not in the catalogue of helios.enabled, "
            f"{catalogue.source}, which has {', '.join(known)}"
            + (f" ({checkpoint.id} is another one, {known[checkpoint.id]})" if called_so else "")
            + "; name a catalogue with it in helios.catalogue, or set helios.enabled: false",
            param="pools.0.model",
        )
    return catalogue


def _require_tokenizer(checkpoint: Checkpoint, started: Started) -> None:
    """Raises: ConfigError where the ingress's token ids would mean other text to a candidate."""
    candidates = started.picked.candidates
    tokenizer = tokenizer_fingerprint(checkpoint.path)
    if other := [model.id for model in candidates if model.tokenizer != tokenizer]:
        raise ConfigError(
            f"pools.0.model: {checkpoint.id} has another tokenizer than {', '.join(other)}, among "
            "which helios.enabled chooses; name one of these, or a catalogue of its family in "
            "helios.catalogue",
            param="pools.0.model",
        )


def _device(decode: EngineSpec) -> ChosenDevice:
    """What a decode replica has: the KV memory it was given, beside the weights it starts with."""
    width = DTYPE_BYTES[decode.dtype]
    memory = decode.kv_memory_bytes
    if memory is not None:
        sizes = inspect(str(decode.checkpoint.path)).sizes
        memory += sizes.weight_bytes(decode.checkpoint.num_layers, width)
    return ChosenDevice(memory, width, decode.num_rows, starts_anew=decode.device == "cuda")


def _specs_at(
    config: QuadrigaConfig, hardware: Hardware, model: str, depth: int, memory: int | None
) -> tuple[ReplicaSpec, ...]:
    """What each role runs at a class.

    Args:
        memory: Bytes of KV that every replica has; None: what its GPU has left.

    Raises: ConfigError.
    """
    engine = config.engine
    if memory is not None:
        engine = engine.model_copy(update={"kv_memory_bytes": memory})
    pool = config.pools[0].model_copy(
        update={"model": model, "depth": depth, "prefill_replicas": 1, "decode_replicas": 1}
    )
    return resolve(
        config.model_copy(update={"pools": (pool,), "engine": engine}), hardware
    ).replicas
