"""The compiled implementation of a decoder: the same passes, in the engine's CPU kernels.

`KernelSwap` gets it ready off the serving thread; the runner swaps it in between two steps. It
shares weights and KV cache with the eager `Decoder`, so the swap copies nothing and takes no time.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from quadriga.checkpoint.exits import ExitSpec
from quadriga.config.engine_spec import EngineSpec
from quadriga.config.kv_memory import weight_bytes
from quadriga.engine.kernels.build import BuildUnavailable, build_library, cached_library
from quadriga.engine.kernels.library import (
    CDraft,
    CGather,
    CHead,
    CKVMap,
    CLayer,
    CLinear,
    CLowRank,
    CMatrix,
    CModel,
    CNorm,
    KernelLibrary,
    pointer,
)
from quadriga.engine.kv_cache import KV_BLOCK, Ints
from quadriga.engine.models.decoder import AnyDecoder, Candidates, Decoder
from quadriga.engine.weights.checkpoint_weights import Head, LayerAdapters
from quadriga.engine.weights.loading import load_spec
from quadriga.interfaces import DraftPlan

logger = logging.getLogger(__name__)

_ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}
_BACKGROUND_BYTES = 2 << 30
"""Float32 size of the largest weights that serve uncompiled while kernels compile."""


@dataclass(slots=True)
class KernelPass:
    """One pass over T tokens, as the kernels want it.

    Attributes:
        rows, positions: int64 [T].
    """

    rows: Ints
    positions: Ints


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """What the kernels drafted for n rows.

    Attributes:
        num_run: int64 [n], passes over each row.
        tokens: int64 [n, 1 + most]: the token it began with, then `num_run` that were drafted.
        confidences: float32 [n, most], theirs, as the exit says them.
    """

    num_run: Ints
    tokens: Ints
    confidences: npt.NDArray[np.float32]


class _Workers:
    """The threads of one engine's kernels; they end with the last decoder that uses them."""

    def __init__(self, library: KernelLibrary, threads: int) -> None:
        self.pool = library.pool_new(threads)
        if not self.pool:
            raise BuildUnavailable(f"{threads} threads could not be started")
        # Not at exit: another thread may be inside of a kernel.
        weakref.finalize(self, library.pool_free, self.pool).atexit = False


