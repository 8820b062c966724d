"""What the service under test says about itself: its models, their context, its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadgen.load.workload import RequestSpec
from loadgen.wire.client_http import HttpClient
from quadriga.errors import ConfigError

AUTO_ALIAS = "quadriga-auto"
# Words whose tokens make synthetic prompts; any tokenizer has tokens for them.
POOL_TEXT = (
    "the quick brown fox jumps over a lazy dog while seven bright stars shine on old stone roads "
    "near cold rivers and every small bird sings about rain wind snow fire bread milk honey salt "
    "red blue green white black one two three four five six seven eight nine ten apple pear plum "
    "book pen cup plate table lamp door window clock bag key ring hat coat shoe king queen child"
)


@dataclass(frozen=True, slots=True)
class Target:
    """The model under load.

    Attributes:
        model: Id to ask for.
        max_model_len: Tokens of prompt and output together; None when the service does not say.
        is_ours: A Quadriga service, which promises more than others that speak as OpenAI's.
    """

    model: str
    max_model_len: int | None
    is_ours: bool = True

    @property
    def expected_model(self) -> str | None:
        """What the answers must name; an alias leaves the choice to the service."""
        return None if self.model == AUTO_ALIAS else self.model


async def find_target(client: HttpClient, model: str | None) -> Target:
    """Ask `/v1/models`, and choose `model` or the first that is not an alias.

    Raises:
        ConfigError: The service does not answer, or does not serve that model.
    """
    document = await _ask(client, "GET", "/v1/models")
    data = document.get("data") if isinstance(document, dict) else None
    listed = data if isinstance(data, list) else []
    cards = [card for card in listed if isinstance(card, dict) and card.get("id")]
    if not cards:
        raise ConfigError(f"/v1/models lists no models: {document!r:.200}", param="url")
    names = [str(card["id"]) for card in cards]
    if model is None:
        model = next((name for name in names if name != AUTO_ALIAS), names[0])
    if model not in names:
        raise ConfigError(
            f"--model: {model!r} is not served; there are {', '.join(names)}", param="model"
        )
    card = cards[names.index(model)]
    context = card.get("max_model_len")
    known = context if isinstance(context, int) and context > 1 else None
    return Target(model, known, is_ours=card.get("owned_by") == "quadriga")


async def token_pool(client: HttpClient, model: str) -> list[int]:
    """Return token ids of ordinary words, for synthetic prompts of exact length.

    Raises:
        ConfigError: The service has no usable `/tokenize`.
    """
    ids = sorted(set(await tokenize(client, model, POOL_TEXT)))
    if not ids:
        raise ConfigError("/tokenize returned no tokens; give --vocab-size", param="vocab-size")
    return ids


async def tokenize(client: HttpClient, model: str, text: str) -> list[int]:
    """Return the service's token ids of a text.

    Raises:
        ConfigError: The service has no usable `/tokenize`.
    """
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    document = await _ask(client, "POST", "/tokenize", body)
    tokens = document.get("tokens") if isinstance(document, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise ConfigError(f"/tokenize returned {document!r:.200}", param="url")
    return tokens


async def count_chat(client: HttpClient, model: str, messages: Sequence[tuple[str, str]]) -> int:
    """Return how many tokens a conversation of (role, text) is, in the model's chat template.

    Raises:
        ConfigError: The service has no usable `/tokenize`, or the model no chat template.
    """
    listed = [{"role": role, "content": content} for role, content in messages]
    document = await _ask(client, "POST", "/tokenize", {"model": model, "messages": listed})
    tokens = document.get("tokens") if isinstance(document, dict) else None
    if not isinstance(tokens, list):
        raise ConfigError(f"/tokenize returned {document!r:.200}", param="url")
    return len(tokens)


async def detokenize(client: HttpClient, model: str, token_ids: list[int]) -> str:
    """Return the service's text of token ids; special ones have none where it knows the field.

    Raises:
        ConfigError: The service has no usable `/detokenize`.
    """
    body = {"model": model, "tokens": token_ids, "skip_special_tokens": True}
    document = await _ask(client, "POST", "/detokenize", body)
    text = document.get("prompt") if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"/detokenize returned {document!r:.200}", param="url")
    return text


async def fit_prompts(
    client: HttpClient, target: Target, specs: list[RequestSpec]
) -> list[RequestSpec]:
    """Replace text prompts by their token ids, cut at the front to leave room for the output.

    Raises:
        ConfigError: The context is unknown or too small, or `/tokenize` is not usable.
    """
    if target.max_model_len is None:
        raise ConfigError("--fit-prompts: the service states no max_model_len", param="fit-prompts")
    limit = asyncio.Semaphore(8)

    async def fit(spec: RequestSpec) -> RequestSpec:
        assert target.max_model_len is not None
        room = target.max_model_len - spec.max_tokens
        if room < 1:
            raise ConfigError(
                f"--max-tokens: {spec.max_tokens} fills the context of {target.max_model_len}",
                param="max-tokens",
            )
        if not isinstance(spec.prompt, str):
            return spec
        async with limit:
            ids = await tokenize(client, target.model, spec.prompt)
        ids = ids[-room:]
        return replace(spec, prompt=ids, prompt_tokens=len(ids))

    return list(await asyncio.gather(*(fit(spec) for spec in specs)))


async def _ask(client: HttpClient, method: str, path: str, body: Any = None) -> Any:
    try:
        status, document = await client.fetch(method, path, body)
    except ConnectionError as exc:
        raise ConfigError(f"--url: {exc}; is the service running?", param="url") from exc
    if status != 200:
        raise ConfigError(f"{method} {path} answered {status}: {document!r:.300}", param="url")
    return document
