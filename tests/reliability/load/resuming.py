"""Clients that do what is asked of them when an ingress dies: they resume, and lose nothing.

Over gRPC it is the SDK that resumes. Over HTTP the request is sent again under its
`Idempotency-Key` and with `X-Resume-Index`, the number of tokens that are there; where the service
says in an orderly way that it cannot go on, without the index, from the beginning.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from loadgen.checker import Verdict
from loadgen.checker.verdict import AnswerChoice, FaultKind, Write
from loadgen.load.workload import RequestSpec
from loadgen.wire.capture import Capture, Transport, now_s
from loadgen.wire.client_http import HttpClient
from quadriga.client import AsyncClient
from quadriga.errors import QuadrigaError

MAX_ATTEMPTS = 30
PAUSE_S = 0.2
NOT_FOUND = 404
OF_A_PART = {FaultKind.GAP, FaultKind.USAGE, FaultKind.LENGTH, FaultKind.FINISH_REASON}
"""What the strict checker, which expects the whole, says of an answer's second part."""

Judge = Callable[[Capture, RequestSpec, str], Verdict]


async def over_http(
    client: HttpClient, judge: Judge, spec: RequestSpec, model: str
) -> tuple[Capture, Verdict]:
    """One stream, over as many connections as it takes."""
    key, request_id = uuid.uuid4().hex, f"chaos-{uuid.uuid4().hex}"
    tokens: list[int] = []
    writes: list[Write] = []
    first: Capture | None = None
    num_resumed = 0
    while True:
        headers = {"idempotency-key": key}
        if tokens:
            headers["x-resume-index"] = str(len(tokens))
        capture = await client.prepare(spec, model, request_id, headers)()
        first = first or capture
        verdict = judge(capture, spec, request_id)
        part = verdict.choices[0]
        tokens, writes = tokens + part.token_ids, writes + part.writes
        faults = [f for f in verdict.faults if not (num_resumed and f.kind in OF_A_PART)]
        is_over = part.finish_reason is not None and not faults
        if is_over or _is_final(verdict) or num_resumed == MAX_ATTEMPTS:
            break
        if verdict.status == NOT_FOUND:
            tokens, writes = [], []
        num_resumed += 1
        await asyncio.sleep(PAUSE_S)
    if num_resumed == 0:
        return capture, verdict
    rebuilds = int((verdict.extension or {}).get("rebuilds", 0))
    whole = _whole(spec, tokens, writes, num_resumed + rebuilds)
    for fault in faults:
        whole.add(fault.kind, fault.detail)
    return first, whole


def _is_final(verdict: Verdict) -> bool:
    """Whether to try again is of no use: it hung, or tokens came twice."""
    kinds = {f.kind for f in verdict.faults}
    return bool(kinds & {FaultKind.TIMEOUT, FaultKind.DUPLICATE, FaultKind.AFTER_FINISH})


async def over_grpc(
    client: AsyncClient, spec: RequestSpec, model: str, *, timeout_s: float
) -> tuple[Capture, Verdict]:
    """One stream through the SDK, which resumes by itself."""
    capture = Capture(Transport.GRPC, sent_s=now_s())
    tokens: list[int] = []
    writes: list[Write] = []
    rebuilds, gap, problem = 0, "", ""
    options = {k: v for k, v in spec.extra.items() if k in ("exit_threshold", "max_depth")}
    try:
        async for piece in client.stream(
            str(spec.prompt),
            model=model,
            timeout_s=timeout_s,
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
            seed=spec.seed or 0,
            ignore_eos=spec.ignore_eos,
            **options,
        ):
            if piece.first_index != len(tokens):
                gap = f"token {piece.first_index} after {len(tokens)} tokens"
            tokens += piece.token_ids
            if piece.token_ids:
                writes.append(Write(now_s(), len(piece.token_ids)))
            if piece.usage is not None:
                rebuilds = piece.usage.rebuilds
    except QuadrigaError as exc:
        problem = f"{exc.code}: {exc.message}"
    capture.ended_s = now_s()
    verdict = _whole(spec, tokens, writes, rebuilds)
    if gap:
        verdict.add(FaultKind.DUPLICATE, gap)
    if problem:
        is_late = problem.startswith("deadline")
        verdict.add(FaultKind.TIMEOUT if is_late else FaultKind.ERROR_FRAME, problem)
    return capture, verdict


def _whole(spec: RequestSpec, tokens: list[int], writes: list[Write], rebuilds: int) -> Verdict:
    choice = AnswerChoice(token_ids=tokens, writes=writes, num_tokens=len(tokens))
    verdict = Verdict(choices=[choice], extension={"rebuilds": rebuilds})
    if len(tokens) != spec.max_tokens:
        verdict.add(FaultKind.LENGTH, f"{len(tokens)} tokens, exactly {spec.max_tokens} wanted")
    return verdict
