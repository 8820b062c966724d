"""The streams that must survive, and what an undisturbed run says to each of them."""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from loadgen.bench.cluster.service import ServiceUnderLoad
from loadgen.checker import Outcome, Verdict
from loadgen.checker.judge import Judgement
from loadgen.load.workload import RequestSpec
from loadgen.target import Target, find_target
from loadgen.wire.capture import Capture, LoadClient
from loadgen.wire.client_grpc import GrpcClient
from loadgen.wire.client_http import HttpClient
from quadriga.client import AsyncClient
from quadriga.errors import ConfigError
from tests.reliability.load.resuming import over_grpc, over_http

TIMEOUT_S = 90.0
"""A stream that has not ended then hangs."""
PROMPTS = (
    "Sort: 7 3 9 1 4 8 2 6\n",
    "Once upon a time",
    "Add: 482 + 957\n",
    "The fox and the bear",
)
THRESHOLDS = (1.0, 0.9, 0.98)


@dataclass(slots=True)
class StreamAnswer:
    """One stream and its judgement.

    Attributes:
        is_grpc: Which door it came through.
        request_id: As the service's logs have it; empty where the client chose none.
    """

    spec: RequestSpec
    is_grpc: bool
    capture: Capture
    verdict: Verdict
    request_id: str = ""

    @property
    def name(self) -> str:
        """Which one it was, for whoever looks into what went wrong with it."""
        door, times = "gRPC" if self.is_grpc else "HTTP", self.first_token_s - self.capture.sent_s
        return (
            f"stream {self.spec.index} over {door} ({self.request_id}, first token {times:.1f} s)"
        )

    @property
    def is_ok(self) -> bool:
        return self.verdict.outcome is Outcome.OK

    @property
    def token_ids(self) -> list[int]:
        return self.verdict.choices[0].token_ids

    @property
    def num_rebuilds(self) -> int:
        """How often it was begun anew, as its usage says."""
        return int((self.verdict.extension or {}).get("rebuilds", 0))

    @property
    def num_breaches(self) -> int:
        """Tokens below their threshold, as its usage says."""
        return int((self.verdict.extension or {}).get("breaches", 0))

    @property
    def first_token_s(self) -> float:
        """When its first token came; infinite where none did."""
        choices = self.verdict.choices
        return choices[0].writes[0].time_s if choices and choices[0].writes else math.inf

    def longest_silence_s(self, since_s: float) -> float:
        """The longest time without a token that ended after `since_s`."""
        times = [self.capture.sent_s, *(w.time_s for w in self.verdict.choices[0].writes)]
        return max((b - a for a, b in pairwise(times) if b > since_s), default=0.0)


def make_streams(
    count: int, *, max_tokens: int, seed: int, max_depth: int | None = None
) -> list[RequestSpec]:
    """Greedy and seeded in turn, with and without early exits, of different prompts.

    Args:
        max_depth: Layers that all tokens leave at, at the latest: they are the same ones then,
            however many are loaded.
    """
    limit = {} if max_depth is None else {"max_depth": max_depth}
    rng = random.Random(seed)
    return [
        RequestSpec(
            index=index,
            arrival_s=0.0,
            prompt=PROMPTS[index % len(PROMPTS)],
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0 if index % 2 == 0 else 0.9,
            seed=rng.randrange(1 << 30),
            extra={"exit_threshold": THRESHOLDS[index % len(THRESHOLDS)]} | limit,
        )
        for index in range(count)
    ]


class StreamClients:
    """Sends streams through both doors of a service."""

    def __init__(
        self, http: HttpClient, grpc: GrpcClient, sdk: AsyncClient, target: Target
    ) -> None:
        self._doors: tuple[LoadClient, LoadClient] = (http, grpc)
        self._sdk = sdk
        self._target = target
        self._judge = Judgement(target)
        self.http = http

    async def send(self, spec: RequestSpec, *, is_grpc: bool) -> StreamAnswer:
        """One stream, from its request to its judgement."""
        request_id = f"chaos-{uuid.uuid4().hex}"
        call = self._doors[is_grpc].prepare(spec, self._target.model, request_id)
        capture = await call()
        verdict = self._judge(capture, spec, request_id)
        return StreamAnswer(spec, is_grpc, capture, verdict, request_id)

    async def send_resumed(self, spec: RequestSpec, *, is_grpc: bool) -> StreamAnswer:
        """As `send`, and where the connection breaks it is taken up again."""
        model = self._target.model
        if is_grpc:
            found = over_grpc(self._sdk, spec, model, timeout_s=TIMEOUT_S)
        else:
            found = over_http(self.http, self._judge, spec, model)
        return StreamAnswer(spec, is_grpc, *await found)

    async def send_all(
        self, specs: Sequence[RequestSpec], *, is_resumed: bool = False
    ) -> list[StreamAnswer]:
        """All at once, every second pair over gRPC."""
        send = self.send_resumed if is_resumed else self.send
        sends = [send(spec, is_grpc=spec.index // 2 % 2 == 1) for spec in specs]
        return list(await asyncio.gather(*sends))

    async def reference(self, specs: Sequence[RequestSpec]) -> list[list[int]]:
        """The tokens of an undisturbed run of all streams at once.

        Raises:
            ConfigError: The service does not answer even so.
        """
        sends = (self.send(replace(spec, stream=True), is_grpc=False) for spec in specs)
        answers = await asyncio.gather(*sends)
        for answer in answers:
            if not answer.is_ok:
                faults = "; ".join(str(f) for f in answer.verdict.faults)
                raise ConfigError(f"the undisturbed run failed: {faults}")
        return [answer.token_ids for answer in answers]


@asynccontextmanager
async def clients_of(
    service: ServiceUnderLoad, model: str | None = None
) -> AsyncIterator[StreamClients]:
    """Clients of both doors, closed on every path. Raises: ConfigError: No model is served."""
    http = service.client(TIMEOUT_S)
    grpc = GrpcClient(service.grpc, timeout_s=TIMEOUT_S, api_key=service.api_key)
    sdk = AsyncClient(service.grpc, api_key=service.api_key)
    try:
        await grpc.connect()  # all that will be open is open when the base line is taken
        yield StreamClients(http, grpc, sdk, await find_target(http, model))
    finally:
        await grpc.close()
        await sdk.close()
