"""Clients of every manner at once: patient, impatient and slow, over both doors."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

from loadgen.bench.cluster.service import ServiceUnderLoad
from loadgen.checker import Outcome
from loadgen.checker.judge import Judgement
from loadgen.checker.verdict import FaultKind
from loadgen.load.workload import RequestSpec
from loadgen.target import Target
from loadgen.wire.capture import Capture, Transport, now_s
from loadgen.wire.client_http import HttpClient
from tests.reliability.load.streams import TIMEOUT_S, StreamAnswer, StreamClients

MANNERS = {"patient": 0.75, "impatient": 0.17, "slow": 0.08}
IMPATIENT_S = 1.5
"""An impatient client hangs up within this time."""
SLOW_BYTES, SLOW_PAUSE_S = 512, 0.02
MAX_PAUSE_S = 0.4
KEPT_FAULTS = 20


class SlowHttpClient(HttpClient):
    """Reads a few bytes at a time through a small window, so that the service must wait for it."""

    async def send(self, request: bytes) -> Capture:
        """As `HttpClient.send`."""
        capture = Capture(Transport.HTTP, sent_s=now_s())
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self.timeout_s):
                reader, writer = await self._connect()
                writer.write(request)
                while data := await reader.read(SLOW_BYTES):
                    capture.reads.append((now_s(), data))
                    await asyncio.sleep(SLOW_PAUSE_S)
        except TimeoutError:
            capture.fault = f"timeout: not complete within {self.timeout_s:g} s"
        except OSError as exc:
            capture.fault = f"connection broke: {exc}"
        finally:
            if writer is not None:
                writer.transport.abort()
            capture.ended_s = now_s()
        return capture

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw = socket.socket()
        try:
            raw.setblocking(False)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BYTES)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(raw, (self.address.host, self.address.port))
            return await asyncio.open_connection(sock=raw, limit=SLOW_BYTES)
        except BaseException:
            raw.close()
            raise


@dataclass(frozen=True, slots=True)
class Silence:
    """A time in which a stream said nothing.

    Attributes:
        is_first: It had not said anything yet: a client waited for its first token.
    """

    began_s: float
    ended_s: float
    is_first: bool

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


def silences_of(answer: StreamAnswer) -> list[Silence]:
    """A stream's wait for its first token, and its longest pause thereafter."""
    times = [answer.capture.sent_s, *(w.time_s for w in answer.verdict.choices[0].writes)]
    pauses = [Silence(a, b, is_first=index == 0) for index, (a, b) in enumerate(pairwise(times))]
    return pauses[:1] + sorted(pauses[1:], key=lambda pause: pause.seconds)[-1:]


@dataclass(slots=True)
class Tally:
    """What became of the requests.

    Attributes:
        sent: By manner of the client.
        differing: Said something else than the undisturbed run.
        duplicated: Answers in which tokens came twice.
        faults: The first few in words.
        came: Tokens, by the time at which they came, to a tenth of a second.
        silences: Of every stream, the longest.
    """

    sent: Counter[str] = field(default_factory=Counter)
    ok: int = 0
    hung_up: int = 0
    refused: int = 0
    failed: int = 0
    differing: int = 0
    duplicated: int = 0
    rebuilt: int = 0
    came: Counter[float] = field(default_factory=Counter)
    silences: list[Silence] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return self.ok > 0 and self.failed + self.differing + self.refused == 0

    @property
    def worst_silence_s(self) -> float:
        """Of any stream."""
        return max((silence.seconds for silence in self.silences), default=0.0)

    def tokens_between(self, begin_s: float, end_s: float) -> int:
        """Tokens that came in that time, of answers that passed."""
        return sum(n for at_s, n in self.came.items() if begin_s <= at_s < end_s)

    def note(self, answer: StreamAnswer, wanted: list[int] | None) -> None:
        """Count an answer; `wanted` None where it need not equal the undisturbed run's."""
        verdict = answer.verdict
        if verdict.outcome is Outcome.REFUSED:
            self.refused += 1
            return
        if not answer.is_ok:
            self.failed += 1
            self.duplicated += any(f.kind is FaultKind.DUPLICATE for f in verdict.faults)
            self._keep(f"{answer.name}: {'; '.join(str(f) for f in verdict.faults[:2])}")
            return
        if answer.num_breaches and answer.spec.extra.get("exit_policy") == "strict":
            self.failed += 1
            self._keep(f"{answer.name} is strict: {answer.num_breaches} tokens below its threshold")
            return
        self.ok += 1
        self.rebuilt += answer.num_rebuilds > 0
        for write in verdict.choices[0].writes:
            self.came[round(write.time_s, 1)] += write.num_tokens
        if answer.spec.stream:
            self.silences += silences_of(answer)
        if wanted is not None and answer.token_ids != wanted:
            self.differing += 1
            self._keep(f"{answer.name} says other tokens than undisturbed")

    def _keep(self, fault: str) -> None:
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(fault)


