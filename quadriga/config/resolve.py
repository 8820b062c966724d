"""Fill in every "auto", once: configuration and hardware in, one concrete spec per replica out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from quadriga.catalogue.adapters import read_adapters
from quadriga.checkpoint.exits import (
    MAX_LAYERS,
    NEVER,
    SKIPPED_KV_WEIGHTS,
    ExitMode,
    ExitSpec,
    SkippedKV,
)
from quadriga.checkpoint.families import NATIVE_ARCHITECTURES
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.checkpoint.model_config import read_model_config
from quadriga.checkpoint.stored_forms import GROUP_ROWS
from quadriga.config.engine import PoolConfig
from quadriga.config.engine_spec import (
    DTYPE_BYTES,
    WEIGHT_BYTES,
    Device,
    Dtype,
    EngineSpec,
    Runner,
    WeightForm,
)
from quadriga.config.kv_memory import (
    FLOOR_TOKENS,
    KVShare,
    NodeMemory,
    WeightBytes,
    fitting_length,
    least_length,
    weight_bytes,
)
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.adapters import Adapter
from quadriga.core.replica import PARTS, Role
from quadriga.errors import ConfigError
from quadriga.files import cache_folder

__all__ = [
    "DTYPE_BYTES",
    "Deployment",
    "EngineSpec",
    "Hardware",
    "ReplicaSpec",
    "configured_exits",
    "num_replicas",
    "resolve",
    "runner_of",
]


CHUNK_TOKENS: Mapping[Device, int] = {"cpu": 256, "cuda": 2048}
MAX_SLOTS: Mapping[Device, int] = {"cpu": 32, "cuda": 256}
"""Where the configuration leaves them to the device. A step of a GPU reads its weights once for
hundreds of tokens in about the time that it takes for one; on a CPU time grows with the tokens."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the cluster has.

    Attributes:
        nodes: Those that may run replicas, as far as they have joined.
        has_compiler: Whether kernels can be compiled on the nodes. Without them an engine on CPUs
            writes its weights out as float32.
    """

    num_cpus: float
    num_gpus: float = 0
    nodes: tuple[NodeMemory, ...] = ()
    has_compiler: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica the controller shall keep alive.

    Attributes:
        node_labels: Only a node with all of these Ray labels may run it.
        changes_depth: It loads and drops layers while it lives.
        kv_share: Gives it its KV memory by the node where it is placed, which may be another than
            `engine` was sized for; None where that is named, or a GPU's.
    """

    role: Role
    engine: EngineSpec
    num_cpus: float
    num_gpus: float
    node_labels: Mapping[str, str] = field(default_factory=dict)
    changes_depth: bool = False
    kv_share: KVShare | None = None


@dataclass(frozen=True, slots=True)
class Deployment:
    """The desired state: the configuration it came from and every replica, in order."""

    config: QuadrigaConfig
    replicas: tuple[ReplicaSpec, ...]
    checkpoints: tuple[Checkpoint, ...]

    def checkpoint(self, model: str) -> Checkpoint | None:
        return next((c for c in self.checkpoints if c.id == model), None)


def num_replicas(
    pool: PoolConfig, room: int | None = None, *, may_mix: bool = True
) -> dict[Role, int]:
    """How many replicas of a pool there shall be, by role.

    Args:
        room: So many fit the GPUs; None: that does not limit them.
        may_mix: One mixed replica where a prefill and a decode replica do not fit.
    """
    given = (pool.prefill_replicas, pool.decode_replicas)
    mixed = pool.mixed_replicas
    if mixed == "auto":
        is_cramped = may_mix and room is not None and room < 2
        mixed = 1 if is_cramped and given == ("auto", "auto") else 0
    if mixed:
        return {Role.MIXED: mixed}
    prefill = 1 if pool.prefill_replicas == "auto" else pool.prefill_replicas
    fitting = 2 if room is None else min(2, max(1, room - prefill))
    decode = fitting if pool.decode_replicas == "auto" else pool.decode_replicas
    return {Role.PREFILL: prefill, Role.DECODE: decode}


def num_queues(config: QuadrigaConfig) -> int:
    """How many replicas of all pools shall take prompts."""
    each = (item for pool in config.pools for item in num_replicas(pool).items())
    return sum(n for role, n in each if role.does(Role.PREFILL))


