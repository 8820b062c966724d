"""From logits to tokens: penalties, bans, truncation, and seeded draws; batched.

Order of operations, per row: logit bias → bans (min_tokens) → repetition penalty → frequency and
presence penalties → what its grammar does not allow; that is the *processed* distribution, which
logprobs report. Then temperature → min-p → top-k → top-p → draw. A draw walks the cumulative
distribution in vocabulary order with one counter-based uniform, so it depends on the row alone, not
on the batch around it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt
import torch

from quadriga.checkpoint.folder import Checkpoint
from quadriga.core.request import SampledToken, SamplingParams, SequenceState, TokenLogprob
from quadriga.engine.kernels.library import KernelLibrary
from quadriga.engine.models.decoder import best_of
from quadriga.engine.random import LEAST_DIVISOR, uniforms
from quadriga.engine.transfers import index_on, to_device
from quadriga.errors import InvalidRequest
from quadriga.text.grammar import Bits, GrammarMatcher, allowed, grammars_of

WHOLE_SORT = 4096
"""Vocabularies up to this are sorted as a whole; of larger ones the best tokens alone."""
FIRST_RANKED = 256
"""So many are ranked at first, then eight times as many, until top-p is reached."""


class RowSampler:
    """What one attached sequence asks of the sampler, kept up to date as it grows.

    Attributes:
        is_plain: Greedy without any extra: the argmax of the raw logits is the answer.
        wants_best: The same, but for a grammar.
        alters: It has a bias, bans or penalties.
        matcher: Where it stands in its grammar; None without one.
        place: Where a device has its parameters, and its row there; None: nowhere.
        error: Why it could say nothing more when its logits were last processed; else None.
    """

    __slots__ = (
        "_banned",
        "_bias",
        "_biased",
        "_counted",
        "_output_counts",
        "_prompt_seen",
        "alters",
        "error",
        "is_plain",
        "matcher",
        "params",
        "place",
        "state",
        "wants_best",
    )

    def __init__(
        self,
        state: SequenceState,
        vocab_size: int,
        eos_ids: Sequence[int],
        matcher: GrammarMatcher | None = None,
    ) -> None:
        p = state.sampling
        self.state = state
        self.params = p
        self.matcher = matcher
        self.place: tuple[torch.Tensor, int] | None = None
        ends = set(p.stop_token_ids) | (set() if p.ignore_eos else set(eos_ids))
        banned = sorted(i for i in ends if 0 <= i < vocab_size) if p.min_tokens else []
        biases = {i: b for i, b in p.logit_bias if 0 <= i < vocab_size}
        # As tensors: a token costs the same however many of them there are.
        self._banned = torch.tensor(banned, dtype=torch.int64)
        self._biased = torch.tensor(list(biases), dtype=torch.int64)
        self._bias = torch.tensor(list(biases.values()), dtype=torch.float32)
        self.error: InvalidRequest | None = None
        self.alters = bool(banned or biases or self.has_penalties)
        self.wants_best = p.greedy and not self.alters and p.num_logprobs is None
        self.is_plain = self.wants_best and matcher is None
        self._counted = 0
        self._prompt_seen: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None
        if self.has_penalties:
            self._prompt_seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._prompt_seen[torch.tensor(state.prompt_ids)] = True
            self._output_counts = torch.zeros(vocab_size)

    @property
    def has_penalties(self) -> bool:
        p = self.params
        return (
            p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        )

    @property
    def choice(self) -> int:
        return self.state.choice

    @property
    def position(self) -> int:
        """Of the token that is sampled next."""
        return self.state.num_tokens

    @property
    def said(self) -> list[int]:
        """The answer so far."""
        return self.state.output_ids

    def alter(self, logits: torch.Tensor, drafted: Sequence[int] = ()) -> None:
        """Apply bias, bans and penalties to this row's logits [vocab], in place.

        Args:
            drafted: Tokens that are taken to follow those of the state.
        """
        p = self.params
        if self._bias.device != logits.device:  # the first time; they stay there
            self._banned = to_device(self._banned.numpy(), logits.device)
            self._biased = to_device(self._biased.numpy(), logits.device)
            self._bias = to_device(self._bias.numpy(), logits.device)
        if self._biased.numel():
            logits.index_add_(0, self._biased, self._bias)
        if self._banned.numel() and len(self.state.output_ids) + len(drafted) < p.min_tokens:
            logits.index_fill_(0, self._banned, float("-inf"))
        if self._output_counts is None or self._prompt_seen is None:
            return
        if self._output_counts.device != logits.device:  # the first time; they stay there
            self._prompt_seen = to_device(self._prompt_seen.numpy(), logits.device)
            self._output_counts = to_device(self._output_counts.numpy(), logits.device)
        counts = self._output_counts
        self._count_new_tokens(counts)
        if drafted:
            more = index_on(counts.device, drafted)
            counts = counts.index_put((more,), torch.ones_like(more, dtype=counts.dtype), True)
        if p.repetition_penalty != 1.0:
            seen = self._prompt_seen | (counts > 0)
            penalty = max(p.repetition_penalty, LEAST_DIVISOR)
            shrunk = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(seen, shrunk, logits))
        logits -= p.frequency_penalty * counts
        logits -= p.presence_penalty * (counts > 0)

    def _count_new_tokens(self, counts: torch.Tensor) -> None:
        new = self.state.output_ids[self._counted :]
        if new:
            counts.index_add_(0, index_on(counts.device, new), counts.new_ones(len(new)))
            self._counted = len(self.state.output_ids)


class SamplerAhead:
    """A row's sampler as it will be after some drafted tokens, should all of them come."""

    __slots__ = ("_drafted", "_row", "error")

    def __init__(self, row: RowSampler, drafted: list[int]) -> None:
        self._row = row
        self._drafted = drafted
        self.error: InvalidRequest | None = None

    @property
    def state(self) -> SequenceState:
        return self._row.state

    @property
    def params(self) -> SamplingParams:
        return self._row.params

    @property
    def matcher(self) -> GrammarMatcher | None:
        return self._row.matcher

    @property
    def place(self) -> tuple[torch.Tensor, int] | None:
        return self._row.place

    @property
    def alters(self) -> bool:
        return self._row.alters

    @property
    def said(self) -> list[int]:
        """See `RowSampler.said`."""
        return self._row.state.output_ids + self._drafted

    @property
    def is_plain(self) -> bool:
        return self._row.is_plain

    @property
    def wants_best(self) -> bool:
        return self._row.wants_best

    @property
    def choice(self) -> int:
        return self._row.state.choice

    @property
    def position(self) -> int:
        """See `RowSampler.position`."""
        return self._row.state.num_tokens + len(self._drafted)

    def alter(self, logits: torch.Tensor) -> None:
        """See `RowSampler.alter`."""
        self._row.alter(logits, self._drafted)


