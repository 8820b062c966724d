"""Load more layers, or let some go, while the engine serves.

What is slow happens elsewhere: `prepare` reads the layers on a thread of its own, one after the
other, into memory of their own, and lays out a whole new decoder beside the one that runs. Taking
it is a change of pointers between two steps. Letting layers go is the same with nothing to read;
their weights and KV go back to the system right afterwards.

Layers that were not there when a position was computed are to it what layers are that it skipped:
`SkippedKVStore` fills them in when a pass wants them. Positions of which no hidden state was kept
are run again first (`repay`).
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from quadriga.checkpoint.exits import MAX_LAYERS
from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.core.request import SequenceState
from quadriga.engine.compiled import CompiledDecoder
from quadriga.engine.early_exit.skipped_kv import SkippedKVStore
from quadriga.engine.kv_cache import KVCache
from quadriga.engine.models.decoder import AnyDecoder, Decoder
from quadriga.engine.models.layers import TokenSpan
from quadriga.engine.rebuild import RecordedPass, recorded_depths
from quadriga.engine.weights.checkpoint_weights import ModelWeights
from quadriga.engine.weights.loading import kv_maps_of, read_exit_heads, read_final_head, read_layer
from quadriga.engine.weights.tensor_files import WeightSource
from quadriga.errors import ConfigError, DeadlineExceeded
from quadriga.interfaces import PrefillChunk

NICENESS = 10
"""Of the thread that loads: passes come first."""


@dataclass(slots=True)
class PreparedLayers:
    """An engine that is deeper than the one it was made for, ready to be taken by it.

    Whoever asked for it closes it, taken or not.

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


def resizable(spec: EngineSpec, decoder: object, depth: int) -> Decoder:
    """The decoder, where it can be laid out anew. Raises: ConfigError: It is a GPU's."""
    if not isinstance(decoder, Decoder):
        raise ConfigError(
            f"depth: an engine on a GPU keeps the {spec.depth} layers it started with; start a "
            f"replica of {spec.checkpoint.id} at depth {depth}",
            param="depth",
        )
    return decoder


def check_depth(spec: EngineSpec, depth: int, *, deeper: bool) -> None:
    """Raises: ConfigError: An engine as `spec` says cannot change to `depth`."""
    name = spec.checkpoint.id
    allowed = [k for k in spec.depths if (k > spec.depth) is deeper and k != spec.depth]
    if depth not in allowed or (spec.exit_plan.layers and spec.depth not in spec.depths):
        way = "load more" if deeper else "drop to fewer"
        which = ", ".join(map(str, allowed)) or "none"
        if spec.exit_plan.layers and spec.depth not in spec.depths:
            which = f"none, as {spec.depth} layers are no exit of the model"
        raise ConfigError(
            f"depth: an engine that holds {spec.depth} of {spec.checkpoint.num_layers} layers of "
            f"{name} cannot {way} to {depth}; possible are {which}",
            param="depth",
        )
    if spec.exit_plan.layers and depth > MAX_LAYERS:
        raise ConfigError(
            f"depth: {depth} layers are too many for early exits, the most are {MAX_LAYERS}",
            param="depth",
        )


def spec_at(spec: EngineSpec, started: EngineSpec, depth: int, layer_bytes: int) -> EngineSpec:
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


