"""Fill in every "auto", once: configuration and hardware in, one concrete spec per replica out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quadriga.checkpoint import Checkpoint, read_checkpoint
from quadriga.config import PoolConfig, QuadrigaConfig
from quadriga.errors import ConfigError
from quadriga.types import DepthClass, Role

CPU_KV_MEMORY_BYTES = 1 << 30
GPU_KV_MEMORY_SHARE = 0.85
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the cluster has; `Hardware.local` in a process without Ray.

    Attributes:
        gpu_memory_bytes: Free memory of the smallest GPU; 0 without GPUs.
    """

    num_cpus: float
    num_gpus: float = 0
    gpu_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """All an engine needs to start; nothing in here is "auto".

    Attributes:
        depth: Layers 1..depth are loaded.
        num_rows: Sequences whose KV it can hold at once.
        row_capacity_tokens: Most tokens of one sequence.
        kv_capacity_tokens: Tokens of KV over all rows; at most num_rows · row_capacity_tokens.
    """

    checkpoint: Checkpoint
    depth: int
    device: Literal["cpu", "cuda"]
    dtype: Dtype
    threads: int
    compile: Literal["auto", "off", "wait"]
    cache_dir: Path
    num_rows: int
    row_capacity_tokens: int
    kv_capacity_tokens: int

    @property
    def depth_class(self) -> DepthClass:
        return DepthClass(self.checkpoint.id, self.depth)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica the controller shall keep alive."""

    role: Role
    engine: EngineSpec
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """The desired state: the configuration it came from and every replica, in order."""

    config: QuadrigaConfig
    replicas: tuple[ReplicaSpec, ...]
    checkpoints: tuple[Checkpoint, ...]

    def checkpoint(self, model: str) -> Checkpoint | None:
        return next((c for c in self.checkpoints if c.id == model), None)


def resolve(config: QuadrigaConfig, hardware: Hardware) -> Deployment:
    """Return the deployment that `config` asks for on `hardware`.

    Raises:
        ConfigError: A checkpoint is unusable, a depth is beyond its model, two different
            checkpoints share an id, or the device asked for is not there.
    """
    device = config.engine.device
    if device == "auto":
        device = "cuda" if hardware.num_gpus > 0 else "cpu"
    if device == "cuda" and hardware.num_gpus == 0:
        raise ConfigError(
            "engine.device: 'cuda' was asked for but the cluster has no GPU; use 'auto' or 'cpu'",
            param="engine.device",
        )
    checkpoints: dict[str, Checkpoint] = {}
    replicas: list[ReplicaSpec] = []
    num_replicas = sum(p.prefill_replicas + p.decode_replicas for p in config.pools)
    for index, pool in enumerate(config.pools):
        checkpoint = read_checkpoint(pool.model)
        known = checkpoints.setdefault(checkpoint.id, checkpoint)
        if known.path != checkpoint.path:
            raise ConfigError(
                f"pools.{index}.model: two checkpoints are called {checkpoint.id!r} "
                f"({known.path}, {checkpoint.path}); rename one folder",
                param=f"pools.{index}.model",
            )
        for role, count, rows in (
            (Role.PREFILL, pool.prefill_replicas, config.prefill.max_rows),
            (Role.DECODE, pool.decode_replicas, config.decode.max_slots),
        ):
            engine = _engine_spec(config, pool, index, checkpoint, device, rows, hardware)
            spec = ReplicaSpec(
                role,
                engine,
                num_cpus=_cpus(config, device, hardware, num_replicas),
                num_gpus=_gpus(config, device),
            )
            replicas.extend([spec] * count)
    return Deployment(config, tuple(replicas), tuple(checkpoints.values()))


def _engine_spec(
    config: QuadrigaConfig,
    pool: PoolConfig,
    index: int,
    checkpoint: Checkpoint,
    device: Literal["cpu", "cuda"],
    num_rows: int,
    hardware: Hardware,
) -> EngineSpec:
    depth = pool.depth or checkpoint.num_layers
    if depth > checkpoint.num_layers:
        raise ConfigError(
            f"pools.{index}.depth: {depth} is beyond the {checkpoint.num_layers} layers of "
            f"{checkpoint.id}",
            param=f"pools.{index}.depth",
        )
    engine = config.engine
    dtype: Dtype = (
        engine.dtype if engine.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    )
    max_len = checkpoint.max_model_len
    if engine.max_model_len != "auto":
        if engine.max_model_len > max_len:
            raise ConfigError(
                f"engine.max_model_len: {engine.max_model_len} is beyond the {max_len} positions "
                f"of {checkpoint.id}",
                param="engine.max_model_len",
            )
        max_len = engine.max_model_len
    memory = engine.kv_memory_bytes
    if memory == "auto":
        memory = (
            CPU_KV_MEMORY_BYTES
            if device == "cpu"
            else int(hardware.gpu_memory_bytes * GPU_KV_MEMORY_SHARE)
        )
    bytes_per_token = checkpoint.kv_bytes_per_token(depth, DTYPE_BYTES[dtype])
    capacity = min(memory // bytes_per_token, num_rows * max_len)
    if capacity < max_len:
        raise ConfigError(
            f"engine.kv_memory_bytes: {memory} bytes hold {capacity} tokens of "
            f"{checkpoint.id} at depth {depth}, less than one sequence of {max_len}; raise it to "
            f"{max_len * bytes_per_token} or lower engine.max_model_len",
            param="engine.kv_memory_bytes",
        )
    cache_dir = Path(engine.cache_dir or "~/.cache/quadriga").expanduser()
    return EngineSpec(
        checkpoint=checkpoint,
        depth=depth,
        device=device,
        dtype=dtype,
        threads=engine.threads,
        compile=engine.compile,
        cache_dir=cache_dir,
        num_rows=num_rows,
        row_capacity_tokens=max_len,
        kv_capacity_tokens=capacity,
    )


def _cpus(config: QuadrigaConfig, device: str, hardware: Hardware, num_replicas: int) -> float:
    """A CPU per torch thread where there are enough, else an equal share of half of them."""
    wanted = config.engine.resources_cpus
    if wanted != "auto":
        return wanted
    full = float(config.engine.threads) if device == "cpu" else 1.0
    if num_replicas * full <= hardware.num_cpus - 1:
        return full
    return max(0.01, round(hardware.num_cpus / 2 / num_replicas, 2))


def _gpus(config: QuadrigaConfig, device: str) -> float:
    wanted = config.engine.resources_gpus
    if wanted != "auto":
        return wanted
    return 1.0 if device == "cuda" else 0.0