def replica_room(config: QuadrigaConfig, hardware: Hardware, device: Device) -> int | None:
    """How many replicas of each pool fit the GPUs that are there; None without any."""
    each = _gpus(config, device)
    if device != "cuda" or not hardware.num_gpus or not each:
        return None
    return int(hardware.num_gpus / each / len(config.pools))


def _check_mixed(config: QuadrigaConfig) -> None:
    """Raises: ConfigError: HELIOS, which changes prefill and decode replicas, and mixed ones."""
    for index, pool in enumerate(config.pools if config.helios.enabled else ()):
        if pool.mixed_replicas not in ("auto", 0):
            raise ConfigError(
                f"pools.{index}.mixed_replicas: {pool.mixed_replicas} is not possible with "
                "helios.enabled: true, which chooses models and depths for prefill and for "
                "decode replicas; leave one of them out",
                param=f"pools.{index}.mixed_replicas",
            )


def resolve(config: QuadrigaConfig, hardware: Hardware) -> Deployment:
    """Return the deployment that `config` asks for on `hardware`.

    Raises:
        ConfigError: A checkpoint is unusable, a depth is beyond its model, two different
            checkpoints share an id, or the device asked for is not there.
    """
    device = config.engine.device
    if device == "auto":
        device = "cuda" if hardware.num_gpus > 0 else "cpu"
    # Who says how many GPUs a replica takes may deploy before the nodes that have them join.
    if device == "cuda" and hardware.num_gpus == 0 and config.engine.resources_gpus == "auto":
        raise ConfigError(
            "engine.device: 'cuda' was asked for but the cluster has no GPU; use 'auto' or 'cpu', "
            "or set engine.resources_gpus if GPU nodes will join later",
            param="engine.device",
        )
    if device == "cpu" and config.transport.kind == "nccl":
        raise ConfigError(
            "transport.kind: 'nccl' moves KV between GPUs and engine.device is 'cpu'; use 'auto'",
            param="transport.kind",
        )
    engine = config.engine
    dtype: Dtype = (
        engine.dtype if engine.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    )
    _check_mixed(config)
    room = replica_room(config, hardware, device)
    checkpoints: dict[str, Checkpoint] = {}
    pools: list[_Pool] = []
    for index, pool in enumerate(config.pools):
        checkpoint = read_checkpoint(
            pool.model, cache_dir=config.engine.cache_dir, heads=pool.exits.folder
        )
        checkpoint = replace(checkpoint, exits=configured_exits(config, index, checkpoint))
        known = checkpoints.setdefault(checkpoint.id, checkpoint)
        if known.path != checkpoint.path:
            raise ConfigError(
                f"pools.{index}.model: two checkpoints are called {checkpoint.id!r} "
                f"({known.path}, {checkpoint.path}); rename one of them",
                param=f"pools.{index}.model",
            )
        depth = pool.depth or checkpoint.num_layers
        if depth > checkpoint.num_layers:
            raise ConfigError(
                f"pools.{index}.depth: {depth} is beyond the {checkpoint.num_layers} layers of "
                f"{checkpoint.id}",
                param=f"pools.{index}.depth",
            )
        runner = runner_of(pool, index, checkpoint, depth)
        _check_weights(engine.weights, device, dtype, runner, checkpoint.id)
        _check_exits(pool, index, checkpoint, runner)
        _check_ranks(config, index, checkpoint, device, runner)
        adapters = _adapters(config, index, checkpoint, device, runner, DTYPE_BYTES[dtype])
        counts = num_replicas(pool, room, may_mix=not config.helios.enabled)
        pools.append(_Pool(index, pool, checkpoint, depth, runner, adapters, counts))
    num_running = sum(sum(pool.num_replicas.values()) for pool in pools)
    if config.helios.enabled and config.helios.scout:
        num_running += len(PARTS)
    num_processes = num_running * engine.tensor_parallel
    cpus_each = _cpus(config, device, hardware, num_processes)
    if config.helios.enabled and config.helios.scaling.enabled:  # those that may come have KV, too
        there = pools[0].num_replicas.get(Role.DECODE, 0)
        num_processes += max(0, config.helios.scaling.max_replicas - there)
    share_for = _kv_shares(config, hardware, device, dtype, pools, cpus_each, num_processes)
    replicas: list[ReplicaSpec] = []
    memory = None if engine.kv_memory_bytes == "auto" else engine.kv_memory_bytes
    for one in pools:
        pool, share = one.config, share_for(one.checkpoint)
        if share is not None:
            memory = share.bytes_on(hardware.nodes)
        labels = {
            Role.PREFILL: pool.prefill_labels,
            Role.DECODE: pool.decode_labels,
            Role.MIXED: pool.mixed_labels,
        }
        for role, count in one.num_replicas.items():
            spec = ReplicaSpec(
                role,
                _engine_spec(config, one, role, device, dtype, memory),
                num_cpus=cpus_each,
                num_gpus=_gpus(config, device),
                node_labels=labels[role],
                kv_share=share,
            )
            replicas.extend([spec] * count)
    return Deployment(config, tuple(replicas), tuple(checkpoints.values()))


