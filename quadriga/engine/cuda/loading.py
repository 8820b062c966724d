"""Put an engine on a device: weights, as much KV as fits, attention, graphs."""

from __future__ import annotations

import importlib.util
import logging
import math
from dataclasses import replace
from functools import partial

import torch

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.config.kv_memory import fitting_length, least_length
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.engine.cuda.attention import choose_attention
from quadriga.engine.cuda.decoder import PagedDecoder
from quadriga.engine.cuda.folded_maps import folded_maps
from quadriga.engine.cuda.graphs import CudaRecorder, DecodeGraphs, GraphRecorder
from quadriga.engine.cuda.operations import SAYS, Operations
from quadriga.engine.cuda.paged_attention import PagedAttention
from quadriga.engine.cuda.paged_cache import PagedKVCache
from quadriga.engine.cuda.paged_states import PagedStates
from quadriga.engine.cuda.pages import PAGE_TOKENS, pages_per_layer
from quadriga.engine.cuda.sampling import SamplingTensors
from quadriga.engine.early_exit.skipped_kv import SkippedKVStore
from quadriga.engine.loaded_model import EngineParts
from quadriga.engine.models.layers import TokenSpan
from quadriga.engine.sampler import RowSampler, sample
from quadriga.engine.weights.checkpoint_weights import Linear, ModelWeights
from quadriga.engine.weights.loading import load_spec
from quadriga.engine.weights.matrix import Form, Matrix
from quadriga.errors import ConfigError
from quadriga.interfaces import MAX_DRAFTED
from quadriga.observability.load_progress import LOADING

logger = logging.getLogger(__name__)


def find_gpu() -> torch.device:
    """The GPU of this process. Raises: ConfigError: There is none."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "engine.device: 'cuda' was asked for but torch sees no GPU; use 'cpu'",
            param="engine.device",
        )
    return torch.device("cuda", torch.cuda.current_device())


def load_paged(
    spec: EngineSpec,
    config: ModelConfig,
    device: torch.device,
    recorder: GraphRecorder | None = None,
    page_tokens: int = PAGE_TOKENS,
    weights: ModelWeights | None = None,
) -> EngineParts:
    """Load weights and reserve memory.

    Args:
        device: Any; on one that is no GPU `spec.gpu_memory_share` means nothing.
        recorder: What records decode passes; None: CUDA graphs on GPUs, if `spec.compile` wants
            them and attention can take part, else nothing.
        weights: Of the spec's checkpoint, where the caller has them.

    Raises:
        ConfigError: Weights or KV do not fit, or the attention asked for cannot be had.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    make_recorder = None
    if device.type == "cuda" and spec.compile != "off":
        make_recorder = partial(CudaRecorder, device)
    attention = choose_attention(spec.attention, config, dtype, device, make_recorder)
    if weights is None:
        weights = _load_weights(spec, config, device)
    folded = folded_maps(weights, config)  # before memory is counted
    operations = operations_for(config, device)
    if device.type == "cuda":
        LOADING.begin("measures the memory that passes need")
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            dummy_step(spec, config, weights, attention, operations)
        except torch.OutOfMemoryError as exc:
            raise ConfigError(
                f"decode.max_slots: passes of {spec.num_rows} rows and {spec.pass_tokens} prompt "
                f"tokens do not fit beside {before} bytes of weights; lower it or "
                "prefill.chunk_tokens, load less depth, or use a larger GPU",
                param="decode.max_slots",
            ) from exc
        needed = torch.cuda.max_memory_allocated(device) - before
        # The logits that graphs leave, beside what is needed while a pass runs.
        spec = _fit(spec, config, device, needed + 4 * spec.num_rows * config.vocab_size)
    ends = (*spec.exits.layers, spec.depth)
    cache = PagedKVCache(
        segment_ends=ends,
        num_rows=spec.num_rows,
        num_kv_heads=config.num_kv_heads,
        capacity=spec.row_capacity_tokens,
        head_dim=config.head_dim,
        dtype=dtype,
        budget_tokens=spec.kv_capacity_tokens,
        device=device,
        host_copies=spec.host_copies,
        page_tokens=page_tokens,
    )
    skipped = None
    # At its first exit alone, too: sequences come and go that have more segments elsewhere.
    if spec.can_exit and (spec.exits.layers or spec.exit_plan.layers):
        states = PagedStates(
            num_rows=spec.num_rows,
            capacity=spec.row_capacity_tokens,
            hidden_size=config.hidden_size,
            budget_tokens=spec.kv_capacity_tokens if _keeps_states(spec) else 0,
            dtype=dtype,
            device=device,
            page_tokens=page_tokens,
        )
        skipped = SkippedKVStore(
            spec.skipped_kv, ends, cache, states, replay_newest=spec.replay_newest
        )
    decoder = PagedDecoder(config, weights, cache, attention, operations, folded)
    if recorder is None and make_recorder is not None:
        if attention.in_graphs:
            recorder = make_recorder()
        else:
            logger.info("no CUDA graphs: %s attention would read whole rows", attention.name)
    if recorder is not None:
        decoder.graphs = DecodeGraphs(
            decoder.run_each,
            recorder,
            look=decoder.look,
            segment_ends=ends,
            max_rows=spec.num_rows,
            max_tokens=most_tokens(spec),
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            dtype=dtype,
            device=device,
            capacity=spec.row_capacity_tokens,
            padding_row=cache.padding_row,
        )
        if spec.compile != "off":
            LOADING.begin("records CUDA graphs")
            with torch.inference_mode():
                decoder.graphs.record_all()
    return EngineParts(spec, decoder, cache, skipped)


