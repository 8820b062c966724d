"""How text is cut before merging, by the name that a GGUF file gives it (`tokenizer.ggml.pre`).

A byte-level vocabulary learned its merges inside of the pieces that such patterns cut, and a file
names them without saying what they are. The patterns are those of the models' own tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_HEAD, _UPPER, _LOWER = (
    r"[^\r\n\p{L}\p{N}]?",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_HEAD}{_UPPER}*{_LOWER}+|{_HEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"
_GPT4O = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_HEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text.

    Attributes:
        patterns: Each cuts what the ones before it left whole.
        whole_words: A piece that is a token is one, whatever the merges would make of it.
        adds_bos: A file that does not say otherwise means a BOS token before every text.
        composes: Text is brought into Unicode's composed form (NFC) before.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False


_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_KINDS: tuple[tuple[PreTokenizer, str], ...] = (
    (PreTokenizer((_GPT2,)), "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum"),
    (_DIGIT, "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (
        PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0",
    ),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (PreTokenizer((_QWEN2,), composes=True), "qwen2"),
    (PreTokenizer((_QWEN2,)), "deepseek-r1-qwen stablelm2 megrez hunyuan kormo"),
    (PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True), "tekken"),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4"),
    (PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)), "deepseek-v3"),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
        "deepseek-coder",
    ),
)
PRE_TOKENIZERS = {name: kind for kind, names in _KINDS for name in names.split()}