Sampler = RowSampler | SamplerAhead


def make_sampler(state: SequenceState, checkpoint: Checkpoint, vocab_size: int) -> RowSampler:
    """The sampler of a sequence as it is now: begun, moved here or rebuilt.

    Args:
        vocab_size: The model's, which is the width of its logits.
    """
    grammar, matcher = state.sampling.grammar, None
    if grammar is not None:
        matcher = grammars_of(checkpoint).matcher(grammar)
    return RowSampler(state, vocab_size, checkpoint.eos_token_ids, matcher)


def sample(logits: torch.Tensor, rows: Sequence[Sampler], exit_layer: int) -> list[SampledToken]:
    """Process the logits and choose the next token of each row.

    Args:
        logits: float32 [num_rows, vocab]; overwritten.
        rows: Parallel to `logits`; the token sampled is at its `position`.
        exit_layer: Depth the logits were computed at.
    """
    tried = []
    if logits.device.type == "cpu":  # a device's masks are found while it computes
        tried = [i for i, row in enumerate(rows) if row.wants_best and row.matcher is not None]
    process(logits, rows, set(tried))
    return choose(logits, rows, exit_layer, _settled(logits, rows, tried) if tried else None)


def _settled(logits: torch.Tensor, rows: Sequence[Sampler], tried: list[int]) -> torch.Tensor:
    """The best token of every row: int64 [n].

    Args:
        tried: Rows that were not masked: for most, a look at their best token will do.
    """
    best: list[int] = best_of(logits).tolist()
    unknown = []
    for i in tried:
        matcher, row = rows[i].matcher, rows[i]
        assert matcher is not None
        token_id = matcher.next_token(row.said, best[i])
        if token_id is None:
            unknown.append(i)
        else:
            best[i], row.error = token_id, None
    settled = torch.tensor(best)
    if unknown:
        _mask(logits, rows, unknown)
        at = torch.tensor(unknown)
        settled.index_copy_(0, at, best_of(logits.index_select(0, at)))
    return settled


