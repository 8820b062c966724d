"""Let a sequence in, or say when to come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from quadriga.config.engine import PrefillConfig
from quadriga.config.scheduling import SchedulerConfig
from quadriga.core.replica import ReplicaSnapshot, Role
from quadriga.core.routing import Admission, AdmitRequest
from quadriga.errors import ContextTooLong, InvalidRequest, Overloaded, Unavailable
from quadriga.policies.ares.overload import may_hold_more
from quadriga.policies.least_work import expected_answer_tokens, expected_work
from quadriga.policies.load import candidates, line_of, taking_work
from quadriga.policies.retry_reservations import MIN_WAIT_S, RetryReservations
from quadriga.policies.wait_estimator import (
    Supply,
    WaitEstimator,
    decode_supply,
    prefill_supply,
    queue_supply,
)


def admit(
    request: AdmitRequest,
    snapshots: Sequence[ReplicaSnapshot],
    *,
    now_unix_s: float,
    scheduler: SchedulerConfig,
    prefill: PrefillConfig,
    any_depth: bool = False,
    checks_queue: bool = True,
    cached_tokens: Mapping[str, int] = MappingProxyType({}),
) -> Admission:
    """Choose the prefill replica with the least work ahead, and the most of the prompt at hand.

    That is the least `waiting_tokens + work − scheduler.prefix_weight · cached_tokens`, among those
    whose queues are not full. At a mixed replica `work` is what it has to decode, as `LeastWork`
    reckons for placement, which this is at the same time; at others it is 0. They come before those
    whose memory is held by sequences that wait for a decode replica, and by prompts ahead, and all
    before those whose rows are too short.

    Args:
        any_depth: Prefill and decode replicas of one model may differ in depth.
        checks_queue: False where `find_room` comes next.
        cached_tokens: Of the prompt, that a replica has computed before, by its name.

    Raises:
        Unavailable: None of the model's replicas is known, alive and taking work, on either side.
            Whether the model is served at all is the caller's question.
        Overloaded: Every queue is full, with the predicted time until one has room.
        ContextTooLong: Prompt and max_tokens together fit no decode replica of the model.
    """
    prefills = _alive(Role.PREFILL, request.model, snapshots, now_unix_s, scheduler)
    decodes = _alive(Role.DECODE, request.model, snapshots, now_unix_s, scheduler)
    if not any_depth:  # else the caller has looked for layers, or they are loaded
        prefills, decodes = (
            [s for s in alive if s.info.has_layers(request.needs_depth)]
            for alive in (prefills, decodes)
        )

    lines = {line_of(s.info, any_depth=any_depth) for s in decodes}
    able = [s for s in prefills if line_of(s.info, any_depth=any_depth) in lines]
    if not able:
        names = {s.info.numerics for s in (*prefills, *decodes)}
        why = (
            f", as their weights differ, which passes where a model is being exchanged, or their "
            f"code, which a deterministic deployment does not mix ({', '.join(sorted(names))}): "
            f"give them the same CPUs and settings"
        )
        raise Unavailable(
            f"no prefill and decode replica of {request.model!r} "
            f"{'with all layers ' if request.needs_depth else ''}is ready"
            f"{why if prefills and decodes and len(names) > 1 else ''}; retry shortly",
            retry_after_s=1.0,
        )
    prefills = able
    needed = request.num_prompt_tokens + request.max_tokens
    largest = max(s.info.longest_sequence for s in decodes)
    if needed > largest:
        raise ContextTooLong(
            f"prompt plus max_tokens is {needed} tokens; the largest replica holds {largest}",
            param="max_tokens",
        )

    def is_short(snapshot: ReplicaSnapshot) -> bool:
        stays = snapshot.info.role is Role.MIXED
        wanted = needed if stays else request.num_prompt_tokens
        return wanted > snapshot.info.longest_sequence

    def is_full(snapshot: ReplicaSnapshot) -> bool:
        queued = snapshot.waiting_tokens + request.num_prompt_tokens
        is_long = snapshot.num_waiting >= prefill.max_queued_sequences
        return is_long or queued > prefill.max_queued_tokens

    answer_tokens = expected_answer_tokens(decodes)

    def rank(snapshot: ReplicaSnapshot) -> tuple[bool, bool, bool, float, int, str]:
        name, is_crowded = snapshot.info.name, not _has_memory(snapshot, request)
        ahead = snapshot.waiting_tokens - scheduler.prefix_weight * cached_tokens.get(name, 0)
        if snapshot.info.role is Role.MIXED:
            ahead += expected_work(snapshot, answer_tokens)
        queue = ahead, snapshot.num_waiting, name
        return is_short(snapshot), is_full(snapshot), is_crowded, *queue

    best = min(prefills, key=rank)
    if checks_queue and is_full(best) and best.num_waiting > 0:
        raise Overloaded(
            f"every queue of {request.model!r} is full: {best.num_waiting} sequences and "
            f"{best.waiting_tokens} prompt tokens wait at the shortest",
            retry_after_s=min(
                max(queue_supply(request, prefills, prefill).wait_s, MIN_WAIT_S),
                scheduler.max_retry_after_s,
            ),
        )
    return Admission(best.info.name, best.info.depth_class)


def check_size(requests: Sequence[AdmitRequest], num_queues: int, prefill: PrefillConfig) -> None:
    """Refuse what so many queues could not hold, were they empty. Raises: InvalidRequest."""
    most, most_tokens = prefill.max_queued_sequences, prefill.max_queued_tokens
    sizes = sorted((request.num_prompt_tokens for request in requests), reverse=True)
    # A prompt of any length may wait in a queue alone.
    rest = [(sum(sizes[alone:]), num_queues - alone) for alone in range(num_queues + 1)]
    if len(sizes) > num_queues * most or all(tokens > n * most_tokens for tokens, n in rest):
        raise InvalidRequest(
            f"{len(sizes)} prompts (times n) of {sum(sizes)} tokens are more than the prefill "
            f"queues hold ({num_queues}, each prefill.max_queued_sequences: {most} and "
            f"prefill.max_queued_tokens: {most_tokens}); send them apart"
        )


def find_room(
    request: AdmitRequest,
    admission: Admission,
    snapshots: Sequence[ReplicaSnapshot],
    estimator: WaitEstimator,
    line: str,
    *,
    now_s: float,
    now_unix_s: float,
    scheduler: SchedulerConfig,
    prefill: PrefillConfig,
    is_overloaded: bool = False,
) -> Supply:
    """Find out what a sequence has least of: room in a queue, or a place in time.

    That is within `scheduler.max_wait_s`, where there is such a limit; one that ends with its
    first token waits for its prompt's turn alone.

    Args:
        admission: What `admit` said.
        snapshots: Of the replicas whose `line_of` is `line`.
        now_s: On the estimator's clock.
        is_overloaded: Sequences that wait for a place let shorter ones pass; see `ares.overload`.
            Where prefill replicas have no rows for more of them, or no memory for another prompt
            beside theirs, newcomers are refused.

    Raises:
        Overloaded: For that reason.
    """
    model = admission.depth_class.model
    prefills = _alive(Role.PREFILL, model, snapshots, now_unix_s, scheduler)
    longest = request.num_prompt_tokens + request.max_tokens
    decodes = _alive(Role.DECODE, model, snapshots, now_unix_s, scheduler, num_tokens=longest)
    alike = [s for s in prefills if s.info.depth_class == admission.depth_class]
    queues = queue_supply(request, alike, prefill)
    if (limit_s := scheduler.max_wait_s) is None:
        return queues
    first = next(s for s in snapshots if s.info.name == admission.prefill_replica)
    num_held = sum(s.num_unplaced for s in prefills) if is_overloaded else 0
    num_computed = sum(s.num_running + s.num_waiting - s.ending[0] for s in prefills)
    num_asking = max(0, min(estimator.num_pending(line), num_computed) - num_held)
    slower = turns = prefill_supply(request, first, num_replicas=max(1, len(prefills)))
    places = decode_supply(
        request,
        decodes,
        estimator,
        num_pending=min(num_asking, estimator.num_pending(line, request.priority)),
        line=line,
        now_s=now_s,
    )
    needs_place = request.decodes_at(first.info.role)
    if needs_place and turns.wait_s <= max(limit_s, places.wait_s):
        slower = places
    if num_held:
        num_rows = sum(s.info.num_slots for s in prefills)
        has_rows = not needs_place or may_hold_more(num_held, num_rows)
        if not has_rows or not _has_memory(first, request):
            wait_s = max(1.0 / slower.per_s, MIN_WAIT_S)
            raise Overloaded(
                f"{model!r} is overloaded: {num_held} sequences wait for a decode replica, and "
                f"prefill replicas have {'memory' if has_rows else 'rows'} for no more",
                retry_after_s=min(wait_s, scheduler.max_retry_after_s),
            )
    more = limit_s * slower.per_s
    in_time = replace(slower, free=slower.free + more, most=slower.most + more)
    return in_time if in_time.free < queues.free else queues


def check_room(
    requests: Sequence[AdmitRequest],
    found: Mapping[str, Sequence[Supply]],
    estimator: WaitEstimator,
    *,
    model: str,
    now_s: float,
    scheduler: SchedulerConfig,
) -> None:
    """Refuse a request where one of its sequences has no room, or would wait for too long.

    So is one whose places are kept for callers that were refused before and are expected back.

    Args:
        requests: Its sequences.
        found: By line, what each finds behind those before it; see `find_room`. What is rebuilt
            was let in before, and is not in it.
        model: That was chosen for it.

    Raises:
        Overloaded: With a time to come back, at which all its places are kept for such a caller.
    """
    longest_s, is_queue = 0.0, False
    wanted: list[tuple[RetryReservations, str, int]] = []
    for line, supplies in found.items():
        # Of more than there could ever be in time, the rest waits for those in front, in queues;
        # for more than these could ever hold nothing is kept.
        most = max(1.0, max(supply.most for supply in supplies))
        counted = [s for i, s in enumerate(supplies, 1) if s.is_queue or i <= most]
        short = min(counted, key=lambda supply: (supply.free, supply.per_s))
        may_return = requests[0].visitor and not (short.is_queue and len(supplies) > most)
        visitor = f"{requests[0].visitor}:{len(requests)}" if may_return else ""
        reservations = estimator.reservations(line)
        wait_s = reservations.ask(
            visitor,
            short.free,
            short.per_s,
            now_s=now_s,
            least_free=float(short.is_queue),
            num_places=len(counted),
        )
        wanted.append((reservations, visitor, len(counted)))
        if wait_s is not None and wait_s > longest_s:
            longest_s, is_queue = wait_s, short.is_queue
    if not longest_s:
        return
    told_s = min(longest_s, scheduler.max_retry_after_s)
    if told_s == longest_s:  # else it is told to come sooner, without a place
        for reservations, visitor, num_places in wanted:
            reservations.keep(visitor, now_s + told_s, num_places)
    why = "every queue is full; a place in one"
    if not is_queue:
        why = f"the wait is above {scheduler.max_wait_s:g} s (scheduler.max_wait_s); a place"
    raise Overloaded(
        f"{model!r} is busy: {why} is expected in {told_s:.1f} s", retry_after_s=told_s
    )


def _has_memory(prefill: ReplicaSnapshot, request: AdmitRequest) -> bool:
    """Whether a prompt fits beside all that a prefill replica has now, computed or waiting."""
    # What waits and is promised already (under way, just sent, queued at a mixed one) counts once.
    taken = max(prefill.reserved_tokens, prefill.used_tokens + prefill.waiting_tokens)
    return taken + request.num_prompt_tokens <= prefill.info.kv_capacity_tokens


def _alive(
    role: Role,
    model: str,
    snapshots: Sequence[ReplicaSnapshot],
    now_unix_s: float,
    scheduler: SchedulerConfig,
    num_tokens: int = 0,
) -> list[ReplicaSnapshot]:
    alive = taking_work(snapshots, now_unix_s=now_unix_s, max_age_s=scheduler.snapshot_max_age_s)
    return candidates(alive, role=role, model=model, num_tokens=num_tokens)
