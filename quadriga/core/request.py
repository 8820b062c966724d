"""A request: sampling parameters, the portable state of its sequence, and its output."""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Literal, get_args

from quadriga.checkpoint.exits import FULL_DEPTH, ExitParams
from quadriga.core.forecast import LengthPrediction
from quadriga.core.grammar import Grammar, GrammarKind
from quadriga.core.relative_time import CompactPickleMixin, RelativeTimeMixin
from quadriga.errors import InvalidRequest

AUTO_MODEL = "quadriga-auto"
"""The model id of those who let us choose."""


Pooling = Literal["mean", "last"]
"""How the hidden states of a prompt's tokens become one vector: their mean, or the last one's."""


class FinishReason(StrEnum):
    """Why a sequence ended, in the words of the OpenAI API.

    `TOOL_CALLS` is what clients see where an answer that stopped asks for calls.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


def token_digest(token_ids: Sequence[int], before: int = 0) -> int:
    """CRC-32 of token ids, 8 bytes each, little-endian.

    Args:
        before: Of the tokens that precede these.
    """
    return zlib.crc32(struct.pack(f"<{len(token_ids)}q", *token_ids), before)


@dataclass(frozen=True, slots=True)
class SamplingParams(CompactPickleMixin):
    """How the next token is chosen; `LLM` and the service check the values.

    Attributes:
        max_tokens: Most tokens to generate; 0 only with `num_prompt_logprobs` or `pooling`.
        min_tokens: Before this many, end tokens and stop ids are banned, and stop strings are text.
        temperature: 0 is greedy.
        top_k: 0 is off.
        seed: The same one gives the same random draws, and so does leaving it out; the service
            draws one where its client gave none.
        num_logprobs: Alternatives to report per token; 0 reports the chosen token alone, None
            reports nothing.
        num_prompt_logprobs: The same for the prompt's own tokens (`echo` with `logprobs`).
        stop_token_ids: End the answer, and are no part of its text.
        grammar: The form that the answer must have; None for any.
        pooling: Of an embedding: the prompt's hidden states are the answer, and nothing is
            generated. None: of any other request.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    pooling: Pooling | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check(self, vocab_size: int) -> None:
        """Raises: InvalidRequest: A value is outside what the sampler can do."""
        for name, (low, high) in SAMPLING_BOUNDS.items():
            value = getattr(self, name)
            kind: Any = Integral if isinstance(low, int) else Real
            if value is None and name.endswith("logprobs"):
                continue
            if not isinstance(value, kind) or not low <= value <= high:
                what = "a whole number " if kind is Integral else ""
                raise InvalidRequest(
                    f"{name}: {value!r:.80} must be {what}in {low}..{high}", param=name
                )
        for name, kinds in (("stop_token_ids", (Integral,)), ("logit_bias", (Integral, Real))):
            value, what = getattr(self, name), "pairs of id and value" if kinds[1:] else "ids"
            is_list = isinstance(value, tuple | list)
            entries = value if kinds[1:] or not is_list else [(entry,) for entry in value]
            is_right = [
                isinstance(e, tuple | list)
                and len(e) == len(kinds)
                and all(map(isinstance, e, kinds))
                for e in (entries if is_list else ())
            ]
            if not is_list or not all(is_right):
                raise InvalidRequest(f"{name}: {value!r:.80} must be a list of {what}", param=name)
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids: {token_id} is no token id; ids are below {vocab_size}",
                    param="stop_token_ids",
                )
        for token_id, bias in self.logit_bias:
            if not 0 <= token_id < vocab_size or not bias <= 1e6:  # -inf bans, NaN does not pass
                raise InvalidRequest(
                    f"logit_bias: {bias} for {token_id}; ids are below {vocab_size}, values up to "
                    "1e6",
                    param="logit_bias",
                )
        if self.pooling not in (None, *get_args(Pooling)):
            raise InvalidRequest(f"pooling: {self.pooling!r:.80} is no pooling", param="pooling")
        if self.pooling is not None and (self.max_tokens or self.num_prompt_logprobs is not None):
            raise InvalidRequest(
                f"pooling: {self.pooling!r} makes an embedding, which has no tokens; set "
                f"max_tokens to 0, not {self.max_tokens}, and leave num_prompt_logprobs out",
                param="pooling",
            )
        least = max(self.min_tokens, self.num_prompt_logprobs is None and self.pooling is None)
        if self.max_tokens < least:
            raise InvalidRequest(
                f"max_tokens: {self.max_tokens} must be at least 1 (0 only with "
                f"num_prompt_logprobs or pooling) and at least min_tokens ({self.min_tokens})",
                param="max_tokens",
            )
        form = self.grammar
        if form is not None and not (
            isinstance(form, Grammar)
            and form.kind in get_args(GrammarKind)
            and isinstance(form.text, str)
        ):
            known = ", ".join(get_args(GrammarKind))
            raise InvalidRequest(
                f"grammar: {form!r:.80} is no Grammar with a text and one of the kinds {known}",
                param="grammar",
            )
        if self.grammar is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidRequest(
                f"{name}: not with a grammar, which says where the answer may end; leave it out",
                param=name,
            )


SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "max_tokens": (0, 1 << 30),
    "min_tokens": (0, 1 << 30),
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1 << 30),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "num_logprobs": (0, 1000),
    "num_prompt_logprobs": (0, 1000),
}
"""Of `SamplingParams`; those of requests are narrower."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the processed distribution, and of its rivals.

    Attributes:
        logprob: Natural logarithm; None for the first prompt token, which has no predecessor.
        top: (token id, logprob) pairs, most probable first.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SequenceState(RelativeTimeMixin):
    """All there is to one sequence; its KV cache can be rebuilt from this alone.

    A request with `n` choices or several prompts is several sequences of one request id.

    Attributes:
        sequence_id: Unique in the cluster.
        choice: Index among the request's choices; part of the random key, so that choices differ.
        model: Model id the sequence runs on.
        prompt_ids: Token ids of the prompt; never empty.
        output_ids: Token ids emitted so far; the next emission has index `len(output_ids)`.
        exit_layers: Depth each output token left at, parallel to `output_ids`.
        logprobs: Of the output tokens, parallel to them, where the request asked for them; they are
            kept with the sequence so that another ingress can go on with it.
        prompt_logprobs: Of the prompt, where the request asked for them and it is computed.
        priority: Lower is served first.
        deadline_unix_s: When the client stops waiting, by the clock of the machine it is on.
        ingress_id: Who holds the client's stream.
        epoch: Raised at every change of owner; an owner with an older epoch must not emit.
        num_moves: Live migrations so far.
        moved_unix_s: When the last one was committed, by the same clock; 0 before the first.
        prediction: Tokens still to come, as last said by a length head.
        predicted_at: Output tokens there were then.
        expected: Tokens of the whole answer, as a length head first said.
        num_pauses: How often it was moved to host memory so far.
        num_breaches: Output tokens that left the deepest exit open to them below their threshold.
        expected_layers: Layers a token that it was first expected to run; 0 before, and where its
            tokens may not leave early.
        num_lowered: Output tokens that left below their threshold within the quality budget.
        depth_pool: Of the last replica with one that it ran on; see `ReportOptions.depth_pool`.
        traceparent: Context of the request's trace; None where it is not traced.
        claim: Who asks with this may take the sequence over from an ingress that is gone; empty
            where nobody may.
        cache_salt: Prompts share computed KV where they have the same.
        adapter: The LoRA adapter of `model` that it runs with; empty for none.
    """

    INSTANTS = ("deadline_unix_s", "moved_unix_s")

    sequence_id: str
    request_id: str
    model: str
    prompt_ids: list[int]
    sampling: SamplingParams
    ingress_id: str
    arrival_unix_s: float
    deadline_unix_s: float
    exits: ExitParams = FULL_DEPTH
    choice: int = 0
    priority: int = 0
    epoch: int = 0
    output_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    num_moves: int = 0
    moved_unix_s: float = 0.0
    prediction: LengthPrediction | None = None
    predicted_at: int = 0
    expected: LengthPrediction | None = None
    num_pauses: int = 0
    num_breaches: int = 0
    expected_layers: float = 0.0
    num_lowered: int = 0
    depth_pool: str = ""
    traceparent: str | None = None
    claim: str = ""
    cache_salt: str = ""
    adapter: str = ""

    def copy(self) -> SequenceState:
        """It as it is now: tokens that come later are not in it."""
        return replace(
            self,
            output_ids=list(self.output_ids),
            exit_layers=list(self.exit_layers),
            logprobs=list(self.logprobs),
        )

    def progress(self) -> dict[str, Any]:
        """What became of it so far beside its tokens: the fields that its ingress keeps as well."""
        said, at = self.prediction, self.predicted_at
        if self.expected is None and said is not None:
            self.expected = LengthPrediction(at + said.mean, at + said.lower, at + said.upper)
        return {name: getattr(self, name) for name in PROGRESS_FIELDS}

    @property
    def counts(self) -> dict[str, int]:
        """What happened to it so far, as usages name it."""
        moves, pauses, breaches = self.num_moves, self.num_pauses, self.num_breaches
        return {"migrations": moves, "pauses": pauses, "breaches": breaches}

    def note_progress(self, progress: dict[str, Any]) -> None:
        """Take what its replica says became of it."""
        for name, value in progress.items():
            setattr(self, name, value)

    @property
    def prefix_salt(self) -> str:
        """Prompts share computed KV where this is the same."""
        return f"{self.adapter}\0{self.cache_salt}"

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens the sequence can grow to; what its KV reservation must cover."""
        return len(self.prompt_ids) + self.sampling.max_tokens


