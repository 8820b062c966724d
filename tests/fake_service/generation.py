"""What the fake service answers, as documents of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.fake_service.faults import Document
from tests.fake_service.model import (
    END_ID,
    END_TEXT,
    Answer,
    babble,
    chat_text,
    detokenize,
    stream_text,
    tokenize,
)

_CREATED = 1_700_000_000


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """How the fake behaves.

    Attributes:
        fault: One of `FAULTS`, done on every generation request; None behaves well.
        step_s: Pause between writes; 0 writes as fast as the socket takes it.
        tokens_per_write: Tokens in one SSE frame.
        answer: Prompt → answer text, which then ends with finish_reason stop.
        refuse_first: This many requests are refused before the first is served.
    """

    fault: str | None = None
    step_s: float = 0.0
    tokens_per_write: int = 1
    answer: Answer | None = None
    refuse_first: int = 0
    max_model_len: int = 4096


@dataclass(slots=True)
class FakeGeneration:
    """One answer of the fake model, as documents of the OpenAI API."""

    body: Document
    path: str
    options: FakeOptions
    prompt_tokens: int = 0
    outputs: list[list[int]] = field(default_factory=list)
    finish_reason: str = "length"

    def __post_init__(self) -> None:
        prompt = chat_text(self.body["messages"]) if self.chat else self.body["prompt"]
        prompt_ids = tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        self.prompt_tokens = len(prompt_ids) + (self.options.fault == "wrong_prompt_tokens")
        limit = self.body["max_tokens"]
        extra = {"one_token_less": -1, "one_token_more": 1}.get(self.options.fault or "", 0)
        answer = self.options.answer(detokenize(prompt_ids)) if self.options.answer else None
        for choice in range(self.body.get("n", 1)):
            if answer is None:
                ids = babble(prompt_ids, choice, limit + extra)
            else:
                ids = [*tokenize(answer), END_ID][:limit]
                self.finish_reason = "stop" if ids[-1] == END_ID else "length"
            self.outputs.append(ids)

    @property
    def chat(self) -> bool:
        return self.path.endswith("chat/completions")

    def usage(self, completion_tokens: int) -> Document:
        total = self.prompt_tokens + completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": total,
        }

    def documents(self) -> list[Document]:
        """Return the chunks of a stream and its usage frame; choices one after the other."""
        documents = []
        for index, output in enumerate(self.outputs):
            sent = 0
            for ids, text in stream_text(output, self.options.tokens_per_write):
                sent += len(ids)
                reason = self.finish_reason if sent == len(output) else None
                choice = self._choice(index, text, ids, reason, is_first=sent == len(ids))
                documents.append(self._document([choice], self.usage(sent)))
        total = sum(map(len, self.outputs))
        documents.append(self._document([], self.usage(total)))
        return documents

    def single(self) -> Document:
        """Return the answer in one document."""
        choices = []
        for index, output in enumerate(self.outputs):
            choice = {"index": index, "finish_reason": self.finish_reason, "token_ids": output}
            text = detokenize(output).removesuffix(END_TEXT)
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            choices.append(choice)
        document = self._document(choices, self.usage(sum(map(len, self.outputs))))
        document["object"] = "chat.completion" if self.chat else "text_completion"
        return document

    def _choice(
        self, index: int, text: str, ids: Sequence[int], reason: str | None, *, is_first: bool
    ) -> Document:
        choice: Document = {"index": index, "finish_reason": reason, "token_ids": list(ids)}
        if not self.chat:
            return choice | {"text": text}
        role = {"role": "assistant"} if is_first else {}
        return choice | {"delta": {**role, "content": text}}

    def _document(self, choices: list[Document], usage: Document) -> Document:
        return {
            "id": "cmpl-fake",
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": _CREATED,
            "model": "other" if self.options.fault == "other_model" else self.body["model"],
            "choices": choices,
            "usage": usage,
        }
