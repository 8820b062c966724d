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
from torch.nn import functional as F

from quadriga.engine.kernels.build import BuildUnavailable, build_library, cached_library
from quadriga.engine.kernels.library import (
    CAffine,
    CHead,
    CKVMap,
    CLayer,
    CModel,
    KernelLibrary,
    pointer,
)
from quadriga.engine.kv_cache import KV_BLOCK
from quadriga.engine.models.decoder import Candidates, Decoder
from quadriga.engine.models.layers import Span
from quadriga.engine.weights import Head
from quadriga.engine_spec import EngineSpec
from quadriga.errors import ConfigError

logger = logging.getLogger(__name__)

_ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}


@dataclass(slots=True)
class KernelPass:
    """One pass over T tokens, as the kernels want it.

    Attributes:
        rows, positions: int64 [T].
    """

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


class _Workers:
    """The threads of one engine's kernels; they end with the last decoder that uses them."""

    def __init__(self, library: KernelLibrary, threads: int) -> None:
        self.pool = library.pool_new(threads)
        if not self.pool:
            raise BuildUnavailable(f"{threads} threads could not be started")
        weakref.finalize(self, library.pool_free, self.pool)


class CompiledDecoder:
    """`Decoder`'s operations on the kernels; float32 on CPUs.

    Results of a token depend on nothing but its own row: not on the batch, the chunking or the
    number of threads, to the bit.
    """

    def __init__(self, library: KernelLibrary, eager: Decoder, workers: _Workers) -> None:
        self.config = eager.config
        self._eager = eager  # owns every tensor that the structures below point at
        self._library = library
        self._workers = workers
        self._pool = workers.pool
        self._layers = (CLayer * eager.num_layers)(*_layers(eager))
        self._model = _model(eager, self._layers)
        self._kv_maps = {
            depth: (CKVMap * len(maps))(
                *(CKVMap(CAffine.of(m.norm), CAffine.of(m.kv)) for m in maps)
            )
            for depth, maps in eager.weights.kv_maps.items()
        }
        self._heads = {depth: _head(eager, h) for depth, h in eager.weights.heads.items()}
        self._scratch = torch.empty(0)
        self._head_scratch = torch.empty(0)

    @property
    def eager(self) -> Decoder:
        """What it stands for."""
        return self._eager

    def over(self, eager: Decoder) -> CompiledDecoder:
        """The same kernels and threads over another decoder; only one of both may run at a time."""
        return CompiledDecoder(self._library, eager, self._workers)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def reads_depths(self) -> bool:
        return self._eager.depths is not None

    def plan_tokens(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> KernelPass:
        """See `Decoder.plan_tokens`."""
        return KernelPass(rows, positions)

    def plan(self, spans: Sequence[Span]) -> KernelPass:
        """See `Decoder.plan`."""
        if all(s.end - s.begin == 1 for s in spans):
            return KernelPass(
                np.array([s.row for s in spans], dtype=np.int64),
                np.array([s.start for s in spans], dtype=np.int64),
            )
        return KernelPass(
            np.repeat([s.row for s in spans], [s.end - s.begin for s in spans]).astype(np.int64),
            np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in spans]),
        )

    def embed(self, token_ids: Sequence[int], batch: KernelPass) -> torch.Tensor:
        """See `Decoder.embed`."""
        w = self._eager.weights
        x = w.embed.index_select(0, torch.from_numpy(np.array(token_ids, dtype=np.int64)))
        if w.project_in is not None:
            x = F.linear(x, w.project_in)
        return x if w.positions is None else x + w.positions[torch.from_numpy(batch.positions)]

    def run_layers(self, x: torch.Tensor, batch: KernelPass, first: int, stop: int) -> torch.Tensor:
        """See `Decoder.run_layers`; works in place."""
        self._library.layers(self._pool, self._model, *self._over(x, batch, first, stop))
        return x

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
        tokens: list[int] = best.tolist()
        return tokens

    def candidates(self, x: torch.Tensor, depth: int) -> Candidates:
        """See `Decoder.candidates`."""
        logits = torch.empty(x.shape[0], self.config.vocab_size)
        best = np.empty(x.shape[0], dtype=np.int64)
        probs = np.empty((x.shape[0], 2), dtype=np.float32)
        self._run_head(x, depth, logits, best.ctypes.data, probs.ctypes.data)
        return Candidates(logits, best, probs)

    def _run_head(
        self, x: torch.Tensor, depth: int, logits: torch.Tensor, best: int | None, probs: int | None
    ) -> None:
        x = x.contiguous()
        needed = x.shape[0] * (self.config.hidden_size + self.config.embed_size)
        if self._head_scratch.numel() < needed:
            self._head_scratch = torch.empty(needed)
        self._library.head(
            self._pool,
            self._model,
            self._heads[depth],
            x.shape[0],
            x.data_ptr(),
            self._head_scratch.data_ptr(),
            logits.data_ptr(),
            best,
            probs,
        )

    def _scratch_for(self, num_tokens: int) -> int:
        """Address of the layers' scratch memory, grown to what a pass needs."""
        needed = self._library.scratch(self._model, num_tokens)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        return self._scratch.data_ptr()