def _check_weights(
    weights: WeightForm, device: Device, dtype: Dtype, runner: Runner, model: str
) -> None:
    """Raises: ConfigError: What runs the model knows no other form than its own."""
    if weights == "auto" or (device, dtype, runner) == ("cpu", "float32", "native"):
        return
    what = (
        f"{model} runs in the relay batch"
        if runner != "native"
        else f"engine.device is {device} and engine.dtype {dtype}"
    )
    raise ConfigError(
        f"engine.weights: {weights!r} is a form of the native engine on CPUs in float32, and "
        f"{what}; use 'auto'",
        param="engine.weights",
    )


def _check_exits(pool: PoolConfig, index: int, checkpoint: Checkpoint, runner: Runner) -> None:
    """Raises: ConfigError: Exits are asked for whose weights are not there."""
    if runner == "native" and (pool.exits.layers != "auto" or pool.exits.kind != "auto"):
        from quadriga.catalogue.inspection import exit_tensors  # Most services name no exits.

        try:
            exit_tensors(checkpoint.heads_path, checkpoint.exits)
        except ConfigError as exc:
            raise ConfigError(
                f"pools.{index}.exits: {exc.message}; name exits that {checkpoint.id} has, or have "
                "`python -m quadriga.tune` make others",
                param=f"pools.{index}.exits",
            ) from exc


def _compile(config: QuadrigaConfig, device: Device) -> Literal["auto", "off", "wait"]:
    """Where answers are to be the same, kernels must not step in between two of their tokens."""
    is_exact = config.deterministic and device == "cpu"
    return "wait" if is_exact and config.engine.compile == "auto" else config.engine.compile


def _engine_spec(
    config: QuadrigaConfig,
    pool: _Pool,
    role: Role,
    device: Device,
    dtype: Dtype,
    memory: int | None,
) -> EngineSpec:
    engine, checkpoint = config.engine, pool.checkpoint
    index, depth, runner = pool.index, pool.depth, pool.runner
    cache_dir = cache_folder(engine.cache_dir)
    chunk_tokens = _given(config.prefill.chunk_tokens, CHUNK_TOKENS[device])
    spec = EngineSpec(
        checkpoint=checkpoint,
        depth=depth,
        device=device,
        dtype=dtype,
        threads=engine.threads,
        compile=_compile(config, device),
        cache_dir=cache_dir,
        num_rows=0,
        row_capacity_tokens=0,
        kv_capacity_tokens=0,
        weights=engine.weights,
        runner=runner,
        exits=_exits_in_use(config, index, checkpoint, depth, runner),
        can_exit=role.does(Role.DECODE),
        exit_plan=_exits_in_use(config, index, checkpoint, checkpoint.num_layers, runner),
        skipped_kv=_skipped_kv(pool.config, index, checkpoint),
        replay_newest=_given(pool.config.exits.replay_newest, checkpoint.exits.replay_newest),
        pass_tokens=chunk_tokens if role.does(Role.PREFILL) else 0,
        attention=engine.attention,
        gpu_memory_share=engine.gpu_memory_share if memory is None else None,
        fits_length=memory is None and engine.max_model_len == "auto",
        host_copies=not (device == "cuda" and config.transport.kind in ("auto", "nccl", "nixl")),
        shared_in=cache_dir / "shared" if device == "cpu" else None,
        adapters=pool.adapters,
        tensor_parallel=engine.tensor_parallel,
    )
    return with_kv_memory(spec, config, role, memory)


