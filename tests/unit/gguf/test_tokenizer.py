"""A tokenizer that went into a GGUF file comes out of it as it was."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from quadriga.errors import ConfigError
from quadriga.gguf.header import GgufHeader, read_gguf
from quadriga.gguf.pretokenizers import PRE_TOKENIZERS
from quadriga.gguf.tokenizer import Vocabulary, read_vocabulary
from quadriga.text import TextTokenizer, load_tokenizer
from tests.gguf_files import small_fields, small_tensors, vocabulary_of, write_file

CORPUS = [
    "The quick brown fox, they'd say, jumps over the lazy dog's 12 345 678 backs!",
    "def f(x):\n    return x**2 + 10\n\n\tfor i in range(100):  # count\r\n",
    "Größe, naïve café — “quoted” … ¿qué? 中文字符和日本語テキスト 한국어 😀👍🏽",
    "HELLO world HeLLo WORLD'S we've I'LL 2024-11-22 3.14159 http://a.b/c?d=e&f",
] * 4
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "  two  spaces   three",
    "digits 1 12 123 1234 12345 and ½ ² Ⅷ",
    "\n\n\n  x\n \n",
    "🤷🏻‍♂️ zero\u200bwidth e\u0301 combining",
    "ends with space ",
]
CONTROL = ["<|im_start|>", "<|im_end|>", "<｜end▁of▁sentence｜>"]


def of_file(folder: Path, fields: dict[str, Any]) -> TextTokenizer:
    """The tokenizer as the service loads it from the converted file."""
    header = written(folder, fields)
    vocabulary = read_vocabulary(header, 100_000)
    target = folder / "converted"
    target.mkdir()
    for name, content in vocabulary.files.items():
        (target / name).write_text(content, encoding="utf-8")
    return load_tokenizer(target, "m")


def written(folder: Path, fields: dict[str, Any]) -> GgufHeader:
    return read_gguf(
        write_file(folder / "m.gguf", "llama", small_fields() | fields, small_tensors())
    )


def vocabulary(folder: Path, **settings: Any) -> Vocabulary:
    fields = {f"tokenizer.ggml.{name}": value for name, value in settings.items()}
    return read_vocabulary(written(folder, fields), 260)


def byte_level(pre: str) -> Tokenizer:
    """A tokenizer that was trained with the pieces that a name stands for."""
    kind = PRE_TOKENIZERS[pre]
    tokenizer = Tokenizer(BPE(ignore_merges=kind.whole_words))
    if kind.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(p), behavior="isolated") for p in kind.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=420,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_byte_level_vocabularies(pre: str, tmp_path: Path) -> None:
    original = byte_level(pre)
    fields = vocabulary_of(original, model="gpt2", pre=pre, add_bos_token=False, eos_token_id=1)
    ours = of_file(tmp_path, fields)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n<think>so</think><｜end▁of▁sentence｜>"]:
        ids = ours.encode(text)
        assert ids == original.encode(text).ids, text
        assert ours.decode(ids) == original.decode(ids)
        streamed = ours.detokenizer()
        assert "".join([*map(streamed.push, ids), streamed.flush()]) == ours.decode(ids)


def test_digits_are_cut_as_the_model_learned_them() -> None:
    """The name decides, not the merges: they would make numbers of digits that were cut."""
    pieces = {
        pre: [p for p, _ in byte_level(pre).pre_tokenizer.pre_tokenize_str("in 1234 5")]
        for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")
    }
    assert pieces == {
        "gpt-2": ["in", "Ġ1234", "Ġ5"],
        "smollm": ["in", "Ġ", "1", "2", "3", "4", "Ġ", "5"],
        "llama-bpe": ["in", "Ġ", "123", "4", "Ġ", "5"],
        "qwen2": ["in", "Ġ", "1", "2", "3", "4", "Ġ", "5"],
    }


def test_gpt2s_own_pattern_is_that_of_the_library() -> None:
    ours = byte_level("gpt-2").pre_tokenizer
    theirs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def sentence_piece_fields(**settings: Any) -> dict[str, Any]:
    """A vocabulary of SentencePiece's kind: letters, and what a training merged, by score."""
    trained = Tokenizer(BPE())
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = BpeTrainer(vocab_size=420, limit_alphabet=90, show_progress=False, max_token_length=8)
    trained.train_from_iterator(CORPUS, trainer)
    vocab = trained.get_vocab()
    pieces = sorted(vocab, key=lambda piece: vocab[piece])
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    fields = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *bytes_, *pieces],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "pre": None,
        "merges": None,
        "eos_token_id": None,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | settings).items()}