def _layers(eager: Decoder) -> list[CLayer]:
    cache = eager.cache
    return [
        CLayer(
            CAffine.of(w.attn_norm),
            CAffine.of(w.qkv),
            CAffine.of(w.out),
            CAffine.of(w.mlp_norm),
            CAffine.of(w.up),
            CAffine.of(w.down),
            pointer(w.q_norm),
            pointer(w.k_norm),
            pointer(keys),
            pointer(values),
            window,
        )
        for w, keys, values, window in zip(
            eager.weights.layers, cache.keys, cache.values, eager.config.windows, strict=False
        )
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
    )


def _head(eager: Decoder, head: Head) -> CHead:
    return CHead(
        has_norm=head.norm is not None,
        embed=head.weight.shape[1],
        vocab=eager.config.vocab_size,
        norm=CAffine.of(head.norm),
        project=pointer(head.project),
        weight=pointer(head.weight),
    )


class KernelSwap:
    """Prepares a `CompiledDecoder` for an eager one, in time or in the background.

    A library that an earlier run left in the cache is used at once. Otherwise `auto` compiles in
    the background, `wait` at once; where nothing can be compiled the engine stays eager, and the
    log says why, once.
    """

    def __init__(self, spec: EngineSpec, eager: Decoder) -> None:
        self._ready: CompiledDecoder | None = None
        self._eager = eager
        self._spec = spec
        self._thread: threading.Thread | None = None
        if spec.compile == "off":
            return
        if spec.dtype != "float32":
            logger.info("kernels are float32 only; %s runs eagerly", spec.dtype)
            return
        try:
            path = cached_library(spec.cache_dir)
        except BuildUnavailable as exc:
            logger.warning("the engine stays eager: %s", exc)
            return
        if path is not None:
            self._load(path)
        elif spec.compile == "wait":
            self._build()
        else:
            self._thread = threading.Thread(target=self._build, name="kernel-build", daemon=True)
            self._thread.start()

    def take(self) -> CompiledDecoder | None:
        """Return the compiled decoder once it is there; never blocks."""
        ready = self._ready
        if ready is not None and ready.eager is not self._eager:
            ready = self._ready = ready.over(self._eager)  # some microseconds a layer
        return ready

    def follow(self, eager: Decoder) -> None:
        """Prepare for another decoder instead; on the thread that calls `take`."""
        self._eager = eager

    def wait(self, timeout_s: float) -> None:
        """Wait for a build under way, if there is one."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _build(self) -> None:
        try:
            path = build_library(self._spec.cache_dir)
        except (BuildUnavailable, ConfigError) as exc:
            logger.warning("the engine stays eager: %s", exc)
            return
        self._load(path)

    def _load(self, path: Path) -> None:
        try:
            library = KernelLibrary(path)
            workers = _Workers(library, self._spec.threads)
            self._ready = CompiledDecoder(library, self._eager, workers)
        except OSError as exc:
            logger.warning("the engine stays eager: %s cannot be loaded: %s", path, exc)
        except BuildUnavailable as exc:
            logger.warning("the engine stays eager: %s", exc)
