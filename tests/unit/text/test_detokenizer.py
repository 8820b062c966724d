from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quadriga.checkpoint.folder import ASSETS
from quadriga.errors import ConfigError, InvalidRequest
from quadriga.text import TextTokenizer, load_tokenizer
from quadriga.text.detokenizer import MAX_PENDING_TOKENS, WindowDetokenizer

TOKENIZER = load_tokenizer(ASSETS / "quadriga-s", "quadriga-s")
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)


def streamed(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(st.text(max_size=60))
def test_any_text_survives_the_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert "".join(streamed(TOKENIZER, ids)) == text == TOKENIZER.decode(ids)


@given(IDS)
def test_any_tokens_stream_as_they_decode(ids: list[int]) -> None:
    """Broken UTF-8 included: the pieces make up what a whole decode gives."""
    assert "".join(streamed(TOKENIZER, ids)) == TOKENIZER.decode(ids)


def test_no_piece_holds_half_a_character() -> None:
    pieces = streamed(TOKENIZER, TOKENIZER.encode("né 😀 中文"))
    assert "\ufffd" not in "".join(pieces)
    assert "😀" in pieces


def test_an_unfinished_character_comes_with_the_flush() -> None:
    ids = TOKENIZER.encode("😀")[:-1]
    *pieces, rest = streamed(TOKENIZER, ids)
    assert "".join(pieces) == ""
    assert rest == "\ufffd"


def test_special_tokens_have_no_text() -> None:
    assert streamed(TOKENIZER, [0, 1]) == ["", "", ""]
    assert TOKENIZER.token_text(0) == "<|end|>"


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        TOKENIZER.encode("a\ud800")


def test_window_decoding_equals_byte_decoding() -> None:
    ids = TOKENIZER.encode("sort: 12, 7 — naïve 😀 done")
    window = WindowDetokenizer(TOKENIZER.decode)
    assert "".join([*(window.push(i) for i in ids), window.flush()]) == TOKENIZER.decode(ids)


LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


def sentence_piece(
    decoder: decoders.Decoder = LLAMA, call: AddedToken | str = "<call>"
) -> TextTokenizer:
    """A tokenizer with the special tokens 7 and 8, and 9, which is added and normalised."""
    vocab = {"▁hello": 0, "▁world": 1, "s": 2, "<0xF0>": 3, "<0x9F>": 4, "<0x98>": 5, "<0x80>": 6}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.normalizer = normalizers.Prepend("▁")
    core.add_special_tokens(["<s>", call])
    core.add_tokens(["odd"])
    core.decoder = decoder
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=core), "m")


SENTENCE_PIECE = sentence_piece()


def test_window_keeps_the_spaces_of_a_sentencepiece_vocabulary() -> None:
    normalised = sentence_piece(call=AddedToken("<call>", normalized=True))
    assert normalised.special_ids(["<call>", "odd"]) == {"<call>": 8}
    pieces = streamed(sentence_piece(), [0, 1, 2, 3, 4, 5, 6])
    assert pieces == ["hello", " world", "s", "", "", "", "😀", ""]


@pytest.mark.parametrize("decoder", [LLAMA, decoders.Metaspace()])
def test_text_behind_special_tokens_keeps_the_space_that_a_whole_decode_gives_it(
    decoder: decoders.Decoder,
) -> None:
    text = sentence_piece(decoder)
    for ids in itertools.product((0, 1, 2, 7, 8), repeat=4):
        window = text.detokenizer({8: "<call>"})
        shown = [token_id for token_id in ids if token_id != 7]
        said = "".join(map(window.push, ids)) + window.flush()
        assert said == text.decode(shown, skip_special_tokens=False)
    for before in ([0, 2], [0, *[7] * 9]):
        assert text.detokenizer(after=before).push(1) == " world"


@given(st.lists(st.integers(0, 9), max_size=MAX_PENDING_TOKENS))
@example([9, 3, 4, 5, 6])
def test_any_tokens_of_a_sentencepiece_vocabulary_stream_as_they_decode(ids: list[int]) -> None:
    assert "".join(streamed(SENTENCE_PIECE, ids)) == SENTENCE_PIECE.decode(ids)


def test_a_broken_byte_breaks_no_character_beside_it() -> None:
    pieces = streamed(SENTENCE_PIECE, [3, 4, 5, 6, 3, 0])
    assert pieces == ["", "", "", "😀", "", "\ufffd hello", ""]
    assert SENTENCE_PIECE.decode([3, 3, 4, 5, 6, 0]) == "\ufffd😀 hello"


def test_tokens_of_a_sentencepiece_vocabulary_are_named_by_their_bytes() -> None:
    text = sentence_piece()
    assert [text.token_text(i) for i in (0, 1, 2)] == [" hello", " world", "s"]
    assert [text.token_bytes(i) for i in (3, 6)] == [[0xF0], [0x80]]
    assert [text.num_characters(i) for i in (0, 3, 4, 5, 6)] == [6, 1, 0, 0, 0]


def test_window_lets_go_of_what_never_becomes_text() -> None:
    window = WindowDetokenizer(lambda ids: "\ufffd" * len(ids))
    pieces = [window.push(7) for _ in range(MAX_PENDING_TOKENS)]
    assert pieces[-1] == "\ufffd" * MAX_PENDING_TOKENS


def test_chat_template() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "copy: 3 4"}]
    assert "copy: 3 4" in TOKENIZER.render_chat(messages)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, "x")


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ("Qwen2Tokenizer", ["x", "_a", "1", "2"]),
        ("GPT2TokenizerFast", ["x", "_", "a", "12"]),
        (None, ["x", "_", "a", "12"]),
    ],
)
def test_vocabulary_and_merges_alone_are_read_by_the_rules_of_their_family(
    named: str | None, wanted: list[str], tmp_path: Path
) -> None:
    """Qwen's text is cut before `_a`, GPT-2's between; as a tokenizer without Rust saved them."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "_a", "12"]
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n_ a\n1 2\n")
    if named:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))
        assert AutoTokenizer.from_pretrained(tmp_path).tokenize("x_a12") == wanted
    assert [tokens[i] for i in load_tokenizer(tmp_path, "x").encode("x_a12")] == wanted
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TheirTokenizer"}')
    with pytest.raises(ConfigError, match=r"how a TheirTokenizer cuts text is not known; make a"):
        load_tokenizer(tmp_path, "x")


@pytest.mark.parametrize("content", ["[]", '{"added_tokens": [], "model": {"type": "New"}}'])
def test_a_tokenizer_that_the_library_cannot_read(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(tmp_path, "x")


@pytest.mark.parametrize("vocab", [{}, {"a": 0, "b": 4_000_000_000}])
def test_a_tokenizer_that_has_no_tokens_or_names_the_billionth(
    tmp_path: Path, vocab: dict[str, int]
) -> None:
    """Tables of tokens are as long as ids say."""
    content = json.loads(Tokenizer(models.BPE()).to_str())
    content["model"]["vocab"] = vocab
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="its tokenizer is damaged"):
        load_tokenizer(tmp_path, "x")


def test_tokens_without_text_are_not_decoded_for_ever() -> None:
    """A model that goes on after its end token says it again and again."""
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return "".join(chr(i) for i in ids if i)

    detokenizer = WindowDetokenizer(decode)
    said = [ord("a"), *[0] * 500, ord("b"), ord("c"), *[0] * 40, ord("d")]
    assert "".join([*map(detokenizer.push, said), detokenizer.flush()]) == "abcd"
    assert max(decoded) <= 2 * MAX_PENDING_TOKENS
