"""One small step of an attention before it serves: is it right here, and can a graph hold it?

A kernel library may be built for another GPU, and may wait for the device inside a call, which ends
the recording of a graph. Both show here, in milliseconds and before a request, instead of at the
first request or as passes that never become graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.cuda.graphs import GraphRecorder
from quadriga.engine.cuda.paged_attention import PagedAttention, PagedKV, Runs
from quadriga.engine.cuda.pages import PAGE_TOKENS
from quadriga.engine.models.layers import TokenSpan

MakeRecorder = Callable[[], GraphRecorder]

_LENGTHS = (PAGE_TOKENS + 44, 40)
"""Positions of two sequences: one crosses into a second page."""
_SPANS = (TokenSpan(0, 0, 1, PAGE_TOKENS + 43), TokenSpan(1, 1, 41, 0))
"""The first's newest token alone; the second's prompt."""
_FLOAT32_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.05
"""Of values around 1: they tell a wrong kernel, not a rounded one."""


def failed_probe(
    attention: PagedAttention,
    reference: PagedAttention,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    make_recorder: MakeRecorder | None,
) -> str | None:
    """Why an attention cannot be used with this model here; None where it can.

    Args:
        reference: What is right, on the host and in float32.
        make_recorder: The decode step is recorded and replayed, too. A recorder of its own, as one
            that failed may not record again.
    """
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, head = config.num_heads, config.num_kv_heads, config.head_dim
    pools = torch.randn((2, 4, PAGE_TOKENS, kv_heads, head), generator=generator).to(dtype)
    q = torch.randn((_SPANS[-1].end, heads, head), generator=generator).to(dtype)
    table = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32)
    host, longest = torch.device("cpu"), max(_LENGTHS)
    recorder = None
    try:
        recorder = make_recorder() if make_recorder is not None else None
        keys, values = pools.to(device)
        kv = PagedKV(keys, values, table.to(device))
        newest = q[: len(_LENGTHS)].to(device), kv, lengths.to(device)
        got = torch.zeros(len(_LENGTHS), heads * head, dtype=dtype, device=device)

        def step() -> None:
            got.copy_(attention.each(*newest, longest, 0))

        if recorder is None:
            step()
        else:
            replay = recorder.record(step)
            got.zero_()
            replay()
        spans = Runs.of(_SPANS, attention.block_queries, device)
        runs = attention.runs(q.to(device), kv, spans, 0)
        results = got.cpu(), runs.cpu()
    # Whatever a library raises that was built for another GPU, torch or compiler.
    except Exception as exc:
        what = "a decode step could not be computed"
        if recorder is not None:
            what += " and recorded into a CUDA graph"
        return f"{what}: {type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
    finally:
        if recorder is not None:
            recorder.close()
    query, (keys, values) = q.float(), pools.float()
    kv = PagedKV(keys, values, table)
    spans = Runs.of(_SPANS, reference.block_queries, host)
    wanted = (
        reference.each(query[: len(_LENGTHS)], kv, lengths, longest, 0),
        reference.runs(query, kv, spans, 0),
    )
    tolerance = _FLOAT32_TOLERANCE if dtype == torch.float32 else _HALF_TOLERANCE
    for kind, result, right in zip(("decode step", "prompt"), results, wanted, strict=True):
        error = (result.float() - right).abs().max().item()
        if not error <= tolerance:  # NaN is not
            return f"its {kind} is wrong by {error:.3g}, more than {tolerance}"
    return None