def process(
    logits: torch.Tensor, rows: Sequence[Sampler], unmasked: Container[int] = ()
) -> list[int]:
    """Apply every row's bias, bans, penalties and grammar in place; which rows that changed.

    Args:
        unmasked: Rows whose grammar is left out.
    """
    changed = []
    formed = []
    for i, row in enumerate(rows):
        if row.alters:
            row.alter(logits[i])
        if row.matcher is not None and i not in unmasked:
            formed.append(i)
        if row.alters or row.matcher is not None:
            changed.append(i)
    if formed:
        _mask(logits, rows, formed)
    return changed


def _mask(logits: torch.Tensor, rows: Sequence[Sampler], formed: list[int]) -> None:
    """Give no probability to what grammars do not allow, in place; all rows at once."""
    asked = [(m, rows[i].said) for i in formed if (m := rows[i].matcher) is not None]
    bits, failures = allowed(asked, torch.get_num_threads())
    for i, failure in zip(formed, failures, strict=True):
        rows[i].error = _failed(len(rows[i].said), failure) if failure else None
    if len(formed) == len(rows):
        ban(logits, bits)
        return
    at = index_on(logits.device, formed)
    own = logits.index_select(0, at)
    ban(own, bits)
    logits.index_copy_(0, at, own)


def ban(logits: torch.Tensor, bits: Bits) -> None:
    """Give the tokens whose bit is not set no probability, in place.

    Args:
        logits: float32 [n, vocab].
        bits: uint8 [n, bytes]; see `Bits`.
    """
    vocab_size, library = logits.shape[1], KernelLibrary.loaded
    if logits.device.type == "cpu" and library is not None and logits.is_contiguous():
        library.ban(*logits.shape, bits.ctypes.data, bits.shape[1], logits.data_ptr())
    elif logits.device.type == "cpu":
        kept = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
        torch.where(torch.from_numpy(kept), logits, logits.new_tensor(-math.inf), out=logits)
    else:
        on_device = to_device(bits, logits.device)
        logits.masked_fill_(~unpacked(on_device, vocab_size), -math.inf)


