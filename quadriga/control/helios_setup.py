"""What HELIOS needs before it may run: the candidates, the machine, and what can be spawned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quadriga.catalogue.inspection import inspect, tokenizer_fingerprint
from quadriga.checkpoint.folder import Checkpoint
from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.config.loader import QuadrigaConfig
from quadriga.config.resolve import Hardware, ReplicaSpec, resolve
from quadriga.control.replica_record import PlaceKey
from quadriga.core.replica import DepthClass, Role
from quadriga.errors import ConfigError
from quadriga.policies.helios import ChosenDevice, Helios, HistoryTable
from quadriga.policies.helios.candidates import Started, start_helios


@dataclass(frozen=True, slots=True)
class HeliosSetup:
    """All that is known before the machine may run.

    Attributes:
        specs: What to spawn for every class a place may hold.
        base: What the places hold at first.
    """

    config: QuadrigaConfig
    machine: Helios
    refusals: Mapping[str, str]
    specs: Mapping[tuple[Role, DepthClass], ReplicaSpec]
    base: Mapping[PlaceKey, DepthClass]
    scouts: frozenset[PlaceKey]


def set_up(
    config: QuadrigaConfig,
    hardware: Hardware,
    places: Mapping[PlaceKey, ReplicaSpec],
    table: HistoryTable,
) -> HeliosSetup:
    """Read the catalogue and decide what may run; blocks on files.

    Args:
        table: The history that an earlier controller stored.

    Raises:
        ConfigError: The configuration cannot be served by choosing, or the catalogue is unusable.
    """
    if len(config.pools) != 1:
        raise ConfigError(
            f"helios.enabled: it chooses the models itself, and there are {len(config.pools)} "
            "pools; describe one",
            param="pools",
        )
    if config.decode.rebatching == "off":
        raise ConfigError(
            "helios.enabled: it chooses by what leaves early, and decode.rebatching is 'off'; set "
            "it to 'drex'",
            param="decode.rebatching",
        )
    decode = next(s for (role, _), s in places.items() if role is Role.DECODE).engine
    checkpoint = decode.checkpoint
    started = start_helios(
        config.helios,
        _device(decode),
        context_tokens=decode.row_capacity_tokens,
        table=table,
        cache_dir=config.engine.cache_dir,
    )
    _require_tokenizer(checkpoint, started)
    specs: dict[tuple[Role, DepthClass], ReplicaSpec] = {}
    for model in started.picked.candidates:
        for depth in model.exit_depths:
            for spec in _specs_at(config, hardware, model.source, depth, decode.kv_memory_bytes):
                like = next(s for (role, _), s in places.items() if role is spec.role)
                specs[spec.role, DepthClass(model.id, depth)] = replace(
                    spec,
                    num_cpus=like.num_cpus,
                    num_gpus=like.num_gpus,
                    node_labels=like.node_labels,
                )
    base = {key: spec.engine.depth_class for key, spec in places.items()}
    for key, spec in places.items():
        specs.setdefault((key[0], spec.engine.depth_class), spec)
    scouts: set[PlaceKey] = set()
    if config.helios.scout:
        full = DepthClass(checkpoint.id, checkpoint.num_layers)
        for role in Role:
            key = (role, sum(k[0] is role for k in places))
            scouts.add(key)
            base[key] = full if (role, full) in specs else next(c for r, c in specs if r is role)
    refusals = {r.model: r.reason for r in started.picked.refusals}
    return HeliosSetup(config, started.machine, refusals, specs, base, frozenset(scouts))


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
    return ChosenDevice(memory, width, decode.num_rows)


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
