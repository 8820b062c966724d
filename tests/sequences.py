"""Sequences, rows and decode loops, where most of what they are made of does not matter."""

from __future__ import annotations

from typing import Any

from quadriga.clock import Clock
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.interfaces import ModelRunner
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.prefill_loop import PrefillLoop
from quadriga.scheduling.prefill_queue import PrefillQueue
from quadriga.scheduling.slots import SlotTable


def make_sequence(
    name: str, prompt_ids: list[int], sampling: SamplingParams, **fields: Any
) -> SequenceState:
    """The only sequence of its request, which nobody stops waiting for."""
    usual = {
        "request_id": name,
        "model": "m",
        "ingress_id": "i",
        "arrival_unix_s": 0.0,
        "deadline_unix_s": 1e18,
    }
    return SequenceState(name, prompt_ids=prompt_ids, sampling=sampling, **usual | fields)


def make_slots(num_rows: int, row_tokens: int, kv_tokens: int, **more: Any) -> SlotTable:
    """The table of rows of one length."""
    return SlotTable(
        num_rows=num_rows, row_capacity_tokens=row_tokens, kv_capacity_tokens=kv_tokens, **more
    )


def make_decode_loop(
    runner: ModelRunner, slots: SlotTable, clock: Clock, **more: Any
) -> DecodeLoop:
    """A loop that no token ends, unless `eos_token_ids` are named."""
    return DecodeLoop(runner=runner, slots=slots, clock=clock, **{"eos_token_ids": ()} | more)


def make_prefill_loop(
    runner: ModelRunner, slots: SlotTable, clock: Clock, chunk_tokens: int, **more: Any
) -> PrefillLoop:
    """A loop that no token ends, and whose queue is never full, unless others are named."""
    queue = PrefillQueue(max_sequences=1000, max_tokens=10**6, max_age_s=1.0)
    usual = {"queue": queue, "eos_token_ids": (), "layer_groups": 2}
    return PrefillLoop(
        runner=runner, slots=slots, clock=clock, chunk_tokens=chunk_tokens, **usual | more
    )