def with_kv_memory(
    engine: EngineSpec, config: QuadrigaConfig, role: Role, memory: int | None
) -> EngineSpec:
    """The engine with its rows, the most tokens of one sequence, and those of all.

    The length goes by full depth, so that a model has one limit, whatever is loaded of it.

    Args:
        memory: Bytes; None where a GPU's decides, which is known to the process that has it alone,
            once the weights are in it: then all are ceilings that the replica lowers.

    Raises:
        ConfigError: The memory holds not even one sequence.
    """
    checkpoint, decodes = engine.checkpoint, role.does(Role.DECODE)
    num_rows = config.prefill.num_rows
    if decodes:
        num_rows = _given(config.decode.max_slots, MAX_SLOTS[engine.device])
    wanted, width = config.engine.max_model_len, DTYPE_BYTES[engine.dtype]
    positions = checkpoint.max_model_len
    if wanted != "auto" and wanted > positions:
        raise ConfigError(
            f"engine.max_model_len: {wanted} is beyond the {positions} positions of "
            f"{checkpoint.id}",
            param="engine.max_model_len",
        )
    max_len = least = positions if wanted == "auto" else wanted
    capacity = num_rows * max_len
    if memory is not None:
        if wanted == "auto":
            at_full_depth = memory // checkpoint.kv_bytes_per_token(checkpoint.num_layers, width)
            max_len = fitting_length(positions, at_full_depth, engine.runner)
            least = least_length(positions)
        bytes_per_token = checkpoint.kv_bytes_per_token(engine.depth, width)
        fitting = memory // bytes_per_token
        if fitting < least:
            remedy = "or lower engine.max_model_len" if wanted != "auto" else "or load less depth"
            raise ConfigError(
                f"engine.kv_memory_bytes: {memory} bytes hold {fitting} tokens of {checkpoint.id} "
                f"at depth {engine.depth}, less than one sequence of {least}; raise it to "
                f"{least * bytes_per_token} {remedy}",
                param="engine.kv_memory_bytes",
            )
        capacity = min(fitting, num_rows * max_len)
        if engine.runner == "baton" and decodes:
            # Its batch is dense: a short row takes as much as the longest beside it.
            num_rows = max(1, capacity // max_len)
            capacity = num_rows * max_len
    return replace(
        engine,
        num_rows=num_rows,
        row_capacity_tokens=max_len,
        kv_capacity_tokens=capacity,
        kv_memory_bytes=memory,
    )


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool, its place in the configuration, and what it runs."""

    index: int
    config: PoolConfig
    checkpoint: Checkpoint
    depth: int
    runner: Runner
    adapters: tuple[Adapter, ...]
    num_replicas: dict[Role, int]


def _adapters(
    config: QuadrigaConfig,
    index: int,
    checkpoint: Checkpoint,
    device: Device,
    runner: Runner,
    value_bytes: int,
) -> tuple[Adapter, ...]:
    """The adapters of a pool.

    Raises: ConfigError: One cannot be served, they take too much memory, or nothing runs them.
    """
    field, folder = f"pools.{index}.adapters", config.pools[index].adapters
    for other, pool in enumerate(config.pools[:index]):
        if pool.model == config.pools[index].model and pool.adapters != folder:
            raise ConfigError(
                f"{field}: {folder} and pools.{other}.adapters: {pool.adapters} are of one model, "
                "whose requests either pool may get; give both the same",
                param=field,
            )
    if folder is None:
        return ()
    if index == 0 and config.helios.enabled:
        raise ConfigError(
            f"{field}: helios.enabled chooses the models of the first pool, and adapters belong to "
            "one; leave it out, or serve them from a further pool",
            param=field,
        )
    if device != "cpu" or runner != "native":
        where = "on GPUs" if device != "cpu" else "in the relay batch"
        raise ConfigError(
            f"{field}: {checkpoint.id} runs {where}, which takes no LoRA adapters; leave it out, "
            "or merge the adapter into the weights",
            param=field,
        )
    found = read_adapters(folder)
    taken = sum(adapter.num_bytes for adapter in found)
    share = config.engine.adapter_memory_share
    most = int(share * weight_bytes(checkpoint, value_bytes, matrices=value_bytes))
    if taken > most:
        raise ConfigError(
            f"{field}: the {len(found)} adapters in {folder} take {taken} bytes, above the "
            f"{most} that engine.adapter_memory_share ({share}) leaves them beside "
            f"{checkpoint.id}; raise it or serve fewer",
            param=field,
        )
    return found


def _check_ranks(
    config: QuadrigaConfig, index: int, checkpoint: Checkpoint, device: Device, runner: Runner
) -> None:
    """Raises: ConfigError: A pool's replicas cannot be made of so many ranks."""
    field, size = "engine.tensor_parallel", config.engine.tensor_parallel
    if size == 1:
        return
    where = None
    if device != "cpu":
        where = f"engine.device {device}, and ranks meet over gloo, on CPUs"
    elif runner != "native":
        where = f"{checkpoint.id} in the relay batch, which runs unmodified models whole"
    elif config.helios.enabled:
        where = "helios.enabled, and ranks keep the layers that they start with"
    elif config.pools[index].adapters is not None:
        where = f"pools.{index}.adapters, and ranks take no LoRA adapters"
    if where is not None:
        raise ConfigError(f"{field}: {size} is not possible with {where}; use 1", param=field)
    model = read_model_config(checkpoint.path)
    shared = {
        "KV heads": model.num_kv_heads,
        "columns of the MLP": model.ffn_size,
        "columns of the hidden states": model.hidden_size,
        "tokens of the vocabulary": model.vocab_size,
    }
    # Parts of what is several matrices in one have no such form without whole groups of rows.
    if config.engine.weights in ("int8", "bfloat16"):
        rows = {"rows of the keys": model.kv_size}
        if model.gated:
            rows["rows of the MLP"] = model.ffn_size
        shared |= {
            f"groups of {GROUP_ROWS} {what}": count // GROUP_ROWS
            for what, count in rows.items()
            if count % GROUP_ROWS == 0
        }
    for what, count in shared.items():
        if count % size:
            fitting = [n for n in range(1, 65) if math.gcd(*shared.values()) % n == 0]
            raise ConfigError(
                f"{field}: {size} ranks cannot share the {count} {what} of {checkpoint.id} "
                f"evenly; use one of {', '.join(map(str, fitting))}",
                param=field,
            )


def _kv_shares(
    config: QuadrigaConfig,
    hardware: Hardware,
    device: Device,
    dtype: Dtype,
    pools: list[_Pool],
    cpus_each: float,
    num_processes: int,
) -> Callable[[Checkpoint], KVShare | None]:
    """Where a replica's KV memory comes from, by its model; None where it is named, or its GPU's.

    Args:
        num_processes: That may run at once, the ranks of all replicas.
    """
    if config.engine.kv_memory_bytes != "auto" or device == "cuda":
        return lambda _: None
    width = DTYPE_BYTES[dtype]
    has_kernels = hardware.has_compiler and config.engine.compile != "off" and dtype == "float32"
    kept: int | Literal["stored"] = "stored" if has_kernels else width
    if config.engine.weights != "auto":
        kept = WEIGHT_BYTES[config.engine.weights]
    ranks = config.engine.tensor_parallel
    weights = {
        pool.checkpoint.id: WeightBytes(
            weight_bytes(
                pool.checkpoint, width, matrices=kept if pool.runner == "native" else width
            )
            // ranks,
            # Only the native engine reads weights from one copy for all processes of a node.
            ranks if pool.runner == "native" else sum(pool.num_replicas.values()),
        )
        for pool in pools
    }
    adapters = [
        WeightBytes(
            sum(adapter.num_bytes for adapter in pool.adapters), sum(pool.num_replicas.values())
        )
        for pool in pools
    ]

    def share_for(checkpoint: Checkpoint) -> KVShare:
        least = min(checkpoint.max_model_len, FLOOR_TOKENS)
        least *= checkpoint.kv_bytes_per_token(checkpoint.num_layers, width)
        copies = (*weights.values(), *adapters)
        return KVShare(copies, num_processes, cpus_each, ranks, least)

    return share_for


def runner_of(pool: PoolConfig, index: int, checkpoint: Checkpoint, depth: int) -> Runner:
    """Who runs the model. Raises: ConfigError when that runner cannot."""
    is_native = checkpoint.architecture in NATIVE_ARCHITECTURES
    if pool.runner == "native" and not is_native:
        raise ConfigError(
            f"pools.{index}.runner: {checkpoint.id} is a {checkpoint.architecture}; the native "
            f"engine runs {', '.join(sorted(NATIVE_ARCHITECTURES))}; use 'auto' or 'baton'",
            param=f"pools.{index}.runner",
        )
    if pool.runner == "native" or (pool.runner == "auto" and is_native):
        read_model_config(checkpoint.path)  # says what it cannot compute before a replica starts
        return "native"
    if depth < checkpoint.num_layers:
        raise ConfigError(
            f"pools.{index}.depth: {checkpoint.id} runs in the relay batch, which has no exits; "
            f"leave depth away or set it to {checkpoint.num_layers}, not {depth}",
            param=f"pools.{index}.depth",
        )
    return "baton"


def configured_exits(config: QuadrigaConfig, index: int, checkpoint: Checkpoint) -> ExitSpec:
    """The checkpoint's exits, with what the configuration says of a pool's instead.

    Raises: ConfigError: A layer is outside the model.
    """
    exits = config.pools[index].exits
    spec = replace(checkpoint.exits, mode=_exit_mode(config, index))
    if exits.layers == "none":
        spec = replace(spec, layers=())
    elif exits.layers == "all":
        spec = replace(spec, layers=tuple(range(1, checkpoint.num_layers)))
    elif exits.layers != "auto":
        outside = [k for k in exits.layers if not 0 < k < checkpoint.num_layers]
        if outside:
            raise ConfigError(
                f"pools.{index}.exits.layers: {outside} are outside 1..{checkpoint.num_layers - 1},"
                f" the inner layers of {checkpoint.id}",
                param=f"pools.{index}.exits.layers",
            )
        spec = replace(spec, layers=tuple(sorted(set(exits.layers))))
    if exits.kind != "auto" and exits.kind != spec.kind:
        spec = replace(spec, kind=exits.kind, sure_from=())
    if exits.criterion != "auto" and exits.criterion != spec.criterion:
        spec = replace(spec, criterion=exits.criterion, sure_from=())
    if exits.threshold != "auto":
        spec = replace(spec, threshold=exits.threshold)
    return spec


def _exit_mode(config: QuadrigaConfig, index: int) -> ExitMode:
    """Tokens leave early unasked only where the configuration allows that some change."""
    exits, chooses = config.pools[index].exits, config.helios.enabled and index == 0
    if exits.mode != "auto":
        return exits.mode
    allows_change = (
        (exits.threshold != "auto" and exits.threshold < NEVER)
        or config.decode.rebatching not in ("drex", "off")
        or (chooses and config.helios.max_changed_share > 0.0)
    )
    return "bounded" if allows_change else "lossless"


def _exits_in_use(
    config: QuadrigaConfig, index: int, checkpoint: Checkpoint, depth: int, runner: str
) -> ExitSpec:
    """The same for prefill and decode; unmodified models have none.

    Raises: ConfigError: The model is too deep for early exits.
    """
    if runner != "native" or config.decode.rebatching == "off":
        return replace(checkpoint.exits, layers=())
    exits = checkpoint.exits.cut(depth)
    if exits.layers and depth > MAX_LAYERS:
        raise ConfigError(
            f"pools.{index}.exits.layers: {checkpoint.id} at depth {depth} is too deep for early "
            f"exits, the most are {MAX_LAYERS} layers; set it to 'none' or load less depth",
            param=f"pools.{index}.exits.layers",
        )
    return exits


def _skipped_kv(pool: PoolConfig, index: int, checkpoint: Checkpoint) -> SkippedKV:
    """How skipped KV is made up for. Raises: ConfigError: Maps are asked for that are not there."""
    wanted = pool.exits.skipped_kv
    has_maps = (checkpoint.heads_path / SKIPPED_KV_WEIGHTS).is_file()
    if wanted == "auto":
        return "linear" if has_maps else "project"
    if wanted == "linear" and not has_maps:
        raise ConfigError(
            f"pools.{index}.exits.skipped_kv: {checkpoint.id} has no {SKIPPED_KV_WEIGHTS}; use "
            "'project', or fit one",
            param=f"pools.{index}.exits.skipped_kv",
        )
    return wanted


def _cpus(config: QuadrigaConfig, device: str, hardware: Hardware, num_replicas: int) -> float:
    """A CPU per torch thread where there are enough, else an equal share of half of them."""
    wanted = config.engine.resources_cpus
    if wanted != "auto":
        return wanted
    full = float(config.engine.threads) if device == "cpu" else 1.0
    if num_replicas * full <= hardware.num_cpus - 1:
        return full
    return max(0.01, round(hardware.num_cpus / 2 / num_replicas, 2))


def _given(value: int | Literal["auto"], otherwise: int) -> int:
    return otherwise if value == "auto" else value


def _gpus(config: QuadrigaConfig, device: str) -> float:
    wanted = config.engine.resources_gpus
    if wanted != "auto":
        return wanted
    return 1.0 if device == "cuda" else 0.0
