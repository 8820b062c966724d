"""The GPU's engine on a CPU: pages, page tables and recorded passes, without the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from quadriga.checkpoint.model_config import read_model_config
from quadriga.config.engine_spec import EngineSpec
from quadriga.engine.cuda.decoder import PagedDecoder
from quadriga.engine.cuda.graphs import DecodeGraphs, GraphRecorder
from quadriga.engine.cuda.loading import load_paged
from quadriga.engine.cuda.paged_cache import PagedKVCache
from quadriga.engine.model_runner import NativeRunner

PAGE_TOKENS = 16
"""So small that short test sequences cross many pages."""


def load_on_pages(
    spec: EngineSpec,
    recorder: GraphRecorder | None = None,
    *,
    page_tokens: int = PAGE_TOKENS,
    device: torch.device | None = None,
) -> NativeRunner:
    """A runner as on a GPU, by default on the CPU."""
    config = read_model_config(spec.checkpoint.path)
    device = device or torch.device("cpu")
    engine = load_paged(spec, config, device, recorder, page_tokens)
    return NativeRunner(engine)


def loader(
    made: list[NativeRunner], make_recorder: Callable[[], GraphRecorder] | None = None
) -> Callable[[EngineSpec], NativeRunner]:
    """A stand-in for `NativeRunner.load`; notes what it made."""

    def load(spec: EngineSpec) -> NativeRunner:
        recorder = None if make_recorder is None else make_recorder()
        runner = load_on_pages(replace(spec, compile="off"), recorder)
        made.append(runner)
        return runner

    return load


def cache_of(runner: NativeRunner) -> PagedKVCache:
    """The runner's cache."""
    cache = runner._cache
    assert isinstance(cache, PagedKVCache)
    return cache


def graphs_of(runner: NativeRunner) -> DecodeGraphs:
    """The runner's graphs."""
    decoder = runner._decoder
    assert isinstance(decoder, PagedDecoder) and decoder.graphs is not None
    return decoder.graphs


def assert_no_page_is_held(runner: NativeRunner) -> None:
    """Every page is free: no row leaks any."""
    pages = cache_of(runner).pages
    pages.check()
    assert pages.num_free == pages.num_pages
