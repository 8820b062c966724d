"""Fields of other servers' APIs that would change an answer and have no effect here.

A request that names one of them is refused with 400, unless its value asks for nothing: null, what
that API does by default, or what matters only for a prompt that does not fit, which is refused.
This table is the only list of them: request validation, the OpenAPI document and docs/clients.md
all follow it. Fields that change nothing about an answer (`metadata`, `store`, `service_tier`, …)
are not here: they are accepted and named in the header `x-quadriga-ignored`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quadriga.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field of a request that is refused.

    Attributes:
        neutral: Values beside null that ask for nothing, and so are accepted.
        instead: The field that does the same here; empty where there is none.
    """

    name: str
    neutral: tuple[Any, ...] = ()
    instead: str = ""

    def accepts(self, value: object) -> bool:
        """Whether a value asks for nothing."""
        return value is None or any(_is_same(value, item) for item in self.neutral)

    @property
    def schema(self) -> dict[str, Any]:
        """The field in the OpenAPI document."""
        remedy = f" Use `{self.instead}`." if self.instead else ""
        return {
            "enum": [None, *self.neutral],
            "description": f"Not supported: {self._allowed()} only.{remedy}",
        }

    def error(self, field: str) -> InvalidRequest:
        """The refusal of any other value.

        Args:
            field: The field's place in the request, as `messages.0.tool_calls`.
        """
        remedy = f"use {self.instead}" if self.instead else "leave it out"
        return InvalidRequest(
            f"{field}: not supported by this server; {remedy} (accepted: {self._allowed()})",
            param=field,
            code="unsupported_parameter",
        )

    def _allowed(self) -> str:
        return " or ".join(json.dumps(value) for value in (None, *self.neutral))


