"""What a tokenizer's file says of its tokens, read without what makes text of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quadriga.checkpoint.json_files import read_object
from quadriga.text.tokenizer import load_tokenizer


def read_definition(path: Path, model_id: str) -> str:
    """`TextTokenizer.definition` of a checkpoint directory, for who needs its tokens alone.

    `transformers`, which takes a second to import, and 13 MB, is asked only where the settings
    beside the tokenizer's file may add tokens to it, or something is wrong with them.

    Raises:
        ConfigError: As `load_tokenizer`.
    """
    with suppress(Exception):  # the library has no better one; `load_tokenizer` says what is wrong
        core = Tokenizer.from_file(str(path / "tokenizer.json"))
        core.no_truncation()
        core.no_padding()
        if all(core.token_to_id(token) is not None for token in _named_tokens(path)):
            return str(core.to_str())
    return load_tokenizer(path, model_id).definition()


def _named_tokens(path: Path) -> list[str]:
    """The tokens that the settings beside a tokenizer's file name."""
    named: list[Any] = []
    for file in (path / "tokenizer_config.json", path / "special_tokens_map.json"):
        for key, value in (read_object(file) if file.exists() else {}).items():
            if key.endswith("_token"):
                named.append(value)
            elif value and (key.endswith("_tokens") or key == "added_tokens_decoder"):
                named += value.values() if isinstance(value, dict) else value
    if (file := path / "added_tokens.json").exists():
        named += read_object(file)
    texts = [token["content"] if isinstance(token, dict) else token for token in named]
    return [text for text in texts if isinstance(text, str)]