PROGRESS_FIELDS = (
    "num_moves",
    "num_pauses",
    "num_breaches",
    "num_lowered",
    "expected",
    "prediction",
    "predicted_at",
    "expected_layers",
    "depth_pool",
)


def layers_of(state: SequenceState) -> float:
    """Layers that a token is expected to run: infinite for all there are, 0 for nobody knows."""
    exits = state.exits
    return state.expected_layers if exits.leaves_early else float(exits.max_depth or math.inf)


def remaining_of(state: SequenceState) -> LengthPrediction | None:
    """Tokens a sequence will still generate, by all that is known now; None where nothing is."""
    produced = len(state.output_ids)
    most = float(max(0, state.sampling.max_tokens - produced))
    if state.sampling.ignore_eos and not state.sampling.stop_token_ids:
        return LengthPrediction(most, most, most)
    said = state.prediction
    if said is None:
        return None
    since = produced - state.predicted_at
    least = float(max(0, state.sampling.min_tokens - produced))
    mean, lower, upper = (
        min(max(tokens - since, least), most) for tokens in (said.mean, said.lower, said.upper)
    )
    # Who outlives what was said goes on for a while: the next prediction will tell how long.
    return LengthPrediction(max(mean, min(1.0, most)), lower, max(upper, min(1.0, most)))


@dataclass(frozen=True, slots=True)
class ResumableSequence(CompactPickleMixin):
    """A running sequence as one finds it whose client came back through another ingress.

    Attributes:
        claim: What it was asked for by; see `SequenceState`.
        replica: Where it runs.
        epoch: Of its owner.
        model: That it runs on, which may have been chosen for it.
    """

    claim: str
    replica: str
    sequence_id: str
    epoch: int
    model: str


@dataclass(slots=True)
class SampledToken:
    """What a runner returns for one row of one step.

    Attributes:
        exit_layer: Number of layers that were run for this token.
        prompt_logprobs: Only from a prefill that was asked for them.
        embedding: The same: float32 [hidden].
        error: The sequence ends in this error, without the token.
    """

    token_id: int
    exit_layer: int
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    embedding: array[float] | None = None
    error: InvalidRequest | None = None