def _load_weights(spec: EngineSpec, config: ModelConfig, device: torch.device) -> ModelWeights:
    try:
        return load_spec(spec, config, device=device)
    except torch.OutOfMemoryError as exc:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"model: {spec.checkpoint.id} at depth {spec.depth} in {spec.dtype} does not fit: of "
            f"the GPU's {total} bytes {free} were free when {torch.cuda.memory_allocated(device)} "
            "were loaded; load less depth, or use a larger GPU",
            param="model",
        ) from exc


def operations_for(config: ModelConfig, device: torch.device) -> Operations:
    """With kernels where there are any for this device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from quadriga.engine.cuda import triton_operations

        if triton_operations.fits(config, device):
            made = triton_operations.TritonOperations(config)
            reason = _failed(made, device)
            if reason is None:
                return made
            logger.warning("operations of layers run one by one, slower: %s", reason)
    return Operations(config)


def _failed(operations: Operations, device: torch.device) -> str | None:
    """Why a kernel cannot run here; None where it can."""
    logits = torch.arange(8.0, device=device)[None]
    wide, said = torch.zeros_like(logits), torch.zeros(1, SAYS, device=device)
    same = Linear(Matrix(Form.FLOAT32, torch.eye(8, device=device)))
    try:
        operations.say(operations.linear(logits, same), wide, said)
        best = int(said[0, 0])
    # Whatever a compiler raises that is missing, or does not know this GPU.
    except Exception as exc:
        return f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
    return None if best == 7 else f"a kernel answers {best} instead of 7"


def most_tokens(spec: EngineSpec) -> int:
    """Of a pass through segments behind the first: rows with what they skipped, or drafted."""
    if not spec.exits.layers or not spec.can_exit:
        return spec.num_rows
    return spec.num_rows * (1 + max(spec.replay_newest, MAX_DRAFTED))


@torch.inference_mode()
def dummy_step(
    spec: EngineSpec,
    config: ModelConfig,
    weights: ModelWeights,
    attention: PagedAttention,
    operations: Operations,
) -> None:
    """Compute the largest passes that will come, for the memory they take while they run.

    The most tokens at once, and a token drawn with top-p in every row.
    """
    tokens, dtype, device = max(spec.pass_tokens, most_tokens(spec)), weights.dtype, weights.device
    longest = min(tokens, spec.row_capacity_tokens)  # a table of positions ends there
    spans = [
        TokenSpan(row, begin, min(begin + longest, tokens), 0)
        for row, begin in enumerate(range(0, tokens, longest))
    ]
    cache = PagedKVCache(
        segment_ends=(spec.depth,),
        num_rows=len(spans),
        num_kv_heads=config.num_kv_heads,
        capacity=longest,
        head_dim=config.head_dim,
        dtype=dtype,
        budget_tokens=tokens,
        device=device,
    )
    decoder = PagedDecoder(config, weights, cache, attention, operations)
    batch = decoder.plan(spans)
    decoder.run_layers(decoder.embed([0] * tokens, batch), batch, 0, spec.depth)
    x = torch.zeros(spec.num_rows, config.hidden_size, dtype=dtype, device=device)
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.5)
    state = SequenceState("", "", "", [0], params, "", 0.0, math.inf)
    samplers = [RowSampler(state, config.vocab_size, ())] * spec.num_rows
    samplers[0].place = SamplingTensors(1, device).attach(0, params)
    sample(decoder.logits(x, spec.depth), samplers, spec.depth)


def _keeps_states(spec: EngineSpec) -> bool:
    is_made_of_states = spec.skipped_kv not in ("alias", "copy")
    return bool(spec.exits.layers) and spec.can_exit and is_made_of_states


def bytes_per_token(spec: EngineSpec, config: ModelConfig) -> int:
    """KV of one token in every layer, and the hidden state kept for those it skips."""
    values = spec.depth * 2 * config.kv_size
    return DTYPE_BYTES[spec.dtype] * (values + (config.hidden_size if _keeps_states(spec) else 0))


def tokens_that_fit(
    available_bytes: int, token_bytes: int, num_rows: int, row_capacity_tokens: int
) -> int:
    """The most tokens over all rows whose pages fit into memory; one page is for padding."""
    num_pages = available_bytes // (token_bytes * PAGE_TOKENS) - 1
    if num_pages >= num_rows * -(-row_capacity_tokens // PAGE_TOKENS):
        return num_rows * row_capacity_tokens
    return max(0, num_pages - num_rows) * PAGE_TOKENS


def _fit(
    spec: EngineSpec, config: ModelConfig, device: torch.device, passes_bytes: int = 0
) -> EngineSpec:
    """The spec with the capacity that fits beside the weights, which are loaded.

    Args:
        passes_bytes: Must stay free for what passes need while they run.

    Raises:
        ConfigError: Not even one sequence fits, or not what was asked for.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    free = max(0, free - passes_bytes)
    token_bytes = bytes_per_token(spec, config)
    mine = torch.cuda.memory_reserved(device)
    if spec.gpu_memory_share is None:
        pages = pages_per_layer(spec.kv_capacity_tokens, spec.num_rows, spec.row_capacity_tokens)
        needed = (pages + 1) * PAGE_TOKENS * token_bytes
        if needed > free:
            raise ConfigError(
                f"engine.kv_memory_bytes: {spec.kv_capacity_tokens} tokens of {spec.checkpoint.id} "
                f"take {needed} bytes in pages of {PAGE_TOKENS} tokens over {spec.num_rows} rows, "
                f"and {free} of the GPU's {total} are free beside {passes_bytes} for passes; "
                "lower it, or leave it to 'auto'",
                param="engine.kv_memory_bytes",
            )
        return replace(spec, usable_bytes=mine + needed)
    available = min(free, int(spec.gpu_memory_share * total) - mine)
    fitting = tokens_that_fit(available, token_bytes, spec.num_rows, spec.row_capacity_tokens)
    length = least = spec.row_capacity_tokens
    if spec.fits_length:
        length, least = fitting_length(length, fitting, spec.runner), least_length(length)
    if fitting < least:
        raise ConfigError(
            f"engine.gpu_memory_share: {spec.gpu_memory_share} of the GPU's {total} bytes, less "
            f"{mine} of weights, and {free} that are free leave {max(0, available)} for KV; "
            f"{spec.num_rows} rows of {spec.checkpoint.id} hold {fitting} tokens in that, less "
            f"than one sequence of {least} ({token_bytes} bytes a token); "
            "lower engine.max_model_len, the number of rows or the depth",
            param="engine.gpu_memory_share",
        )
    capacity = min(fitting, spec.num_rows * length)
    logger.info("KV: %d tokens, %d bytes each", capacity, token_bytes)
    return replace(
        spec, row_capacity_tokens=length, kv_capacity_tokens=capacity, usable_bytes=mine + available
    )