def prepare(
    spec: EngineSpec, eager: Decoder, compiled: CompiledDecoder | None, *, timeout_s: float
) -> PreparedLayers:
    """Load layers up to `spec.depth` for an engine that runs `eager`; any thread but the engine's.

    Raises:
        ConfigError: Weights are missing, damaged, not finite, or do not fit into memory.
        DeadlineExceeded: It took longer than `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    result: list[PreparedLayers] = []
    failure: list[Exception] = []
    is_over = threading.Event()

    def load() -> None:
        with contextlib.suppress(OSError):  # a system that nices no threads: only less polite
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            result.append(_load(spec, eager, compiled, is_over.is_set))
        except Exception as exc:  # the border of the thread: whoever waits for it raises it
            failure.append(exc)

    thread = threading.Thread(target=load, name="load-layers", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline_s - time.monotonic()))
    if thread.is_alive():
        is_over.set()
        raise DeadlineExceeded(
            f"layers up to {spec.depth} of {spec.checkpoint.id} were not loaded in {timeout_s:g} s"
        )
    if failure:
        raise failure[0]
    return result[0]


def _load(
    spec: EngineSpec,
    eager: Decoder,
    compiled: CompiledDecoder | None,
    is_over: Callable[[], bool],
) -> PreparedLayers:
    started_s = time.monotonic()
    before = eager.num_layers
    try:
        weights = deepened(spec, eager, is_over)
        cache = eager.cache.at_depth(spec.depth)
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


def deepened(spec: EngineSpec, eager: Decoder, is_over: Callable[[], bool]) -> ModelWeights:
    """The weights of more layers: what is there stays, the rest is read, layer by layer."""
    weights, config, checkpoint = eager.weights, eager.config, spec.checkpoint
    exits, base = checkpoint.exits, weights.heads[len(weights.layers)]
    layers, heads = list(weights.layers), dict(weights.heads)
    source = WeightSource.beside(weights, checkpoint.path, spec.shared_in)
    with source.open() as files:
        for index in range(len(layers), spec.depth):
            if is_over():
                raise DeadlineExceeded(f"loading stopped before layer {index + 1}")
            layers.append(read_layer(files, config, index))
        if spec.depth not in exits.layers:
            known = None if exits.kind == "head" else base.weight
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
    maps = kv_maps_of(
        source,
        config,
        layers,
        at,
        fitted=spec.skipped_kv == "linear",
        known=weights.kv_maps,
    )
    return replace(weights, layers=layers, heads=heads, kv_maps=maps)


def shallower(eager: Decoder, depth: int) -> Decoder:
    """A decoder of the first `depth` layers, an exit, over what `eager` has of them."""
    weights = eager.weights
    cut = replace(
        weights,
        layers=weights.layers[:depth],
        heads={k: head for k, head in weights.heads.items() if k <= depth},
        kv_maps={k: maps[:depth] for k, maps in weights.kv_maps.items() if k <= depth},
    )
    return eager.over(cut, eager.cache.at_depth(depth))


def let_go(old: list[object], depth: int) -> threading.Event:
    """Give the memory of layers behind the first `depth` back, on a thread of its own.

    Unmapping takes a while and holds the interpreter; so it goes layer by layer.

    Args:
        old: Decoders that had them, and nobody else has; emptied.

    Returns:
        Set when it is done.
    """
    is_done = threading.Event()
    parts: list[object] = []
    for decoder in old:
        if isinstance(decoder, Decoder):
            parts += decoder.weights.layers[depth:]
            parts += decoder.cache.buffers(depth)

    def free() -> None:
        old.clear()
        while parts:
            parts.pop()
            time.sleep(0)  # the engine's thread may run
        is_done.set()

    # `Thread.start` would wait until the thread runs: on a busy machine, for longer than a step.
    _thread.start_new_thread(free, ())
    return is_done


def repay(
    decoder: AnyDecoder,
    cache: KVCache,
    store: SkippedKVStore,
    row: int,
    state: SequenceState,
    max_tokens: int,
) -> int:
    """Run positions again that lack KV and left no state; return how many are still owed.

    The prompt goes through every layer. A token that was generated goes as deep as it once went,
    and the layers behind are filled in as the store does it; under `replay` that is every layer.

    Args:
        max_tokens: Run no more positions than this.
    """
    start, stop = store.owed(row)
    end = min(stop, start + max_tokens)
    if end <= start:
        return stop - start
    token_ids = (state.prompt_ids + state.output_ids)[start:end]
    deepest = store.ends[-1]
    record = [deepest] * len(state.prompt_ids) + state.exit_layers[1:] + [deepest]
    chunk = PrefillChunk(row, token_ids, start, is_last=False, depths=record[start:end])
    depths = recorded_depths([chunk], store.ends, store.mode)
    spans = [TokenSpan(row, 0, end - start, start)]
    batch = decoder.plan(spans)
    x = decoder.embed(token_ids, batch)
    if depths is None:
        decoder.run_layers(x, batch, 0, deepest)
    else:
        RecordedPass(decoder, cache, store.mode, spans, depths).run(x, batch, store.ends, None)
    store.paid(row, start, end, depths)
    return stop - end