def merged_by_score(text: str, fields: dict[str, Any]) -> list[int]:
    """SentencePiece's own way: join the two neighbours that make the best piece, the first ones."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens) if i >= 259}
    pieces = list(text)
    while True:
        unions = [left + right for left, right in itertools.pairwise(pieces)]
        known = [(-ids[union], -at) for at, union in enumerate(unions) if union in ids]
        if not known:
            break
        at = -max(known)[1]
        pieces[at : at + 2] = [unions[at]]
    found: list[int] = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()]
    return found


def test_sentence_piece_vocabularies(tmp_path: Path) -> None:
    fields = sentence_piece_fields(add_bos_token=False)
    ours = of_file(tmp_path, fields)
    for text in TEXTS:
        ids = ours.encode(text)
        marked = ("▁" + text).replace(" ", "▁") if text else ""
        assert ids == merged_by_score(marked, fields), text
        assert ours.decode(ids) == text
        streamed = ours.detokenizer()
        assert "".join([*map(streamed.push, ids), streamed.flush()]) == text


def test_a_space_stands_behind_every_special_token(tmp_path: Path) -> None:
    fields = sentence_piece_fields(add_bos_token=False)
    ids = of_file(tmp_path, fields).encode("<s>fox</s>")
    assert ids == [1, *merged_by_score("▁fox", fields), 2]


def test_unknown_characters_become_bytes(tmp_path: Path) -> None:
    ours = of_file(tmp_path, sentence_piece_fields())
    ids = ours.encode("ᚠ")
    assert ids[-3:] == [3 + b for b in "ᚠ".encode()]
    assert ours.decode(ids) == "ᚠ"


@pytest.mark.parametrize(
    ("settings", "around"),
    [
        ({}, (True, False)),  # SentencePiece's are so where nothing is said
        ({"add_bos_token": False}, (False, False)),
        ({"add_eos_token": True}, (True, True)),
    ],
)
def test_what_stands_around_a_text(
    tmp_path: Path, settings: dict[str, Any], around: tuple[bool, bool]
) -> None:
    ids = of_file(tmp_path, sentence_piece_fields(**settings)).encode("quick")
    assert (ids[0] == 1, ids[-1] == 2) == around


def test_no_space_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    ours = of_file(tmp_path, sentence_piece_fields(add_space_prefix=False, add_bos_token=False))
    assert ours.decode(ours.encode(" The fox")) == " The fox"
    assert ours.encode("The fox") != ours.encode(" The fox")


@pytest.mark.parametrize(
    ("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)]
)
def test_byte_level_bos(tmp_path: Path, pre: str, adds: bool) -> None:
    fields = vocabulary_of(byte_level(pre), model="gpt2", pre=pre, bos_token_id=0, eos_token_id=1)
    assert (of_file(tmp_path, fields).encode("fox")[0] == 0) is adds


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    fields = vocabulary_of(
        byte_level("qwen2"), model="gpt2", pre="qwen2", eos_token_id=0, eot_token_id=5
    )
    header = written(tmp_path, fields)
    assert read_vocabulary(header, 100_000).end_ids == (0, 5, 1, 2)


@pytest.mark.parametrize("value", [0xFFFFFFFF, None])
def test_a_special_token_that_there_is_not(tmp_path: Path, value: int | None) -> None:
    assert vocabulary(tmp_path, padding_token_id=value).pad_id is None


def test_the_chat_template_comes_along(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
    ours = of_file(tmp_path, {"tokenizer.chat_template": template})
    assert ours.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"


def test_scores_that_say_nothing_are_refused(tmp_path: Path) -> None:
    fields = sentence_piece_fields()
    fields["tokenizer.ggml.scores"] = [-1000.0] * len(fields["tokenizer.ggml.tokens"])
    with pytest.raises(ConfigError, match="are the same"):
        read_vocabulary(written(tmp_path, fields), 100_000)