class CompiledDecoder(AnyDecoder):
    """`Decoder`'s operations on the kernels; float32 on CPUs.

    Results of a token depend on nothing but its own row: not on the batch, the chunking or the
    number of threads, to the bit.
    """

    def __init__(self, library: KernelLibrary, eager: Decoder, workers: _Workers) -> None:
        self.config = eager.config
        self.eager = eager  # what it stands for; owns what the structures below point at
        self._library = library
        self._workers = workers
        self._pool = workers.pool
        self._layers = (CLayer * eager.num_layers)(*_layers(eager))
        # Of `_gather`, which cannot raise through a kernel, and what it found.
        self._failure: BaseException | None = None
        self._gathered = torch.empty(0)
        self._model = _model(eager, self._layers)
        if eager.gather is not None:
            self._model.gather = CGather(self._gather)
        self._embed = CMatrix.of(eager.weights.embed)
        self._kv_maps = {
            depth: (CKVMap * len(maps))(*(CKVMap(CNorm.of(m.norm), CLinear.of(m.kv)) for m in maps))
            for depth, maps in eager.weights.kv_maps.items()
        }
        self._heads = {depth: _head(eager, h) for depth, h in eager.weights.heads.items()}
        self._scratch = torch.empty(0)
        self._head_scratch = torch.empty(0)

    @property
    def code(self) -> str:
        """See `KernelLibrary.code`."""
        return self._library.code

    def over(self, eager: Decoder) -> CompiledDecoder:
        """The same kernels and threads over another decoder; only one of both may run at a time."""
        return CompiledDecoder(self._library, eager, self._workers)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def reads_depths(self) -> bool:
        return self.eager.depths is not None

    def plan_tokens(self, rows: Ints, positions: Ints) -> KernelPass:
        """See `Decoder.plan_tokens`."""
        return KernelPass(rows, positions)

    def embed(self, token_ids: Sequence[int], batch: KernelPass) -> torch.Tensor:
        """See `Decoder.embed`."""
        w, c = self.eager.weights, self.config
        ids = np.array(token_ids, dtype=np.int64)
        # By Python: numpy takes some microseconds for its first number.
        if ids.size and not 0 <= min(token_ids) <= max(token_ids) < c.vocab_size:
            raise IndexError(f"token ids must lie in 0..{c.vocab_size - 1}, the vocabulary")
        x = torch.empty(ids.size, c.embed_size)
        self._library.rows(self._embed, c.embed_size, ids.size, ids.ctypes.data, x.data_ptr())
        if w.project_in is not None:
            x = w.project_in.linear(x)
        return x if w.positions is None else x + w.positions[torch.from_numpy(batch.positions)]

    def run_layers(self, x: torch.Tensor, batch: KernelPass, first: int, stop: int) -> torch.Tensor:
        """See `Decoder.run_layers`; works in place."""
        self._library.layers(self._pool, self._model, *self._over(x, batch, first, stop))
        if self._failure is not None:
            raise self._failure
        return x

    def _gather(self, address: int, count: int, width: int) -> int | None:
        """Called by the kernels for the columns of all ranks; the GIL is held. None: it failed."""
        gather = self.eager.gather
        if self._failure is not None or gather is None:
            return None
        try:
            memory = (ctypes.c_float * (count * width)).from_address(address)
            self._gathered = gather(torch.frombuffer(memory, dtype=torch.float32).view(count, -1))
            return self._gathered.data_ptr()
        except BaseException as exc:  # a border: raised again once the kernel is back
            self._failure = exc
            return None

    def project_kv(
        self, x: torch.Tensor, batch: KernelPass, first: int, stop: int, depth: int
    ) -> None:
        """See `Decoder.project_kv`."""
        x = x.contiguous()
        self._library.project_kv(
            self._pool, self._model, self._kv_maps[depth], *self._over(x, batch, first, stop)
        )

    def _over(
        self, x: torch.Tensor, batch: KernelPass, first: int, stop: int
    ) -> tuple[int, int, int, int, int, int, int]:
        """Layers, tokens and scratch memory, as every kernel over layers takes them."""
        count = x.shape[0]
        return (
            first,
            stop,
            count,
            x.data_ptr(),
            batch.rows.ctypes.data,
            batch.positions.ctypes.data,
            self._scratch_for(count),
        )

    def logits(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        """See `Decoder.logits`."""
        out = torch.empty(x.shape[0], self.config.vocab_size)
        self._run_head(x, depth, out, None, None)
        return out

    def best(self, x: torch.Tensor, depth: int) -> list[int]:
        """See `Decoder.best`."""
        best = np.empty(x.shape[0], dtype=np.int64)
        logits = torch.empty(x.shape[0], self.config.vocab_size)
        self._run_head(x, depth, logits, best.ctypes.data, None)
        tokens: list[int] = _marked(best, logits).tolist()
        return tokens

    def candidates(self, x: torch.Tensor, depth: int) -> Candidates:
        """See `Decoder.candidates`."""
        logits = torch.empty(x.shape[0], self.config.vocab_size)
        best = np.empty(x.shape[0], dtype=np.int64)
        probs = np.empty((x.shape[0], 2), dtype=np.float32)
        self._run_head(x, depth, logits, best.ctypes.data, probs.ctypes.data)
        return Candidates(logits, _marked(best, logits), probs)

    def _run_head(
        self, x: torch.Tensor, depth: int, logits: torch.Tensor, best: int | None, probs: int | None
    ) -> None:
        x = x.contiguous()
        head, hidden = self._heads[depth], self.config.hidden_size
        needed = x.shape[0] * (2 * hidden + max(hidden, head.embed) + 2 * head.mlp_width)
        if self._head_scratch.numel() < needed:
            self._head_scratch = torch.empty(needed)
        self._library.head(
            self._pool,
            self._model,
            head,
            x.shape[0],
            x.data_ptr(),
            self._head_scratch.data_ptr(),
            logits.data_ptr(),
            best,
            probs,
        )

    @property
    def can_draft(self) -> bool:
        """Whether `draft` is there: every part of a pass over the first segment is a kernel."""
        return self.eager.weights.project_in is None and self.eager.gather is None

    def draft(
        self,
        depth: int,
        rows: Ints,
        positions: Ints,
        token_ids: Sequence[int],
        states: torch.Tensor,
        places: Ints,
        plan: DraftPlan,
        exits: ExitSpec,
    ) -> DraftedRows:
        """Draft by a plan with the exit behind the first `depth` layers; greedy.

        Args:
            rows, positions: int64 [n], of each row's newest draft.
            token_ids: Those drafts.
            states: [num_states, hidden] to which hidden states at the exit are written.
            places: int64 [n]: where a row's first goes, the others behind it.

        Raises:
            IndexError: A token, position or place is beyond what there is, or the plan is of other
                rows.
        """
        c, count, most = self.config, len(rows), max(plan.rooms)
        if not len(plan.rooms) == len(plan.survivals) == len(token_ids) == count:
            raise IndexError(f"{len(plan.rooms)} rooms do not fit {count} rows")
        if len(plan.chances) != len(plan.edges) + 1:
            raise IndexError(f"{len(plan.chances)} chances do not fit {len(plan.edges)} edges")
        rooms = np.array(plan.rooms, dtype=np.int64)
        self._check_draft(rows, positions + rooms, token_ids, places + rooms, len(states))
        needed_s = np.array(plan.needed_s, dtype=np.float64)
        if needed_s.shape[0] < most or needed_s.shape[1] != count + 1:
            raise IndexError(f"needed_s {needed_s.shape} is not [{most}, {count + 1}]")
        tokens = np.empty((count, 1 + most), dtype=np.int64)
        tokens[:, 0] = token_ids
        confidences = np.empty((count, most), dtype=np.float32)
        num_run = np.zeros(count, dtype=np.int64)
        survivals = np.array(plan.survivals, dtype=np.float64)
        ends = np.array([*plan.ends], dtype=np.int64)
        edges = np.array([exits.raw(depth, edge) for edge in plan.edges])
        chances = np.array(plan.chances, dtype=np.float64)
        into = states.data_ptr() + places * (c.hidden_size * states.element_size())
        needed = self._library.draft_scratch(self._model, self._heads[depth], count)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        learned = self.eager.weights.positions
        self._library.draft(
            self._pool,
            self._model,
            self._embed,
            None if learned is None else learned.data_ptr(),
            depth,
            self._heads[depth],
            CDraft(
                count=count,
                most=most,
                rows=rows.ctypes.data,
                positions=positions.ctypes.data,
                rooms=rooms.ctypes.data,
                survivals=survivals.ctypes.data,
                tokens=tokens.ctypes.data,
                confidences=confidences.ctypes.data,
                num_run=num_run.ctypes.data,
                states=into.ctypes.data,
                num_ends=len(ends),
                ends=ends.ctypes.data,
                num_edges=len(edges),
                edges=edges.ctypes.data,
                chances=chances.ctypes.data,
                least=plan.least,
                token_s=plan.token_s,
                needed_s=needed_s.ctypes.data,
                margin=exits.criterion == "margin",
            ),
            self._scratch.data_ptr(),
        )
        return DraftedRows(num_run, tokens, confidences)

    def _check_draft(
        self, rows: Ints, stops: Ints, token_ids: Sequence[int], ends: Ints, num_states: int
    ) -> None:
        """Raises: IndexError: The kernel would read or write beyond what there is."""
        # By Python: numpy takes some microseconds for each of a few numbers.
        cache, vocab = self.eager.cache, self.config.vocab_size
        some, until = rows.tolist(), stops.tolist()
        if not 0 <= min(token_ids) <= max(token_ids) < vocab:
            raise IndexError(f"token ids must lie in 0..{vocab - 1}, the vocabulary")
        if not 0 <= min(some) <= max(some) < cache.num_rows or max(until) > cache.capacity:
            raise IndexError(
                f"drafts in rows {some} up to positions {until} are beyond {cache.num_rows} rows "
                f"of {cache.capacity} positions"
            )
        if max(ends.tolist()) > num_states:
            raise IndexError(f"{num_states} hidden states have no room for {max(ends.tolist())}")

    def _scratch_for(self, num_tokens: int) -> int:
        """Address of the layers' scratch memory, grown to what a pass needs."""
        needed = self._library.scratch(self._model, num_tokens)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        return self._scratch.data_ptr()


def _layers(eager: Decoder) -> list[CLayer]:
    cache = eager.cache
    adapters: list[LayerAdapters | None] = [*eager.weights.adapters] or [None] * eager.num_layers
    return [
        CLayer(
            CNorm.of(w.attn_norm),
            CLinear.of(w.qkv),
            CLinear.of(w.out),
            CNorm.of(w.mlp_norm),
            CLinear.of(w.up),
            CLinear.of(w.down),
            pointer(w.q_norm),
            pointer(w.k_norm),
            pointer(keys),
            pointer(values),
            window,
            *_loras(of_layer),
        )
        for w, keys, values, window, of_layer in zip(
            eager.weights.layers,
            cache.keys,
            cache.values,
            eager.config.windows,
            adapters,
            strict=False,
        )
    ]


def _loras(adapters: LayerAdapters | None) -> list[ctypes.Array[CLowRank] | None]:
    """Of the projections qkv, out, up and down."""
    if adapters is None:
        return [None] * 4
    return [
        (CLowRank * len(loras))(*map(CLowRank.of, loras))
        for loras in (adapters.qkv, adapters.out, adapters.up, adapters.down)
    ]


def _model(eager: Decoder, layers: ctypes.Array[CLayer]) -> CModel:
    c = eager.config
    return CModel(
        hidden=c.hidden_size,
        heads=c.num_heads,
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        ffn=c.ffn_size,
        capacity=eager.cache.num_blocks * KV_BLOCK,
        layer_norm=c.norm == "layer",
        activation=_ACTIVATIONS[c.activation],
        gated=c.gated,
        pre_norm=c.pre_norm,
        norm_eps=c.norm_eps,
        cos=pointer(eager.cos),
        sin=pointer(eager.sin),
        layers=layers,
        depths=None if eager.depths is None else eager.depths.data_ptr(),
        adapter_of=None if eager.adapter_of is None else eager.adapter_of.ctypes.data,
        max_rank=max(
            (
                lora.down.shape[0]
                for of_layer in eager.weights.adapters
                for loras in (of_layer.qkv, of_layer.out, of_layer.up, of_layer.down)
                for lora in loras
                if lora is not None
            ),
            default=0,
        ),
        ranks=c.ranks,
    )


def _head(eager: Decoder, head: Head) -> CHead:
    mlp = head.mlp
    return CHead(
        has_norm=head.norm is not None,
        embed=head.weight.shape[1],
        vocab=eager.config.vocab_size,
        mlp_width=0 if mlp is None else mlp.down.weight.shape[1],
        mlp_norm=CNorm() if mlp is None else CNorm.of(mlp.norm),
        mlp_up=CLinear() if mlp is None else CLinear.of(mlp.up),
        mlp_down=CLinear() if mlp is None else CLinear.of(mlp.down),
        norm=CNorm.of(head.norm),
        project=CMatrix.of(head.project),
        weight=CMatrix.of(head.weight),
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """What an engine that starts knows of its kernels.

    Attributes:
        library: The engine has them from its first pass on.
        in_background: They have to be compiled first.
    """

    library: KernelLibrary | None = None
    in_background: bool = False


def find_kernels(spec: EngineSpec) -> Kernels:
    """Look for an earlier run's library in the cache; `wait`, or large weights, compile it now.

    Where nothing can be compiled the engine stays eager, and the log says why, once.

    Raises:
        ConfigError: The cache is not safe to load code from.
    """
    if spec.compile == "off":
        return Kernels()
    if spec.dtype != "float32":
        logger.info("kernels are float32 only; %s runs eagerly", spec.dtype)
        return Kernels()
    try:
        path = cached_library(spec.cache_dir)
        if path is None and spec.compile == "auto":
            if weight_bytes(spec.checkpoint, 4, matrices=4) <= _BACKGROUND_BYTES:
                return Kernels(in_background=True)
        return Kernels(_loaded(path or build_library(spec.cache_dir)))
    except BuildUnavailable as exc:
        logger.warning("the engine stays eager: %s", exc)
        return Kernels()


def _loaded(path: Path) -> KernelLibrary:
    """Load a library. Raises: BuildUnavailable when it is none for this machine."""
    try:
        return KernelLibrary(path)
    except (OSError, AttributeError) as exc:
        raise BuildUnavailable(f"{path} cannot be loaded: {exc}") from exc


class KernelSwap:
    """Prepares a `CompiledDecoder` for an eager one, in time or in the background.

    What compiles in the background reads the weights again when it is done, in their stored forms:
    until then plain torch computes, which wants them written out in float32. A form that was asked
    for is there from the beginning.
    """

    def __init__(self, spec: EngineSpec, eager: Decoder, kernels: Kernels) -> None:
        self._ready: CompiledDecoder | None = None
        self._eager = eager
        self._has_moved = False
        self._spec = spec
        if kernels.library is not None:
            self._finish(kernels.library, eager)
        elif kernels.in_background:
            threading.Thread(target=self._build, name="kernel-build", daemon=True).start()

    def take(self) -> CompiledDecoder | None:
        """Return the compiled decoder once it is there; never blocks."""
        ready = self._ready
        if ready is not None and self._has_moved:
            ready = self._ready = ready.over(self._eager)  # some microseconds a layer
            self._has_moved = False
        return ready

    def follow(self, eager: Decoder) -> None:
        """Prepare for another decoder instead; on the thread that calls `take`."""
        self._eager = eager
        self._has_moved = True

    def _build(self) -> None:
        eager = self._eager
        try:
            library = _loaded(build_library(self._spec.cache_dir))
            weights = eager.weights
            if weights.form == "dtype":
                weights = load_spec(self._spec, eager.config, has_kernels=True)
            self._finish(library, eager.over(weights, eager.cache))
        except Exception as exc:  # of the compiler, the files, or want of memory
            logger.warning("the engine stays eager: %s", str(exc) or repr(exc))

    def _finish(self, library: KernelLibrary, eager: Decoder) -> None:
        try:
            self._ready = CompiledDecoder(library, eager, _Workers(library, self._spec.threads))
        except BuildUnavailable as exc:
            logger.warning("the engine stays eager: %s", exc)


def _marked(best: Ints, logits: torch.Tensor) -> Ints:
    """The ids of the largest logits, marked as `best_of` does where that is no finite number."""
    largest = logits.numpy()[np.arange(len(best)), best]
    best[~np.isfinite(largest)] = logits.shape[1]
    return best
