"""The models this deployment serves: their limits, exits and tokenizers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quadriga.catalogue.adapters import read_adapters
from quadriga.checkpoint.exits import NO_EXITS, ExitSpec
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.config.loader import QuadrigaConfig
from quadriga.config.resolve import configured_exits
from quadriga.core.grammar import Grammar
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.request import AUTO_MODEL
from quadriga.errors import ConfigError, ContextTooLong, IngressFull, UnknownModel
from quadriga.text import TextTokenizer, load_tokenizer
from serve_app.openai.grammar_checker import GrammarChecker

Result = TypeVar("Result")

INLINE_SIZE = 2048
"""Characters to encode, or tokens to decode, that are not worth a thread."""
MAX_WAITING_SIZE = 32 << 20
"""Of all that waits for the thread, in the same measure: half a minute of work."""
CHECKED_CHARS_PER_TOKEN = 4
"""A text with more characters for each token that the model takes is checked at first."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model with its tokenizer.

    Attributes:
        max_model_len: Most tokens of prompt plus answer; see `ModelDirectory.follow`.
        exits: Where tokens may leave early; no layers where the deployment has none.
        depth: Layers of the deepest replicas.
        is_auto: It stands for the model that the cluster chooses; all have one tokenizer.
        is_deterministic: No answer may depend on the load.
        adapter: It stands for this LoRA adapter of the checkpoint; empty: for the checkpoint alone.
    """

    checkpoint: Checkpoint
    tokenizer: TextTokenizer
    max_model_len: int
    exits: ExitSpec = NO_EXITS
    depth: int = 0
    is_auto: bool = False
    is_deterministic: bool = False
    adapter: str = ""

    @property
    def id(self) -> str:
        return self.adapter or self.checkpoint.id

    @property
    def longer_remedy(self) -> str:
        """How the limit could be higher, where that is not the model's own; for refusals."""
        positions = self.checkpoint.max_model_len
        if self.max_model_len >= positions:
            return ""
        return (
            f" (the model has {positions} positions: the service's engine.max_model_len and "
            "engine.kv_memory_bytes allow more)"
        )


