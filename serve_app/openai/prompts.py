"""The prompt of a request: its four forms in completions, and the messages of a chat."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from quadriga.config.ingress import IngressConfig
from quadriga.errors import ContextTooLong, InvalidRequest
from serve_app.openai.bodies import shown
from serve_app.openai.models import ServedModel
from serve_app.openai.schema import ChatMessage
from serve_app.openai.unsupported import refuse_unsupported
from serve_app.request.spec import Prompt

SLICE_TOKENS = 65_536
"""Some milliseconds' worth of looking at token ids."""
PROMPTS_AT_ONCE = 8
"""Short prompts of one request are read between two turns of the event loop."""


class Encode(Protocol):
    """`EngineClient.encode`."""

    async def __call__(
        self, model: ServedModel, text: str, add_special_tokens: bool, *, field: str
    ) -> list[int]: ...


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: text content, `developer` as `system`.

    Raises: InvalidRequest for a part that is not text, and for what is not supported.
    """
    plain: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        refuse_unsupported(message.model_extra or {}, message.unsupported, f"messages.{i}.")
        content = message.content
        if isinstance(content, list):
            texts = []
            for j, part in enumerate(content):
                value = part.refusal if part.type == "refusal" else part.text
                if part.type not in ("text", "refusal") or value is None:
                    raise InvalidRequest(
                        f"messages.{i}.content.{j}: only text parts are supported, "
                        f"got {shown(part.type)}",
                        param=f"messages.{i}.content.{j}",
                    )
                texts.append(value)
            content = "".join(texts)
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": content or ""}
        if message.name is not None:
            entry["name"] = message.name
        plain.append(entry)
    return plain


async def read_prompts(
    value: object, model: ServedModel, limits: IngressConfig, encode: Encode, *, n: int, echo: bool
) -> tuple[Prompt, ...]:
    """Read the four forms of `prompt`."""
    items: list[Any]
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        items, names = value, [f"prompt.{i}" for i in range(len(value))]
    elif isinstance(value, str) or (isinstance(value, list) and value):
        items, names = [value], ["prompt"]
    else:
        what = "is empty" if value == [] else f"must be text or token ids, got {shown(value)}"
        raise InvalidRequest(f"prompt: {what}", param="prompt")
    if len(items) > limits.max_prompts:
        raise InvalidRequest(
            f"prompt: {len(items)} prompts, above the limit of {limits.max_prompts}; "
            "send them in several requests",
            param="prompt",
        )
    if len(items) * n > limits.max_choices:
        raise InvalidRequest(
            f"prompt: {len(items)} prompts with n = {n} make {len(items) * n} choices, above the "
            f"limit of {limits.max_choices}; lower n or send fewer prompts",
            param="prompt",
        )
    prompts: list[Prompt] = []
    for name, item in zip(names, items, strict=True):
        if type(item) is not type(items[0]):
            raise InvalidRequest(f"{name}: prompts must all be of one kind", param=name)
        prompts.append(await _one_prompt(item, name, model, encode, echo=echo))
        if len(prompts) % PROMPTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return tuple(prompts)


async def _one_prompt(
    item: object, name: str, model: ServedModel, encode: Encode, *, echo: bool
) -> Prompt:
    if isinstance(item, str):
        if not item:
            raise InvalidRequest(f"{name}: is empty", param=name)
        token_ids = await encode(model, item, True, field=name)
        if not token_ids:
            raise InvalidRequest(f"{name}: has no tokens", param=name)
        check_vocabulary(token_ids, model, name)
        return Prompt(token_ids, item)
    if not isinstance(item, list):
        raise InvalidRequest(f"{name}: must be text or token ids, got {shown(item)}", param=name)
    if not item:
        raise InvalidRequest(f"{name}: is empty", param=name)
    check_length(len(item), model, name)
    await check_token_ids(item, name, model)
    return Prompt(item, model.tokenizer.decode(item) if echo else "")


def check_length(num_tokens: int, model: ServedModel, field: str) -> None:
    """Refuse token ids by their number alone. Raises: ContextTooLong."""
    if num_tokens > model.max_model_len:
        raise ContextTooLong(
            f"{field}: {num_tokens} tokens; {model.id} takes {model.max_model_len} with the answer"
            f"{model.longer_remedy}; shorten it",
            param=field,
        )


async def check_token_ids(items: list[Any], field: str, model: ServedModel) -> None:
    """Look at each; after every `SLICE_TOKENS` others have their turn. Raises: InvalidRequest."""
    size = model.checkpoint.vocab_size
    for i, token_id in enumerate(items, 1):
        if type(token_id) is not int:
            raise InvalidRequest(
                f"{field}.{i - 1}: token ids are whole numbers, got {shown(token_id)}",
                param=f"{field}.{i - 1}",
            )
        if not 0 <= token_id < size:
            raise InvalidRequest(
                f"{field}.{i - 1}: token id {shown(token_id)} is outside the vocabulary of "
                f"{model.id} (0 to {size - 1})",
                param=f"{field}.{i - 1}",
            )
        if i % SLICE_TOKENS == 0:
            await asyncio.sleep(0)


def check_vocabulary(token_ids: list[int], model: ServedModel, field: str) -> None:
    highest = max(token_ids)
    if highest >= model.checkpoint.vocab_size:
        raise InvalidRequest(
            f"{field}: token id {highest} is outside the vocabulary of {model.id} "
            f"(0 to {model.checkpoint.vocab_size - 1})",
            param=field,
        )