def _is_same(value: object, neutral: object) -> bool:
    """Equal as JSON values: true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _table(*groups: Iterable[UnsupportedField]) -> dict[str, UnsupportedField]:
    return {field.name: field for group in groups for field in group}


_Field = UnsupportedField
NO_REASONING = "none"
"""As `reasoning_effort`: templates are told `enable_thinking: false`."""

STRUCTURAL_TAG = _Field(
    "structural_tag", instead="strict functions in tools, or structured_outputs.grammar"
)

STRUCTURE = (
    # SGLang, llama.cpp
    _Field("regex", instead="structured_outputs.regex"),
    _Field("ebnf", instead="structured_outputs.grammar"),
    _Field("json_schema", instead="structured_outputs.json"),
    STRUCTURAL_TAG,
    _Field("grammar", instead="structured_outputs.grammar"),
    # vLLM
    _Field("guided_whitespace_pattern", instead="structured_outputs.disable_any_whitespace"),
    _Field("guided_decoding_backend", ("auto", "guidance")),
)
"""Answers of a given form."""

DECODING = (
    _Field("use_beam_search", (False,)),
    _Field("length_penalty", (1,)),
    _Field("early_stopping", (False,)),
    _Field("num_beams", (1,)),
    _Field("allowed_token_ids"),
    _Field("bad_words", ([],)),
    _Field("logits_processors", ([],)),
    _Field("custom_logit_processor"),
    _Field("custom_params", ({},)),
    _Field("vllm_xargs", ({},)),
    _Field("no_repeat_ngram_size", (0,)),
    _Field("repetition_detection"),
    _Field("thinking_token_budget"),
    _Field("typical_p", (1,)),
    _Field("top_a", (0,)),
    _Field("tfs_z", (1,)),
    _Field("mirostat", (0,)),
    _Field("xtc_probability", (0,)),
    _Field("dry_multiplier", (0,)),
    _Field("dynatemp_range", (0,)),
    _Field("stop_regex", ([], "")),
    _Field("prediction"),
    _Field("repeat_penalty", (1,), instead="repetition_penalty"),
    _Field("watermarking", (False,)),
)
"""Which tokens are chosen."""

OUTPUT = (
    _Field("prompt_logprobs"),
    _Field("include_stop_str_in_output", (False,)),
    _Field("no_stop_trim", (False,)),
    _Field("skip_special_tokens", (True,)),
    _Field("detokenize", (True,)),
    _Field("return_tokens_as_token_ids", (False,)),
    _Field("return_hidden_states", (False,)),
    _Field("return_routed_experts", (False,)),
    _Field("logprob_token_ids", ([],)),
)
"""What of the tokens is shown."""

INPUT = (
    _Field("truncate_prompt_tokens", (-1,)),
    _Field("prompt_embeds"),
    _Field("lora_path", ("",)),
    _Field("lora_request"),
    _Field("session_params", ({},)),
    _Field("images", ([],)),
    _Field("audio"),
    _Field("multi_modal_data", ({},)),
    _Field("mm_processor_kwargs", ({},)),
    _Field("media_io_kwargs", ({},)),
)
"""Input beside the text."""

OTHER_NAMES = (
    _Field("max_new_tokens", instead="max_tokens"),
    _Field("min_new_tokens", instead="min_tokens"),
    _Field("max_output_tokens", instead="max_tokens"),
    _Field("n_predict", instead="max_tokens"),
    _Field("stop_sequences", ([],), instead="stop"),
    _Field("random_seed", instead="seed"),
)
"""Fields with another name here."""

STRUCTURED_OUTPUTS = _table(
    (
        STRUCTURAL_TAG,
        _Field("whitespace_pattern", instead="structured_outputs.disable_any_whitespace"),
        _Field(
            "disable_additional_properties",
            (False,),
            instead='"additionalProperties": false in the schema',
        ),
    )
)
"""Of `structured_outputs`."""

RESPONSE_FORMAT = _table((_Field("schema", instead="response_format.json_schema.schema"),))
"""Of `response_format`."""

COMPLETIONS = _table(
    STRUCTURE,
    DECODING,
    OUTPUT,
    INPUT,
    OTHER_NAMES,
    (
        _Field("suffix", ("",)),
        _Field("add_special_tokens", (True,)),
    ),
)
"""Of POST /v1/completions."""

TEMPLATE = (
    _Field("add_generation_prompt", (True,)),
    _Field("continue_final_message", (False,)),
    _Field("chat_template"),
    _Field("documents", ([],)),
)
"""How messages become a prompt."""

CHAT = _table(
    STRUCTURE,
    DECODING,
    OUTPUT,
    INPUT,
    OTHER_NAMES,
    TEMPLATE,
    (
        _Field("functions", ([],), instead="tools"),
        _Field("function_call", ("none", "auto"), instead="tool_choice"),
        _Field("modalities", ([], ["text"])),
        _Field("web_search_options"),
        _Field("moderation"),
        _Field("reasoning", ({},)),
        _Field("reasoning_effort", (NO_REASONING,)),
        _Field("thinking"),
        _Field("enable_thinking", instead="chat_template_kwargs"),
        _Field("verbosity", ("medium",)),
        _Field("safe_prompt", (False,)),
        _Field("add_special_tokens", (False,)),
        _Field("echo", (False,)),
        _Field("best_of", (1,), instead="n"),
    ),
)
"""Of POST /v1/chat/completions."""

MESSAGE = _table(
    (
        _Field("function_call", instead="tool_calls"),
        _Field("audio"),
        _Field("prefix", (False,)),
        _Field("partial", (False,)),
    )
)
"""Of one message of a conversation."""

RESPONSES = _table(
    (
        _Field("previous_response_id", instead="input, with the whole conversation"),
        _Field("conversation", instead="input, with the whole conversation"),
        _Field("previous_response", instead="input, with the whole conversation"),
        _Field("previous_input_messages", instead="input, with the whole conversation"),
        _Field("moderation"),
        _Field("prompt"),
        _Field("background", (False,)),
        _Field("include", ([], ["reasoning.encrypted_content"])),
        _Field("reasoning", ({}, {"effort": NO_REASONING})),
        _Field("truncation", ("disabled", "auto")),
        _Field("max_tool_calls"),
        _Field("top_logprobs", (0,)),
        _Field("verbosity", ("medium",)),
        _Field("stream_options", ({}, {"include_obfuscation": False})),
        _Field("context_management"),
        _Field("max_tokens", instead="max_output_tokens"),
        _Field("max_completion_tokens", instead="max_output_tokens"),
        _Field("n", (1,)),
        _Field("logprobs", (False,)),
        _Field("return_token_ids", (False,)),
        _Field("messages", instead="input"),
        _Field("response_format", instead="text.format"),
    )
)
"""Of POST /v1/responses, and of its `text`."""

EMBEDDINGS = _table(
    (
        _Field("truncate_prompt_tokens", (-1,)),
        _Field("truncate", (False,)),
        _Field("input_type"),
        _Field("prompt_name"),
        _Field("messages", instead="input"),
        _Field("add_special_tokens", (True,)),
        _Field("embed_dtype", ("float32",)),
        _Field("mm_processor_kwargs", ({},)),
    )
)
"""Of POST /v1/embeddings."""

TOKENIZE = _table(
    TEMPLATE,
    (
        _Field("mm_processor_kwargs", ({},)),
        _Field("truncate_prompt_tokens"),
    ),
)
"""Of POST /tokenize."""
