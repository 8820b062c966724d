"""Let a sequence in, or say when to come back."""

from __future__ import annotations

from collections.abc import Sequence

from quadriga.config import PrefillConfig, SchedulerConfig
from quadriga.errors import ContextTooLong, Overloaded, Unavailable, UnknownModel
from quadriga.policies.load import candidates
from quadriga.policies.waiting import (
    MIN_RETRY_AFTER_S,
    WaitingBook,
    decode_wait_s,
    prefill_wait_s,
)
from quadriga.types import Admission, AdmitRequest, ReplicaSnapshot, Role


def admit(
    request: AdmitRequest,
    snapshots: Sequence[ReplicaSnapshot],
    *,
    now_unix_s: float,
    scheduler: SchedulerConfig,
    prefill: PrefillConfig,
    any_depth: bool = False,
) -> Admission:
    """Choose the prefill replica with the least work ahead of the sequence.

    Args:
        any_depth: Prefill and decode replicas of one model may differ in depth.

    Raises:
        UnknownModel: No replica of the model was ever heard of.
        Unavailable: There are some, but none is alive and taking work, on either side.
        Overloaded: Every queue is full, with the predicted time until one has room.
        ContextTooLong: Prompt and max_tokens together fit no decode replica of the model.
    """
    known = {s.info.depth_class.model for s in snapshots}
    if request.model not in known:
        served = ", ".join(sorted(known)) or "none yet"
        raise UnknownModel(
            f"model {request.model!r} is not served; served: {served}", param="model"
        )
    prefills = _alive(Role.PREFILL, request.model, snapshots, now_unix_s, scheduler)
    decodes = _alive(Role.DECODE, request.model, snapshots, now_unix_s, scheduler)
    classes = {s.info.depth_class for s in decodes}
    if any_depth and decodes:
        classes |= {s.info.depth_class for s in prefills}
    prefills = [s for s in prefills if s.info.depth_class in classes]
    if not prefills:
        raise Unavailable(
            f"no prefill and decode replica of {request.model!r} is ready; retry shortly",
            retry_after_s=1.0,
        )
    needed = request.num_prompt_tokens + request.max_tokens
    largest = max(s.info.kv_capacity_tokens for s in decodes)
    if needed > largest:
        raise ContextTooLong(
            f"prompt plus max_tokens is {needed} tokens; the largest replica holds {largest}",
            param="max_tokens",
        )
    best = min(prefills, key=lambda s: (s.waiting_tokens, s.num_waiting, s.info.name))
    is_full = (
        best.num_waiting >= prefill.max_queued_sequences
        or best.waiting_tokens + request.num_prompt_tokens > prefill.max_queued_tokens
    )
    if is_full and best.num_waiting > 0:
        raise Overloaded(
            f"every queue of {request.model!r} is full: {best.num_waiting} sequences and "
            f"{best.waiting_tokens} prompt tokens wait at the shortest",
            retry_after_s=_retry_after_s(best, request, prefill, scheduler),
        )
    return Admission(best.info.name, best.info.depth_class)


def check_wait(
    request: AdmitRequest,
    admission: Admission,
    snapshots: Sequence[ReplicaSnapshot],
    book: WaitingBook,
    *,
    now_s: float,
    now_unix_s: float,
    scheduler: SchedulerConfig,
    prefill: PrefillConfig,
) -> None:
    """Refuse an admitted sequence that would wait for longer than `scheduler.max_wait_s`.

    What is to be rebuilt was let in before, and is not refused.

    Args:
        admission: What `admit` said.
        now_s: On the book's clock.

    Raises:
        Overloaded: With a time to come back that nobody else was told.
    """
    limit_s = scheduler.max_wait_s
    if limit_s is None or request.is_rebuild:
        return
    model = admission.depth_class.model
    first = next(s for s in snapshots if s.info.name == admission.prefill_replica)
    prefills = _alive(Role.PREFILL, model, snapshots, now_unix_s, scheduler)
    decodes = _alive(Role.DECODE, model, snapshots, now_unix_s, scheduler)
    num_running = sum(s.num_running + s.num_waiting for s in decodes)
    num_computed = sum(s.num_running + s.num_waiting for s in prefills)
    rate = book.ends_per_s(model, num_running, now_s=now_s)
    wait_s = max(
        prefill_wait_s(first, chunk_tokens=prefill.chunk_tokens),
        decode_wait_s(
            request,
            decodes,
            num_pending=min(book.num_pending(model), num_computed),
            ends_per_s=rate,
        ),
    )
    if wait_s <= limit_s:
        return
    told_s = book.promise(model, max(wait_s - limit_s, MIN_RETRY_AFTER_S), rate, now_s=now_s)
    book.cap_promises(model, scheduler.max_retry_after_s, now_s=now_s)
    raise Overloaded(
        f"{model!r} is busy: a place is expected in {wait_s:.1f} s, above the limit of "
        f"{limit_s:g} s (scheduler.max_wait_s)",
        retry_after_s=min(told_s, scheduler.max_retry_after_s),
    )


def _alive(
    role: Role,
    model: str,
    snapshots: Sequence[ReplicaSnapshot],
    now_unix_s: float,
    scheduler: SchedulerConfig,
) -> list[ReplicaSnapshot]:
    return candidates(
        snapshots,
        role=role,
        model=model,
        now_unix_s=now_unix_s,
        max_age_s=scheduler.snapshot_max_age_s,
    )


def _retry_after_s(
    snapshot: ReplicaSnapshot,
    request: AdmitRequest,
    prefill: PrefillConfig,
    scheduler: SchedulerConfig,
) -> float:
    """Time until the shortest queue is predicted to have room for this request.

    The rate is measured over idle time too, so a queue held up by full decode replicas counts
    at the pace it really moves.
    """
    excess = snapshot.waiting_tokens + request.num_prompt_tokens - prefill.max_queued_tokens
    if snapshot.num_waiting >= prefill.max_queued_sequences:
        excess = max(excess, snapshot.waiting_tokens // max(1, snapshot.num_waiting))
    rate = max(snapshot.tokens_per_s, 1e-3)
    return min(max(excess / rate, MIN_RETRY_AFTER_S), scheduler.max_retry_after_s)