def unpacked(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`numpy.unpackbits` where the bits are: uint8 [n, bytes] → bool [n, vocab_size]."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, :, None] >> places & 1).bool().flatten(1)[:, :vocab_size]


def _failed(num_tokens: int, failure: str) -> InvalidRequest:
    return InvalidRequest(
        f"the grammar of the answer fails after {num_tokens} tokens: {failure}; make it simpler",
        code="grammar_failed",
    )


def end_not_finite(
    tokens: Sequence[SampledToken], rows: Sequence[Sampler], vocab_size: int
) -> None:
    """Give an error to those that are no token, as `best_of` says, and an id in its place."""
    for token, row in zip(tokens, rows, strict=True):
        if token.token_id == vocab_size:
            token.token_id = vocab_size - 1
            token.error = token.error or InvalidRequest(
                f"the model's numbers are not finite after {len(row.said)} tokens: there is no "
                "next one; ask for less logit_bias, or serve the model in bfloat16 or float32",
                code="numbers_not_finite",
            )


def choose(
    logits: torch.Tensor,
    rows: Sequence[Sampler],
    exit_layer: int,
    best: torch.Tensor | None = None,
) -> list[SampledToken]:
    """`sample` for logits that are already processed; keeps them.

    Args:
        best: `best_of` the logits, where it is known; overwritten.
    """
    vocab_size, is_host = logits.shape[-1], logits.device.type == "cpu"
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if is_host and len(drawn) == len(rows):
        best = _draw(logits, rows)
    elif best is None:
        best = best_of(logits)
    if drawn and not is_host:
        from quadriga.engine.cuda.sampling import draw_into

        best = draw_into(best, logits, rows, drawn)
    elif 0 < len(drawn) < len(rows):
        at = index_on(logits.device, drawn)
        best.index_copy_(0, at, _draw(logits.index_select(0, at), [rows[i] for i in drawn]))
    chosen: list[int] = best.tolist()  # waits for the device
    sampled = [SampledToken(token_id, exit_layer) for token_id in chosen]
    for i, row in enumerate(rows):
        if row.matcher is not None:
            sampled[i].error = row.error
    end_not_finite(sampled, rows, vocab_size)
    for num_top in {n for row in rows if (n := row.params.num_logprobs) is not None}:
        places = [i for i, row in enumerate(rows) if row.params.num_logprobs == num_top]
        asked = logits.index_select(0, index_on(logits.device, places))
        reports = token_logprobs(asked, [sampled[i].token_id for i in places], num_top)
        for i, report in zip(places, reports, strict=True):
            sampled[i].logprob = report
    return sampled


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """Log-probabilities of given tokens and of the `num_top` best ones, if so many are possible.

    Waits for the device, once.

    Args:
        logits: float32 [n, vocab], processed.
        token_ids: n tokens.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, index_on(logits.device, token_ids)[:, None])
    if num_top == 0:
        return [TokenLogprob(t, lp) for t, lp in zip(token_ids, own[:, 0].tolist(), strict=True)]
    num_top = min(num_top, logprobs.shape[-1])
    best = torch.topk(logprobs, num_top, dim=-1)
    # float64 holds both exactly: one copy instead of three.
    packed = torch.cat([own.double(), best.values.double(), best.indices.double()], dim=1)
    return [
        TokenLogprob(
            t,
            found[0],
            tuple(
                (int(i), v)
                for i, v in zip(found[1 + num_top :], found[1 : 1 + num_top], strict=True)
                if v > -math.inf
            ),
        )
        for t, found in zip(token_ids, packed.tolist(), strict=True)
    ]


def _draw(logits: torch.Tensor, rows: Sequence[Sampler]) -> torch.Tensor:
    """Draw one token per row from its truncated distribution, on a host: int64 [n].

    `logits` [n, vocab] is kept. `cuda.sampling` does the same on devices.
    """
    temperature = _column([max(r.params.temperature, LEAST_DIVISOR) for r in rows], np.float32)
    # The maximum goes first, so that a tiny temperature gives -inf, not inf - inf.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    scaled = _truncate(scaled, rows)
    probs = torch.softmax(scaled, dim=-1).double()
    u = uniforms(
        [r.params.seed for r in rows], [r.choice for r in rows], [r.position for r in rows]
    )
    return torch.tensor(invert_cdf(probs.numpy(), u))


def _column(values: Sequence[float], dtype: type[np.generic]) -> torch.Tensor:
    """One value a row: [n, 1]."""
    return torch.from_numpy(np.array(values, dtype=dtype))[:, None]


def invert_cdf(probs: npt.NDArray[np.float64], u: npt.NDArray[np.float64]) -> list[int]:
    """First id, in vocabulary order, at which the cumulative probability exceeds u · total.

    The size of the vocabulary, which is no id, where the probabilities are not numbers.

    Args:
        probs: float64 [n, vocab], non-negative, not necessarily summing to one.
        u: [n] in [0, 1).
    """
    cumulative = probs.cumsum(axis=1)
    chosen = []
    for row, target in zip(cumulative, u * cumulative[:, -1], strict=True):
        index = int(np.searchsorted(row, target, side="right"))
        if index == len(row) and not math.isnan(target):
            # Rounding carried `target` to the total; the last id with probability is meant.
            index = int(np.searchsorted(row, target, side="left"))
        chosen.append(index)
    return chosen


def _truncate(scaled: torch.Tensor, rows: Sequence[Sampler]) -> torch.Tensor:
    """Set what min-p, top-k and top-p exclude to -inf; [n, vocab], row maximum 0."""
    if any(r.params.min_p > 0 for r in rows):
        floor = _column([r.params.min_p for r in rows], np.float32).log()
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    wants_top_k = any(0 < r.params.top_k < scaled.shape[-1] for r in rows)
    wants_top_p = any(r.params.top_p < 1.0 for r in rows)
    if not wants_top_k and not wants_top_p:
        return scaled
    if scaled.shape[-1] > WHOLE_SORT:
        kept = torch.full_like(scaled, float("-inf"))
        for row, values, into in zip(rows, scaled, kept, strict=True):
            ids = _best(values, row.params.top_k, row.params.top_p)
            into[ids] = values[ids]
        return kept
    return _truncate_sorted(scaled, rows, wants_top_k=wants_top_k, wants_top_p=wants_top_p)


def _best(values: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Ids of the tokens that top-k and top-p leave of one row's, best first, ties by id.

    Only as many are ranked as it takes: to sort a large vocabulary takes longer than many a
    model's step.

    Args:
        values: float32 [vocab], row maximum 0.
    """
    vocab = values.shape[0]
    top_k = top_k if 0 < top_k < vocab else 0
    if not top_k and top_p >= 1.0:
        return torch.arange(vocab)
    count = top_k or FIRST_RANKED
    total = values.double().exp().sum()
    while True:
        is_all = count >= vocab
        least = values.min() if is_all else torch.topk(values, count).values[-1]
        # What cannot be drawn is not ranked.
        ids = torch.nonzero((values >= least) & (values > float("-inf")))[:, 0]
        ids = ids[torch.argsort(values[ids], descending=True, stable=True)]
        if top_k:
            ids = ids[:top_k]
            total = values[ids].double().exp().sum()
        probs = values[ids].double().exp() / total
        before = probs.cumsum(0) - probs
        num_inside = max(1, int((before < top_p).sum())) if top_p < 1.0 else len(ids)
        if top_k or is_all or num_inside < len(ids):
            return ids[:num_inside]
        count *= 8


def _truncate_sorted(
    scaled: torch.Tensor, rows: Sequence[Sampler], *, wants_top_k: bool, wants_top_p: bool
) -> torch.Tensor:
    """`_best` of all rows at once, where the vocabulary is small."""
    vocab = scaled.shape[-1]
    # Stable: equal logits rank by id, in every batch alike.
    values, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if wants_top_k:
        limit = _column([r.params.top_k or vocab for r in rows], np.int64)
        rank = torch.arange(vocab)
        values = values.masked_fill(rank >= limit, float("-inf"))
    if wants_top_p:
        top_p = _column([r.params.top_p for r in rows], np.float64)
        probs = torch.softmax(values.double(), dim=-1)
        before = probs.cumsum(dim=-1) - probs
        outside = before >= top_p
        outside[:, 0] = False  # top_p may be 0: the best token always stays
        # A top_p of 1 keeps all: rounding must not cut the tail of rows that did not ask.
        outside &= top_p < 1.0
        values = values.masked_fill(outside, float("-inf"))
    return torch.full_like(scaled, float("-inf")).scatter(1, order, values)
