"""Thresholds that fall while a decode replica is under pressure, as far as a request allows it.

A request may name a quality budget: the share of its tokens that may leave below its threshold.
It is spent while memory is nearly full, or while tokens come later than the request asks for, and
not otherwise: tokens that leave earlier make sequences end earlier. Whatever the pressure, no
request goes beyond its budget, and one without a budget never has its threshold lowered.

Source: ours.
"""

from __future__ import annotations

from quadriga.policies.slot_reservation import admitted_tokens
from quadriga.scheduling.decode_batch import DecodeBatch
from quadriga.scheduling.slots import SlotTable

LOWEST_SHARE = 0.5
"""Of its threshold, that a token may leave with where the pressure is greatest."""
LATE_FROM = 0.8
"""Of the time between two tokens that a request asks for: from there on its threshold falls."""


def memory_pressure(slots: SlotTable, num_paused: int) -> float:
    """How near a replica is to pausing sequences: 0 is not at all, 1 is there.

    It begins where promises exceed what newcomers are let in to: sequences have outgrown theirs.
    Memory that is promised at its longest is never short.
    """
    if slots.reservation != "used":
        return 0.0
    if num_paused:
        return 1.0
    capacity = slots.kv_capacity_tokens
    begins = admitted_tokens(capacity, slots.num_rows, slots.row_capacity_tokens)
    over = slots.reserved_tokens - begins
    return min(1.0, over / max(1, capacity - begins)) if over > 0 else 0.0


def gap_pressure(token_time_s: float, gap_s: float) -> float:
    """How near tokens are to coming later than every `gap_s`; 1: they do. 0 seconds: no limit."""
    if gap_s <= 0.0:
        return 0.0
    return min(1.0, max(0.0, (token_time_s / gap_s - LATE_FROM) / (1.0 - LATE_FROM)))


def has_budget_left(budget: float, num_lowered: int, num_output: int) -> bool:
    """Whether the next output token may be one more that leaves below its threshold.

    Args:
        num_lowered: Those so far, of `num_output` tokens.
    """
    return num_lowered + 1 <= budget * (num_output + 1)


def lower_thresholds(batch: DecodeBatch, token_time_s: float) -> None:
    """Set from which confidence the next token of each sequence with a quality budget may leave.

    Args:
        token_time_s: Recent time between two tokens of a sequence.
    """
    of_memory = memory_pressure(batch.slots, batch.num_paused)
    for sequence in batch.decoding:
        exits, state = sequence.state.exits, sequence.state
        if not exits.quality_budget:
            continue
        pressure = max(of_memory, gap_pressure(token_time_s, exits.sla_tbt_s))
        if not has_budget_left(exits.quality_budget, state.num_lowered, len(state.output_ids)):
            pressure = 0.0
        sequence.leaves_from = sequence.min_confidence * (1.0 - (1.0 - LOWEST_SHARE) * pressure)
