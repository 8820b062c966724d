"""Start the ranks of an engine: rank 0 opens a meeting point, all load their parts and meet."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import torch

from quadriga.checkpoint.folder import on_this_node
from quadriga.checkpoint.model_config import ModelConfig, read_model_config
from quadriga.config.engine_spec import EngineSpec
from quadriga.engine.loaded_model import EngineParts, skips_of
from quadriga.engine.tensor_parallel.leader import ParallelCache, ParallelDecoder
from quadriga.engine.tensor_parallel.part import Part
from quadriga.engine.tensor_parallel.ranks import PULSE_S, Ranks
from quadriga.engine.weights.shards import Shard
from quadriga.errors import ConfigError
from quadriga.observability.load_progress import LOADING
from quadriga.process_groups import host_store, join_store, route_to

logger = logging.getLogger(__name__)

NUM_LOADED, ALL_LOADED, LEADER_LOADED = "num-loaded", "all-loaded", "leader-loaded"
"""Keys: how many ranks behind the first are ready; that all are, or, in words, why one is not; that
rank 0 need not be waited for."""
LOOK_INTERVAL_S = 0.1
LOAD_TIMEOUT_S = 600.0
"""For all other ranks together to have their parts of the weights, once rank 0 has its own."""


class RankStarter(Protocol):
    """Starts the ranks behind the first one, somewhere; rank 0 ends them."""

    @property
    def host(self) -> str:
        """The address at which they reach rank 0."""

    def start(self, spec: EngineSpec, port: int) -> None:
        """Have `serve_rank(spec, rank, host, port)` run for the ranks 1 … k − 1; does not wait."""

    def lost(self, reason: str) -> None:
        """The ranks are of no more use; called from any thread."""

    def join(self) -> None:
        """The ranks were told to end: wait for those that would not outlive this process."""


class RankThreads:
    """`RankStarter` in this process: for offline generation, and for tests."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, spec: EngineSpec, port: int) -> None:
        """See `RankStarter.start`."""
        for rank in range(1, spec.tensor_parallel):
            thread = threading.Thread(
                target=self._serve, args=(spec, rank, port), name=f"rank-{rank}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _serve(self, spec: EngineSpec, rank: int, port: int) -> None:
        try:
            serve_rank(spec, rank, self.host, port)
        except (RuntimeError, ConfigError) as exc:  # rank 0 says so to who asks it
            logger.info("rank %d is over: %s", rank, exc)
        except Exception:
            logger.exception("rank %d failed", rank)

    def lost(self, reason: str) -> None:
        """Whoever asks rank 0 next learns of it."""

    def join(self) -> None:
        """See `RankStarter.join`: a thread that gloo keeps at the exit would abort the process."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(PULSE_S)


def load_parallel(spec: EngineSpec, config: ModelConfig, starter: RankStarter) -> EngineParts:
    """Start the other ranks, load rank 0's part, and wait until all have theirs.

    Raises:
        ConfigError: A part of the checkpoint or the spec cannot be served.
    """
    size = spec.tensor_parallel
    store, port = host_store(starter.host, LOAD_TIMEOUT_S)
    starter.start(spec, port)
    try:
        part = Part(spec, config, Shard(0, size))
        LOADING.begin(f"waits for the weights of the other {size - 1} ranks")
        try:
            store.wait([ALL_LOADED], timedelta(seconds=LOAD_TIMEOUT_S))
        except RuntimeError as exc:
            late = [str(rank) for rank in range(1, size) if not store.check([_code(rank)])]
            raise ConfigError(
                f"engine.tensor_parallel: of {size} ranks {', '.join(late)} did not load "
                f"{spec.checkpoint.id} in {LOAD_TIMEOUT_S:.0f} s",
                param="engine.tensor_parallel",
            ) from exc
        if failure := store.get(ALL_LOADED).decode():
            raise ConfigError(failure, param="model")
    finally:
        store.set(LEADER_LOADED, "")  # the last: nobody meets the others before
    dtype = part.eager.weights.dtype
    codes = [part.decoder.code, *(store.get(_code(rank)).decode() for rank in range(1, size))]
    ranks = part.join(Ranks(store, rank=0, size=size, host=starter.host, dtype=dtype))
    ranks.lost = starter.lost
    cache = ParallelCache(config.num_kv_heads, part, ranks)
    skipped = skips_of(spec, config, cache, dtype)

    def end() -> None:
        ranks.close()
        starter.join()

    return EngineParts(spec, ParallelDecoder(config, part, ranks, codes, end), cache, skipped)


def serve_rank(spec: EngineSpec, rank: int, host: str, port: int) -> None:
    """Be a rank behind the first one, until rank 0 ends it.

    Args:
        host, port: Rank 0's meeting point.

    Raises:
        ConfigError: The checkpoint is not on this node, or cannot be served.
        RuntimeError: Rank 0 or another one died, or fell silent.
    """
    torch.set_num_threads(spec.threads)
    store = join_store(host, port, LOAD_TIMEOUT_S)
    try:
        spec = replace(spec, checkpoint=on_this_node(spec.checkpoint, spec.cache_dir))
        config = read_model_config(spec.checkpoint.path)
        part = Part(spec, config, Shard(rank, spec.tensor_parallel))
    except Exception as exc:  # a border: rank 0 would wait for all of its time
        store.set(ALL_LOADED, f"rank {rank} of {spec.tensor_parallel}: {str(exc) or repr(exc)}")
        raise
    store.set(_code(rank), part.decoder.code)
    if store.add(NUM_LOADED, 1) == spec.tensor_parallel - 1:
        store.set(ALL_LOADED, "")
    while not store.check([LEADER_LOADED]):  # with rank 0 ends its store, which is an error here
        time.sleep(LOOK_INTERVAL_S)  # a meeting allows less time
    part.join(
        Ranks(
            store,
            rank=rank,
            size=spec.tensor_parallel,
            host=route_to(host),
            dtype=part.eager.weights.dtype,
        )
    )
    part.follow()


def _code(rank: int) -> str:
    """Key under which a rank names what it computes with."""
    return f"code-{rank}"
