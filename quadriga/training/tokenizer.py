"""The family's tokenizer: byte-level, one token per task word and per number 0–99.

Text is split by `SPLIT`; a piece that is a vocabulary entry becomes that one token, any other piece
falls apart into its bytes. So every text is servable, and task text is as short as it can be.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from quadriga.tasks.words import DEEDS, FRIENDS, GLUE, HEROES, NUMBERS, PLACES, WORDS

SPLIT = r" ?\p{N}{1,2}| ?\p{L}+| ?[^\s\p{L}\p{N}]|\s+"
END_TOKEN, END_ID = "<|end|>", 0
PAD_TOKEN, PAD_ID = "<|pad|>", 1
# Words that open a line, so that they stand without a space before them.
_OPENERS = tuple(word for word in GLUE if word[0].isupper())
MAX_POSITIONS = 2048

# Renders the last user message; earlier turns and system messages are beyond these tiny models.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(text='') -%}"
    "{%- for message in messages if message['role'] == 'user' -%}"
    "{%- if message['content'] is string -%}{%- set ns.text = message['content'] -%}"
    "{%- else -%}{%- set ns.text = message['content'] "
    "| selectattr('type', 'equalto', 'text') | map(attribute='text') | join('') -%}{%- endif -%}"
    "{%- endfor -%}"
    "{{- ns.text | trim + '\\n' -}}"
)


def build_tokenizer() -> Tokenizer:
    """Return the tokenizer. It depends on the closed vocabulary only, so no training is needed."""
    entries = [END_TOKEN, PAD_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    spaced = [*NUMBERS, *WORDS, *HEROES, *FRIENDS, *PLACES, *DEEDS.values(), *GLUE]
    entries += [f"Ġ{word}" for word in spaced] + list(_OPENERS)
    vocab = {entry: index for index, entry in enumerate(dict.fromkeys(entries))}
    # `ignore_merges` looks whole pieces up first; with no merges the rest falls back to bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TOKEN, PAD_TOKEN])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which holds the chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=build_tokenizer(),
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # One spelling that old and new versions of transformers read.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")
