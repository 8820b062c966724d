"""Offline workloads: prompts as token ids, output lengths, and how many run at once.

Standard library only: peers are measured by interpreters that may have nothing else of ours.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

SUITE_PROMPT_TOKENS = 64
SUITE_OUTPUT_TOKENS = 128
SUITE_BATCHES = (1, 8, 32)
SUITE_MIXED_REQUESTS = 64
SUITE_MIXED_CONCURRENCIES = (8, 32)


class WorkloadError(ValueError):
    """A workload file is not what it should be; the message names file and field."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One prompt and the exact number of tokens to generate after it."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all there at time 0, at most `concurrency` of them in flight."""

    name: str
    concurrency: int
    requests: list[WorkloadRequest]

    @property
    def output_tokens(self) -> int:
        return sum(r.max_tokens for r in self.requests)

    @property
    def longest(self) -> int:
        """Most tokens, prompt and output, of one request."""
        return max(len(r.prompt) + r.max_tokens for r in self.requests)

    def warm_up(self) -> Workload:
        """A small workload that touches the same shapes: full concurrency, few tokens."""
        head = self.requests[: self.concurrency]
        return Workload(
            f"{self.name}-warm-up",
            self.concurrency,
            [WorkloadRequest(r.prompt, min(r.max_tokens, 8)) for r in head],
        )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def load_workload(path: Path) -> Workload:
    """Read a workload file. Raises: WorkloadError naming the field at fault."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise WorkloadError(f"{path}: not readable as JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise WorkloadError(f"{path}: must hold an object")
    name = raw.get("name")
    if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
        raise WorkloadError(f"{path}: name must be a file name without '/', not {name!r}")
    concurrency = _whole(raw.get("concurrency"), f"{path}: concurrency")
    items = raw.get("requests")
    if not isinstance(items, list) or not items:
        raise WorkloadError(f"{path}: requests must be a list with at least one entry")
    return Workload(name, concurrency, [_request(item, path, i) for i, item in enumerate(items)])


def _request(item: object, path: Path, index: int) -> WorkloadRequest:
    where = f"{path}: requests.{index}"
    if not isinstance(item, dict):
        raise WorkloadError(f"{where} must be an object")
    prompt = item.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        raise WorkloadError(f"{where}.prompt must be a list of at least one token id")
    if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in prompt):
        raise WorkloadError(f"{where}.prompt must hold whole numbers from 0 on")
    return WorkloadRequest(prompt, _whole(item.get("max_tokens"), f"{where}.max_tokens"))


def _whole(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WorkloadError(f"{where} must be a whole number from 1 on, not {value!r}")
    return value


def make_suite(vocab_size: int, max_tokens: int, *, seed: int) -> list[Workload]:
    """The suite's workloads: fixed shapes, and two with heavy-tailed lengths.

    Args:
        vocab_size: Prompt ids are drawn below it.
        max_tokens: Longest sequence the model takes; longer draws are cut.
        seed: Of all draws.
    """
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(min(3, vocab_size - 1), vocab_size) for _ in range(length)]

    prompt_tokens = min(SUITE_PROMPT_TOKENS, max_tokens // 3)
    output_tokens = min(SUITE_OUTPUT_TOKENS, max_tokens - prompt_tokens)
    suite = [
        Workload(
            f"batch-{batch}",
            batch,
            [WorkloadRequest(prompt(prompt_tokens), output_tokens) for _ in range(batch)],
        )
        for batch in SUITE_BATCHES
    ]
    mixed = []
    for _ in range(SUITE_MIXED_REQUESTS):
        # Medians of 48 and 64 tokens, one in twenty above 240: log-normal, as traces are.
        length = _bounded(rng.lognormvariate(3.87, 0.8), 4, max_tokens // 2)
        output = _bounded(rng.lognormvariate(4.16, 0.9), 4, min(512, max_tokens - length))
        mixed.append(WorkloadRequest(prompt(length), output))
    suite += [Workload(f"mixed-{c}", c, mixed) for c in SUITE_MIXED_CONCURRENCIES]
    return suite


def _bounded(value: float, low: int, high: int) -> int:
    return max(low, min(high, int(value)))
