"""The layers that an engine has loaded, what runs them, and how they become more or fewer.

Loading more is slow, so it happens beside the passes: `LoadedModel.prepare_depth` reads the layers
on a thread of its own, one after the other, into memory of their own, and lays out a new decoder.
Taking it is a change of pointers between two steps. Dropping layers is the same with nothing to
read; their weights and KV go back to the system right afterwards.

For a position that was computed before, layers that come are like layers that it skipped:
`SkippedKVStore` fills them in when a pass wants them.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from quadriga.checkpoint.exits import MAX_LAYERS
from quadriga.checkpoint.model_config import ModelConfig
from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.engine.compiled import CompiledDecoder, Kernels, KernelSwap, find_kernels
from quadriga.engine.early_exit.row_states import MappedStates
from quadriga.engine.early_exit.skipped_kv import SkippedKVStore
from quadriga.engine.kv_cache import Ints, KVCache, RowKVCache, budget_tokens
from quadriga.engine.models.decoder import AnyDecoder, Decoder
from quadriga.engine.numerics import numerics
from quadriga.engine.weights.checkpoint_weights import ModelWeights
from quadriga.engine.weights.loading import (
    kv_maps_of,
    load_spec,
    read_exit_heads,
    read_final_head,
    read_layer,
)
from quadriga.engine.weights.tensor_files import WeightSource
from quadriga.errors import ConfigError, DeadlineExceeded

if TYPE_CHECKING:
    from quadriga.engine.cuda.decoder import PagedDecoder
    from quadriga.engine.tensor_parallel.leader import ParallelDecoder

    FixedDecoder = PagedDecoder | ParallelDecoder  # keeps the layers that it starts with

NICENESS = 10
"""Of the thread that loads: passes come first."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a runner is made of.

    Attributes:
        spec: With the KV capacity that the device's memory allows.
        skipped: What early tokens leave behind; None without exits.
    """

    spec: EngineSpec
    decoder: Decoder | FixedDecoder
    cache: KVCache
    skipped: SkippedKVStore | None
    kernels: Kernels = field(default_factory=Kernels)


@dataclass(slots=True)
class PreparedLayers:
    """The layers of a deeper engine, ready for the engine that they were loaded for.

    The caller of `prepare_depth` closes them, whether the engine took them or not.

    Attributes:
        spec: The engine's, at the new depth.
        before: Layers of the engine it was made for.
        load_s: How long reading took.
        load_bytes: How much memory the new layers take.
    """

    spec: EngineSpec
    before: int
    load_s: float
    load_bytes: int
    eager: Decoder | None
    compiled: CompiledDecoder | None

    @property
    def depth(self) -> int:
        return self.spec.depth

    def close(self) -> None:
        """Let go of what was loaded; what was taken belongs to the engine. May be repeated."""
        self.eager = self.compiled = None

    def __enter__(self) -> PreparedLayers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_rows(spec: EngineSpec, config: ModelConfig) -> EngineParts:
    """Read the weights and reserve the KV rows, in host memory.

    Raises:
        ConfigError: The checkpoint or the spec cannot be served.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    kernels = find_kernels(spec)
    weights = load_spec(spec, config, has_kernels=kernels.library is not None)
    cache = RowKVCache(
        num_layers=spec.depth,
        num_rows=spec.num_rows,
        num_kv_heads=config.num_kv_heads,
        capacity=spec.row_capacity_tokens,
        head_dim=config.head_dim,
        dtype=dtype,
        budget_tokens=budget_tokens(spec),
    )
    skipped = skips_of(spec, config, cache, dtype)
    depths = skipped.depths if skipped is not None and skipped.mode == "alias" else None
    return EngineParts(spec, Decoder(config, weights, cache, depths), cache, skipped, kernels)


def skips_of(
    spec: EngineSpec, config: ModelConfig, cache: KVCache, dtype: torch.dtype
) -> SkippedKVStore | None:
    """What early tokens leave behind, in host memory; None without exits."""
    if not spec.can_exit or not (spec.exits.layers or spec.exit_plan.layers):
        return None
    ends = (*spec.exits.layers, spec.depth)
    states = MappedStates(spec.num_rows, cache.capacity, config.hidden_size, dtype)
    return SkippedKVStore(
        spec.skipped_kv, ends, cache, states, kept_at_end(spec), spec.replay_newest
    )