class MixedLoad:
    """A closed loop of `places` clients, each with a request, a pause, another request."""

    def __init__(
        self,
        service: ServiceUnderLoad,
        clients: StreamClients,
        target: Target,
        specs: Sequence[RequestSpec],
        reference: Sequence[list[int]],
        *,
        places: int,
        seed: int,
        manners: dict[str, float] = MANNERS,
    ) -> None:
        self._clients = clients
        self._judge = Judgement(target)
        self._model = target.model
        self._slow = SlowHttpClient(service.url, timeout_s=TIMEOUT_S, api_key=service.api_key)
        self._specs = specs
        self._reference = reference
        self._places = places
        self._rng = random.Random(seed)
        self._manners = manners
        self._is_over = asyncio.Event()
        self._excused_until_s = float("-inf")
        self.num_under_way = 0
        self.tally = Tally()

    def ask(self, specs: Sequence[RequestSpec]) -> None:
        """Send other requests from now on, as many and with the same prompts."""
        self._specs = specs

    def stop(self) -> None:
        """Send nothing new; `run` returns when what is under way has ended."""
        self._is_over.set()

    def excuse(self, seconds: float) -> None:
        """What is under way until then need not equal the undisturbed run: depths change."""
        self._excused_until_s = now_s() + seconds

    def excuse_until_now(self) -> None:
        """What begins from now on must be as undisturbed again."""
        self._excused_until_s = now_s()

    async def run(self) -> None:
        """Send until `stop`."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._places):
                group.create_task(self._place())

    async def _place(self) -> None:
        while not self._is_over.is_set():
            self.num_under_way += 1
            try:
                await self._one()
            finally:
                self.num_under_way -= 1
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(0.0, MAX_PAUSE_S)):
                    await self._is_over.wait()

    async def _one(self) -> None:
        rng, tally = self._rng, self.tally
        manner = rng.choices(list(self._manners), list(self._manners.values()))[0]
        spec = rng.choice(self._specs)
        tally.sent[manner] += 1
        began_s = now_s()
        if manner == "slow":
            answer = await self._read_slowly(spec)
        else:
            spec = replace(spec, stream=rng.random() < 0.8)
            sending = asyncio.create_task(self._clients.send(spec, is_grpc=rng.random() < 0.5))
            patience_s = rng.uniform(0.01, IMPATIENT_S) if manner == "impatient" else None
            done, _ = await asyncio.wait([sending], timeout=patience_s)
            if not done:
                sending.cancel()
                await asyncio.wait([sending])
                tally.hung_up += 1
                return
            answer = sending.result()
        is_excused = began_s < self._excused_until_s
        tally.note(answer, None if is_excused else self._reference[spec.index])

    async def _read_slowly(self, spec: RequestSpec) -> StreamAnswer:
        spec = replace(spec, stream=True)
        request_id = f"slow-{self._rng.getrandbits(64):016x}"
        capture = await self._slow.prepare(spec, self._model, request_id)()
        verdict = self._judge(capture, spec, request_id)
        return StreamAnswer(spec, False, capture, verdict, request_id)