class ModelDirectory:
    """Ids to models; the first is what `quadriga-auto` means, unless the cluster chooses.

    Raises:
        ConfigError: A checkpoint or its tokenizer cannot be read.
    """

    def __init__(self, models: list[ServedModel], *, chooses: bool = False) -> None:
        self._models = {model.id: model for model in models}
        self._default = replace(models[0], is_auto=chooses)
        self._created_unix_s = int(time.time())
        self._checkers: dict[str, GrammarChecker] = {}
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._waiting_size = 0

    @classmethod
    def load(cls, config: QuadrigaConfig) -> ModelDirectory:
        models: dict[str, ServedModel] = {}
        for index, pool in enumerate(config.pools):
            cache_dir, heads = config.engine.cache_dir, pool.exits.folder
            checkpoint = read_checkpoint(pool.model, cache_dir=cache_dir, heads=heads)
            depth = pool.depth or checkpoint.num_layers
            if checkpoint.id in models:
                known = models[checkpoint.id]
                models[checkpoint.id] = replace(known, depth=max(depth, known.depth))
                continue
            limit = config.engine.max_model_len
            length = checkpoint.max_model_len
            if limit != "auto":
                length = min(length, limit)
            tokenizer = load_tokenizer(checkpoint.path, checkpoint.id)
            exits = configured_exits(config, index, checkpoint)
            if config.decode.rebatching == "off":
                exits = replace(exits, layers=())
            models[checkpoint.id] = ServedModel(
                checkpoint, tokenizer, length, exits, depth, is_deterministic=config.deterministic
            )
        for index, pool in enumerate(config.pools):
            if pool.adapters is None:
                continue
            base = read_checkpoint(pool.model, cache_dir=config.engine.cache_dir).id
            for adapter in read_adapters(pool.adapters):
                named = replace(models[base], adapter=adapter.name)
                if models.setdefault(adapter.name, named) != named:
                    raise ConfigError(
                        f"pools.{index}.adapters: two models are called {adapter.name!r}; rename "
                        "the adapter's folder",
                        param=f"pools.{index}.adapters",
                    )
        return cls(list(models.values()), chooses=config.helios.enabled)

    def follow(self, snapshots: Iterable[ReplicaSnapshot]) -> None:
        """Take over the replicas' limits: the longest sequence that all of them can hold.

        Their memory decides it where no setting does. A model that no replica holds keeps its
        last limit; one that is chosen for each request has the least of all.
        """
        limits: dict[str, int] = {}
        for info in (s.info for s in snapshots):
            if info.max_model_len:
                model, most = info.depth_class.model, info.max_model_len
                limits[model] = min(most, limits.get(model, most))
        for name, served in self._models.items():
            length = limits.get(served.checkpoint.id, served.max_model_len)
            if served.max_model_len != length:
                self._models[name] = replace(served, max_model_len=length)
        of_default = (
            min(limits.values())
            if self._default.is_auto and limits
            else (limits.get(self._default.id, self._default.max_model_len))
        )
        if of_default != self._default.max_model_len:
            self._default = replace(self._default, max_model_len=of_default)

    def find(self, model: str | None) -> ServedModel:
        """Return the model a client means; the default where it names none.

        Raises: UnknownModel, naming those that are served.
        """
        if not model or model == AUTO_MODEL:
            return self._default
        found = self._models.get(model)
        if found is None:
            shown = model if len(model) <= 80 else model[:77] + "..."
            raise UnknownModel(
                f"model {shown!r} is not served here; served: "
                f"{', '.join(self._models)} (or {AUTO_MODEL!r})",
                param="model",
            )
        return found

    async def tokenize(
        self,
        model: ServedModel,
        text: str,
        add_special_tokens: bool,
        *,
        field: str = "prompt",
        max_tokens: int | None = None,
    ) -> list[int]:
        """Tokenise; a long text in a thread, so that streams are not delayed.

        Args:
            field: Where the text is from, for the error.
            max_tokens: The most tokens it may have; None: as many as the model takes. A text that
                is far too long is refused before it delays the texts behind it.

        Raises: ContextTooLong, InvalidRequest, IngressFull.
        """
        tokenizer, most = model.tokenizer, max_tokens or model.max_model_len

        def work() -> list[int]:
            if len(text) > CHECKED_CHARS_PER_TOKEN * most and tokenizer.exceeds(text, most):
                raise ContextTooLong(
                    f"{field}: the text has more than {most} tokens, the most there may be for "
                    f"{model.id}; shorten it",
                    param=field,
                )
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self.off_loop(len(text), work)

    async def detokenize(
        self, model: ServedModel, token_ids: list[int], *, skip_special_tokens: bool
    ) -> str:
        """Token ids to text; many of them in a thread."""
        return await self.off_loop(
            len(token_ids),
            lambda: model.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens),
        )

    async def check_grammar(
        self, model: ServedModel, grammar: Grammar, field: str, caller: str
    ) -> None:
        """See `GrammarChecker.check`."""
        name = model.checkpoint.id
        checker = self._checkers.get(name)
        if checker is None:
            checker = GrammarChecker(model.checkpoint, model.tokenizer)
            self._checkers[name] = checker
        await checker.check(grammar, field, caller)

    def close(self) -> None:
        """End the threads; texts and grammars that wait for them are not read."""
        for checker in self._checkers.values():
            checker.close()
        self._encoder.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        """Do work of this size, in a thread where it is large. Raises: IngressFull."""
        if size <= INLINE_SIZE:
            return work()
        if self._waiting_size and self._waiting_size + size > MAX_WAITING_SIZE:
            raise IngressFull("too many long texts wait; retry shortly", retry_after_s=1.0)
        self._waiting_size += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
        finally:
            self._waiting_size -= size

    def ids(self) -> list[str]:
        return list(self._models)

    @property
    def adapters(self) -> list[str]:
        """Ids of those that are LoRA adapters."""
        return [name for name, model in self._models.items() if model.adapter]

    def listing(self) -> dict[str, Any]:
        """The body of GET /v1/models."""
        rows = [self.describe(model) for model in self._models]
        return {"object": "list", "data": [*rows, self.describe(AUTO_MODEL)]}

    def describe(self, model: str) -> dict[str, Any]:
        """The body of GET /v1/models/{id}. Raises: UnknownModel."""
        found = self.find(model)
        return {
            "id": model,
            "object": "model",
            "created": self._created_unix_s,
            "owned_by": "quadriga",
            "root": found.id,
            "parent": found.checkpoint.id if found.adapter else None,
            "max_model_len": found.max_model_len,
        }