def kept_at_end(spec: EngineSpec) -> int:
    """Hidden states per row to keep behind the deepest layer loaded, for those that may follow."""
    is_partial = spec.depth < spec.checkpoint.num_layers
    return spec.keep_tokens if is_partial and spec.exit_plan.layers else 0


class LoadedModel:
    """Weights, KV memory and decoders of one model, at one depth at a time.

    One thread calls everything except `prepare_depth` and the waits.

    Attributes:
        spec: What is loaded now.
        config: The whole model's.
        ends: Layers run at the end of each segment, ascending; the last is the depth.
        cache: Of the layers that are loaded.
        decoder: What the last pass ran on.
    """

    def __init__(self, parts: EngineParts) -> None:
        spec, decoder = parts.spec, parts.decoder
        self.spec = spec
        self.config = decoder.config
        self.ends = (*spec.exits.layers, spec.depth)
        self.cache = parts.cache
        self.decoder: AnyDecoder = decoder
        self._started = spec
        self._eager = decoder
        self._swap = (
            KernelSwap(spec, decoder, parts.kernels) if isinstance(decoder, Decoder) else None
        )
        self._freeing: threading.Event | None = None

    @property
    def weights(self) -> ModelWeights:
        return self._eager.weights

    @property
    def adapter_of(self) -> Ints | None:
        """See `Decoder.adapter_of`; one array, whatever the depth."""
        return self._eager.adapter_of if isinstance(self._eager, Decoder) else None

    @property
    def full_depth(self) -> int:
        """Layers of the whole model."""
        return self.spec.checkpoint.num_layers

    def fastest(self) -> AnyDecoder:
        """The compiled decoder from the pass after it became ready, until then the eager one."""
        if self._swap is not None and (compiled := self._swap.take()) is not None:
            self.decoder = compiled
            self._eager = compiled.eager
            self._swap = None
        return self.decoder

    @property
    def numerics(self) -> str:
        """Name of what the next pass computes with; another one once kernels step in."""
        return numerics(self.spec, self.fastest().code)

    def close(self) -> None:
        """Give the device memory that is not tensors' back."""
        if not isinstance(self._eager, Decoder):
            self._eager.close()

    # Changing the depth.

    def prepare_depth(self, depth: int, timeout_s: float) -> PreparedLayers:
        """Load layers up to `depth`, beside what runs; the caller waits and closes them.

        Any thread but the engine's.

        Raises:
            ConfigError: No such depth, weights that are missing, damaged or not finite, or do not
                fit into memory with their KV.
            DeadlineExceeded: It took longer than `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        spec, eager = self._at(depth, deeper=True)
        compiled = self.decoder if isinstance(self.decoder, CompiledDecoder) else None
        result: list[PreparedLayers] = []
        failure: list[Exception] = []
        is_over = threading.Event()

        def load() -> None:
            with contextlib.suppress(OSError):  # a system that nices no threads: only less polite
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            try:
                result.append(_load(spec, eager, compiled, is_over.is_set))
            except Exception as exc:  # the border of the thread: the caller raises it
                failure.append(exc)

        thread = threading.Thread(target=load, name="load-layers", daemon=True)
        thread.start()
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            is_over.set()
            raise DeadlineExceeded(
                f"layers up to {depth} of {spec.checkpoint.id} were not loaded in {timeout_s:g} s"
            )
        if failure:
            raise failure[0]
        return result[0]

    def check_drop(self, depth: int) -> None:
        """Raises: ConfigError: `cut` would."""
        self._resizable(self.spec, depth, deeper=False)

    def cut(self, depth: int) -> tuple[EngineSpec, Decoder]:
        """Return the first `depth` layers alone, an exit, ready to be put in.

        Raises:
            ConfigError: The engine cannot hold so many.
        """
        spec, eager = self._at(depth, deeper=False)
        weights = eager.weights
        fewer = replace(
            weights,
            layers=weights.layers[:depth],
            heads={k: head for k, head in weights.heads.items() if k <= depth},
            kv_maps={k: maps[:depth] for k, maps in weights.kv_maps.items() if k <= depth},
        )
        return spec, eager.over(fewer, eager.cache.at_depth(depth, budget_tokens(spec)))

    def unpack(self, prepared: PreparedLayers) -> tuple[EngineSpec, Decoder]:
        """Layers that `prepare_depth` loaded, ready to be put in.

        Raises:
            ConfigError: They were made for another depth than is loaded now, or are closed.
        """
        if prepared.before != self.spec.depth or prepared.eager is None:
            state = "closed" if prepared.eager is None else f"made for {prepared.before} layers"
            raise ConfigError(
                f"depth: the layers prepared are {state}; this engine holds {self.spec.depth}: "
                "prepare them again",
                param="depth",
            )
        return prepared.spec, prepared.eager

    def put(
        self, spec: EngineSpec, eager: Decoder, compiled: CompiledDecoder | None
    ) -> list[object]:
        """Run another number of layers from the next pass on.

        Args:
            compiled: Over `eager`, where it is there already.

        Returns:
            What ran until now, for `let_go`.
        """
        fastest = self.fastest()
        old: list[object] = [self._eager, fastest]
        if isinstance(fastest, CompiledDecoder):
            self.decoder = compiled or fastest.over(eager)
        else:
            self.decoder = eager
        if self._swap is not None:
            self._swap.follow(eager)
        self.spec, self._eager, self.cache = spec, eager, eager.cache
        self.ends = (*spec.exits.layers, spec.depth)
        return old

    def let_go(self, old: list[object]) -> None:
        """Give the memory of layers that are gone back, in the background.

        Unmapping takes a while and holds the interpreter; so it goes layer by layer.

        Args:
            old: What `put` returned, the last references to it; emptied.
        """
        freeing = self._freeing = threading.Event()
        parts: list[object] = []
        for decoder in old:
            if isinstance(decoder, Decoder):
                parts += decoder.weights.layers[self.spec.depth :]
                parts += decoder.cache.buffers(self.spec.depth)

        def free() -> None:
            old.clear()
            while parts:
                parts.pop()
                time.sleep(0)  # the engine's thread may run
            freeing.set()

        # `Thread.start` would wait until the thread runs: on a busy machine, longer than a step.
        _thread.start_new_thread(free, ())

    def wait_freed(self, timeout_s: float) -> bool:
        """Wait until layers that were let go have given their memory back; False: not yet."""
        return self._freeing is None or self._freeing.wait(timeout_s)

    def _at(self, depth: int, *, deeper: bool) -> tuple[EngineSpec, Decoder]:
        """Return the spec at another depth, and the eager decoder of this one.

        Raises:
            ConfigError: The engine cannot change to `depth`.
        """
        spec = self.spec
        eager = self._resizable(spec, depth, deeper=deeper)
        return _spec_at(spec, self._started, depth, eager.weights.layers[0].nbytes), eager

    def _resizable(self, spec: EngineSpec, depth: int, *, deeper: bool) -> Decoder:
        """Return the eager decoder. Raises: ConfigError: It cannot change to `depth`."""
        eager, checkpoint = self._eager, spec.checkpoint
        if not isinstance(eager, Decoder):
            where = "over several ranks" if spec.tensor_parallel > 1 else "on a GPU"
            raise ConfigError(
                f"depth: an engine {where} keeps the {spec.depth} layers it started with; start a "
                f"replica of {checkpoint.id} at depth {depth}",
                param="depth",
            )
        allowed = [k for k in spec.depths if (k > spec.depth) is deeper and k != spec.depth]
        if depth not in allowed or (spec.exit_plan.layers and spec.depth not in spec.depths):
            way = "load more" if deeper else "drop to fewer"
            which = ", ".join(map(str, allowed)) or "none"
            if spec.exit_plan.layers and spec.depth not in spec.depths:
                which = f"none, as {spec.depth} layers are no exit of the model"
            raise ConfigError(
                f"depth: an engine that holds {spec.depth} of {checkpoint.num_layers} layers of "
                f"{checkpoint.id} cannot {way} to {depth}; possible are {which}",
                param="depth",
            )
        if spec.exit_plan.layers and depth > MAX_LAYERS:
            raise ConfigError(
                f"depth: {depth} layers are too many for early exits, the most are {MAX_LAYERS}",
                param="depth",
            )
        return eager


def _spec_at(spec: EngineSpec, started: EngineSpec, depth: int, layer_bytes: int) -> EngineSpec:
    """The engine's spec at another depth, with the KV that fits there.

    Down from the depth it started with, the weights that go are added to the KV's memory. Deeper
    than that it takes what an engine would that started there.

    Args:
        layer_bytes: Memory of one layer's weights.

    Raises:
        ConfigError: Not even one sequence fits.
    """
    checkpoint, width = spec.checkpoint, DTYPE_BYTES[spec.dtype]
    memory = started.kv_memory_bytes
    if memory is None:
        at_start = checkpoint.kv_bytes_per_token(started.depth, width)
        memory = started.kv_capacity_tokens * at_start
    memory += max(0, started.depth - depth) * layer_bytes
    token_bytes = checkpoint.kv_bytes_per_token(depth, width)
    tokens = min(memory // token_bytes, spec.num_rows * spec.row_capacity_tokens)
    if tokens < min(spec.row_capacity_tokens, started.kv_capacity_tokens):
        raise ConfigError(
            f"depth: at {depth} layers the KV memory of {memory} bytes holds {tokens} tokens of "
            f"{checkpoint.id}, less than one sequence of {spec.row_capacity_tokens}; raise "
            f"engine.kv_memory_bytes to {spec.row_capacity_tokens * token_bytes}",
            param="depth",
        )
    exits = spec.exit_plan.cut(depth) if spec.exit_plan.layers else spec.exits
    return replace(spec, depth=depth, exits=exits, kv_capacity_tokens=tokens)


def _load(
    spec: EngineSpec, eager: Decoder, compiled: CompiledDecoder | None, is_over: Callable[[], bool]
) -> PreparedLayers:
    started_s = time.monotonic()
    before = eager.num_layers
    try:
        weights = _deepened(spec, eager, is_over)
        cache = eager.cache.at_depth(spec.depth, budget_tokens(spec))
    except (MemoryError, OSError, RuntimeError) as exc:
        # Files that shrink under the map, and memory that is refused.
        raise ConfigError(
            f"model: layers {before + 1}..{spec.depth} of {spec.checkpoint.path} cannot be "
            f"loaded: {exc}",
            param="model",
        ) from exc
    deeper = eager.over(weights, cache)
    return PreparedLayers(
        spec=spec,
        before=before,
        load_s=time.monotonic() - started_s,
        load_bytes=sum(layer.nbytes for layer in weights.layers[before:]),
        eager=deeper,
        compiled=None if compiled is None else compiled.over(deeper),
    )


def _deepened(spec: EngineSpec, eager: Decoder, is_over: Callable[[], bool]) -> ModelWeights:
    """The weights of more layers: what is there stays, the rest is read, layer by layer."""
    weights, config, checkpoint = eager.weights, eager.config, spec.checkpoint
    exits, base = checkpoint.exits, weights.heads[len(weights.layers)]
    layers, heads = list(weights.layers), dict(weights.heads)
    source = WeightSource.beside(weights, checkpoint, spec.shared_in)
    with source.open() as files:
        for index in range(len(layers), spec.depth):
            if is_over():
                raise DeadlineExceeded(f"loading stopped before layer {index + 1}")
            layers.append(read_layer(files, config, index))
        if spec.depth not in exits.layers:
            known = None if exits.has_own_head else base.weight
            is_whole = known is None or config.tied_head  # then it is laid out as at the start
            with files.part(
                "head" if is_whole else "final norm", config.hidden_size * weights.dtype.itemsize
            ):
                heads[spec.depth] = (
                    base
                    if exits.kind == "shared"
                    else read_final_head(files, config, weights.embed, known)
                )
    at = [k for k in exits.layers if k <= spec.depth]
    missing = [k for k in at if k not in heads]
    heads |= read_exit_heads(source, config, exits, missing, base)
    fitted, known_maps = spec.skipped_kv == "linear", weights.kv_maps
    maps = kv_maps_of(source, config, layers, at, fitted=fitted, known=known_maps)
    return replace(weights, layers=layers, heads=heads, kv_maps=maps)
