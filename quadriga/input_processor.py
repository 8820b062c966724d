"""Turns the prompts of one call of `quadriga.LLM` into sequences, once all of them were checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from numbers import Integral
from typing import Any

from quadriga.checkpoint.exits import ExitParams, read_exit_params
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.adapters import find_adapter
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import ContextTooLong, InvalidRequest
from quadriga.text import AnswerText, TextTokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or a conversation: messages with `role` and `content`."""


class InputProcessor:
    """Checks what a caller asks of one loaded model, and makes its sequences.

    Args:
        spec: What the model was loaded with.
        max_tokens: The most tokens of a prompt and its answer together.
        tokenizer: None where prompts are token ids and answers have no text.
        deterministic: Exits are used only where they give the same tokens in every batch.
    """

    def __init__(
        self,
        spec: EngineSpec,
        max_tokens: int,
        tokenizer: TextTokenizer | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self._spec, self._max_tokens, self._tokenizer = spec, max_tokens, tokenizer
        self._is_deterministic = deterministic
        self._names = itertools.count()

    def sequences(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        exits: ExitParams | None,
        stop: Sequence[str],
        adapter: str,
    ) -> list[SequenceState]:
        """Read and check a call of `LLM.generate`, whose arguments these are.

        Raises: InvalidRequest, ContextTooLong, UnknownModel.
        """
        find_adapter(self._spec.adapters, adapter, param="adapter")
        asked = _each(prompts)
        is_each = isinstance(sampling_params, Sequence)
        given: Any = sampling_params if is_each else [sampling_params] * len(asked)
        if len(given) != len(asked):
            raise InvalidRequest(
                f"sampling_params: {len(given)} for {len(asked)} prompts; give one for all, or one "
                "for each",
                param="sampling_params",
            )
        is_text = isinstance(stop, list | tuple | set) and all(
            isinstance(s, str) and s for s in stop
        )
        if not is_text or (stop and self._tokenizer is None):
            raise InvalidRequest(
                f"stop: must be a list of texts, none empty, of an LLM with text; got {stop!r:.80}",
                param="stop",
            )
        spec = self._spec
        wanted = read_exit_params(
            exits,
            spec.exits,
            spec.checkpoint.id,
            depth=spec.depth,
            full=spec.checkpoint.num_layers,
            deterministic=self._is_deterministic,
        )
        for index, params in enumerate(given if is_each else [sampling_params]):
            with _about(f"sampling_params.{index}" if is_each else ""):
                self._check_sampling(params)
        states = []
        for index, (prompt, params) in enumerate(zip(asked, given, strict=True)):
            with _about(f"prompts.{index}"):
                states.append(self._sequence(prompt, params, wanted, adapter))
        return states

    def answer_texts(
        self,
        prompts: Prompt | Sequence[Prompt],
        states: Sequence[SequenceState],
        stop: Sequence[str],
    ) -> list[AnswerText]:
        """What turns the answers' tokens into text; empty where answers have none."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return []
        return [
            AnswerText(
                # An answer in a conversation is a text of its own; others go on with the prompt.
                tokenizer.detokenizer(after=() if _is_chat(prompt) else state.prompt_ids),
                tuple(stop),
                state.sampling.min_tokens,
            )
            for prompt, state in zip(_each(prompts), states, strict=True)
        ]

    def _sequence(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        exits: ExitParams,
        adapter: str,
    ) -> SequenceState:
        """Raises: InvalidRequest, ContextTooLong: Without a `param`."""
        checkpoint, most = self._spec.checkpoint, self._max_tokens
        ids = self._prompt_ids(prompt)
        wrong = [
            t for t in ids if not isinstance(t, Integral) or not 0 <= int(t) < checkpoint.vocab_size
        ]
        if wrong or not ids:
            what = f"{wrong[0]!r:.40} is no token id" if wrong else "has no tokens"
            raise InvalidRequest(f"{what}; ids are whole numbers below {checkpoint.vocab_size}")
        ids = [int(t) for t in ids]  # of numpy too
        if sampling is None:
            sampling = SamplingParams(max(1, most - len(ids)), **asdict(checkpoint.sampling))
        if len(ids) + sampling.max_tokens > most:
            raise ContextTooLong(
                f"{len(ids)} tokens and max_tokens ({sampling.max_tokens}) are more than the "
                f"{most} that {checkpoint.id} takes here; shorten it or lower max_tokens"
            )
        name, model = str(next(self._names)), checkpoint.id
        return SequenceState(
            name, name, model, ids, sampling, "", 0.0, math.inf, exits, adapter=adapter
        )

    def _check_sampling(self, sampling: SamplingParams | None) -> None:
        """Raises: InvalidRequest: They are none, or ask for what this model cannot do."""
        checkpoint = self._spec.checkpoint
        if sampling is None:
            return
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequest(
                f"sampling_params: must be SamplingParams, got {sampling!r:.40}",
                param="sampling_params",
            )
        sampling.check(checkpoint.vocab_size)
        if sampling.grammar is not None:
            from quadriga.text.grammar import grammars_of  # as torch, not with this module

            grammars_of(checkpoint).prepare(sampling.grammar)
        if sampling.pooling is not None and self._spec.depth < checkpoint.num_layers:
            raise InvalidRequest(
                f"pooling: embeddings need all {checkpoint.num_layers} layers of {checkpoint.id}, "
                f"and {self._spec.depth} are loaded; leave depth out",
                param="pooling",
            )

    def _prompt_ids(self, prompt: Prompt) -> list[Any]:
        """What a prompt is as token ids, which may be none. Raises: InvalidRequest."""
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise InvalidRequest(f"must be text, token ids or messages, got {prompt!r:.40}")
        if self._tokenizer is None:
            return list[Any](prompt)
        for message in prompt if _is_chat(prompt) else ():
            # A template may leave out what it does not know, without a word.
            if not (
                isinstance(message, Mapping)
                and isinstance(message.get("role"), str)
                and (message.get("content") is not None or message.get("tool_calls"))
            ):
                raise InvalidRequest(
                    f"{message!r:.60} is no message, which has a role and content; text and token "
                    "ids are prompts as they are"
                )
        return self._tokenizer.prompt_ids(prompt)


@contextmanager
def _about(field: str) -> Iterator[None]:
    """Have what is refused inside begin with a field; with an empty one it stays as it is."""
    try:
        yield
    except InvalidRequest as exc:
        if not field:
            raise
        text = f"{field}: {exc.message}"
        raise type(exc)(text, param=exc.param or field, code=exc.code) from exc


def _each(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """The prompts, also where one alone was given; arrays as lists."""
    given = _plain(prompts)
    if isinstance(given, Mapping) or not hasattr(given, "__getitem__"):
        kinds = "text, token ids or messages, or a list of these"
        raise InvalidRequest(f"prompts: must be {kinds}, got {given!r:.40}", param="prompts")
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], Integral | Mapping))
    return [given] if is_one else [_plain(prompt) for prompt in given]


def _plain(value: Any) -> Any:
    """An array of numpy or torch as lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and any(isinstance(part, Mapping) for part in prompt)
