"""`python -m loadgen bench prefix`: what shared prompts save, and what looking for them costs.

Each round has a long prompt of its own (2,000 tokens, as a system prompt is), and two questions
behind it, which are asked with the cache and without it, in turns:

1. cold: the prompt is new; it is computed and kept. Its time against the same request without the
   cache is what the cache costs where nothing is found. That difference is far below what a shared
   machine's times differ by, so the cache's own calls are timed as well, in processor time:
   `overhead_no_hits` is their share of the rest. There is memory for one kept prompt, so that in
   all rounds but the first blocks go for new ones, as they do in a service that has run for a
   while; the first one's share, for which memory was touched in idle steps, as a replica does, is
   `overhead_while_filling`.
2. hit: another question behind the same prompt. `ttft_ratio_shared_2000` is its time to the first
   token over the cold one's.
3. The same prompt several times at once, as `n` choices are: how many tokens were computed.

Every answer must be that of the engine without the cache, token for token, with log-probabilities
that are equal to the bit.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from loadgen.options import whole
from loadgen.report.experiment import print_line, show
from quadriga.core.request import SamplingParams
from quadriga.core.request_output import RequestOutput
from quadriga.errors import ConfigError
from quadriga.interfaces import SharingRunner
from quadriga.scheduling.prefixes.cache import MAX_BLANK, PrefixCache
from quadriga.scheduling.sequence import RunningSequence

if TYPE_CHECKING:
    from quadriga.llm import LLM

QUESTION_TOKENS = 32
ANSWER = SamplingParams(8, temperature=0.0, num_logprobs=0, ignore_eos=True)


class TimedPrefixCache(PrefixCache):
    """A cache that adds up the processor seconds which its own calls take.

    Attributes:
        seconds: Since the start.
    """

    seconds = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = time.process_time()
        yield
        self.seconds += time.process_time() - began_s

    def look(self, sequence: RunningSequence) -> None:
        """See `PrefixCache.look`."""
        with self._timed():
            super().look(sequence)

    def load(self, sequence: RunningSequence) -> int:
        """See `PrefixCache.load`."""
        with self._timed():
            return super().load(sequence)

    def store(self, sequence: RunningSequence, start: int, stop: int) -> None:
        """See `PrefixCache.store`."""
        with self._timed():
            super().store(sequence, start, stop)

    def store_answer(self, sequence: RunningSequence) -> None:
        """See `PrefixCache.store_answer`; `store` is timed within."""
        began_s, before_s = time.process_time(), self.seconds
        super().store_answer(sequence)
        self.seconds = before_s + time.process_time() - began_s


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round, up to the first token where nothing else is said.

    Attributes:
        off_s: Without the cache.
        cold_s: With it, and nothing found.
        cold_cpu_s: Processor time of that request.
        cache_cpu_s: Of it, in the cache's own calls.
        hit_s: With the prompt shared.
        cached_tokens: Of the hit.
        is_identical: All answers are those without the cache.
    """

    off_s: float
    cold_s: float
    cold_cpu_s: float
    cache_cpu_s: float
    hit_s: float
    cached_tokens: int
    is_identical: bool

    @property
    def overhead(self) -> float:
        """The cache's own share of what a new prompt costs without it."""
        return self.cache_cpu_s / (self.cold_cpu_s - self.cache_cpu_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model", default="smollm2-135m-instruct", help="bundled id or folder")
    parser.add_argument("--tokens", type=whole(64), default=2000, help="that prompts share")
    parser.add_argument("--rounds", type=whole(1), default=5, help="of all measurements")
    parser.add_argument("--choices", type=whole(2), default=4, help="equal prompts at once")


def run(args: argparse.Namespace) -> int:
    """Measure; prints a table and one JSON line. Returns 1 where an answer differs."""
    from quadriga.llm import LLM

    width = args.tokens + QUESTION_TOKENS + ANSWER.max_tokens
    llm = LLM(
        args.model,
        engine={"compile": "wait", "max_model_len": width},
        decode={"max_slots": args.choices + 2},
    )
    if not isinstance(llm.runner, SharingRunner):
        raise ConfigError(f"model: {args.model} runs in the relay batch, which shares no KV")
    cache = TimedPrefixCache(llm.runner, llm.loop.prefill.slots, llm.runner.spec.checkpoint.id)
    slots = llm.loop.prefill.slots
    whole_memory = slots.kv_capacity_tokens
    slots.resize(2 * width + 4 * cache.block_tokens)
    for _ in range(MAX_BLANK):
        cache.prepare()
    first, *rounds = [measure(llm, cache, args.tokens, seed) for seed in range(args.rounds + 1)]
    slots.resize(whole_memory)
    computed = tokens_of_equal_prompts(llm, cache, args.tokens, args.choices)
    llm.close()
    show(
        rounds,
        {
            "off s": lambda r: f"{r.off_s:.3f}",
            "cold s": lambda r: f"{r.cold_s:.3f}",
            "cold cpu s": lambda r: f"{r.cold_cpu_s:.3f}",
            "cache's calls ms": lambda r: f"{r.cache_cpu_s * 1e3:.1f}",
            "hit s": lambda r: f"{r.hit_s:.3f}",
            "cached tokens": lambda r: r.cached_tokens,
            "identical": lambda r: r.is_identical,
        },
    )
    is_identical = all(r.is_identical for r in (first, *rounds))
    print_line(
        "prefix",
        headline={
            f"ttft_ratio_shared_{args.tokens}": round(
                median(r.hit_s / r.cold_s for r in rounds), 4
            ),
            "overhead_no_hits": round(median(r.overhead for r in rounds), 5),
            "identical": is_identical,
        },
        model=args.model,
        rounds=args.rounds,
        overhead_while_filling=round(first.overhead, 5),
        cold_over_off=round(median(r.cold_s / r.off_s for r in rounds), 4),
        off_s=median(r.off_s for r in rounds),
        cold_s=median(r.cold_s for r in rounds),
        hit_s=median(r.hit_s for r in rounds),
        choices=args.choices,
        computed_tokens_of_choices=computed,
        prompt_tokens_of_choices=args.choices * args.tokens,
    )
    return 0 if is_identical else 1


def measure(llm: LLM, cache: PrefixCache, num_tokens: int, seed: int) -> Round:
    """One round with a prompt of its own; cold and off take turns in going first."""
    assert isinstance(cache, TimedPrefixCache)
    rng = random.Random(seed)
    vocab = llm.runner.spec.checkpoint.vocab_size

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, vocab) for _ in range(count)]

    shared, first, second = tokens(num_tokens), tokens(QUESTION_TOKENS), tokens(QUESTION_TOKENS)

    def ask(question: list[int], *, cached: bool) -> RequestOutput:
        llm.loop.prefill.prefixes = llm.loop.decode.prefixes = cache if cached else None
        return llm.generate([shared + question], ANSWER, progress=False)[0].checked()

    answers, cpu_s = dict[bool, RequestOutput](), dict[bool, float]()
    before_s = cache.seconds
    for is_cached in (True, False) if seed % 2 else (False, True):
        began_s = time.process_time()
        answers[is_cached] = ask(first, cached=is_cached)
        cpu_s[is_cached] = time.process_time() - began_s
    cache_cpu_s = cache.seconds - before_s
    hit, whole_prompt = ask(second, cached=True), ask(second, cached=False)
    return Round(
        off_s=answers[False].ttft_s,
        cold_s=answers[True].ttft_s,
        cold_cpu_s=cpu_s[True],
        cache_cpu_s=cache_cpu_s,
        hit_s=hit.ttft_s,
        cached_tokens=hit.cached_tokens,
        is_identical=is_same(answers[True], answers[False]) and is_same(hit, whole_prompt),
    )


def is_same(one: RequestOutput, other: RequestOutput) -> bool:
    """Whether two answers have the same tokens with the same log-probabilities."""
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def tokens_of_equal_prompts(llm: LLM, cache: PrefixCache, num_tokens: int, count: int) -> int:
    """Prompt tokens that the engine computes for equal prompts which come together."""
    rng = random.Random(count)
    prompt = [rng.randrange(10, 300) for _ in range(num_tokens)]
    llm.loop.prefill.prefixes = cache
    before = llm.loop.prefill.meter.totals.tokens
    llm.generate([prompt] * count, ANSWER, progress=False)
    return llm.loop.prefill.meter.totals.tokens - before
