"""English prompts are worded from texts: the chosen ones again, and others beside them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ConfigError
from quadriga.training.cli import main
from quadriga.training.english import ENGLISH, WORDINGS, make_prompts
from quadriga.tune.prompts import read_prompts

QUESTIONS = Path("loadgen/load/questions.txt")
TEXTS = {
    "math": "How many?",
    "summarization": "Meeting transcript:\nA: Well.\n\nSum it up.",
    "code": "\n\ndef f():\n",
    "prose": "ROMEO:\nAy me!\n",
    "sentence-completion": "Surfing: A man falls. he",
    "intent": "Customer message: Where is it?\nIntent:",
    "chat": "User: Hi\nAssistant: Hello, who is it?\nUser: Me\nAssistant:",
}


def save_texts(folder: Path, count: int = 4) -> Path:
    """So many texts of each domain, numbered, their parts of a line as in the sources."""
    file = folder / "texts.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        for domain, text in TEXTS.items():
            for number in range(count):
                row = {"id": f"{domain}-{number}\r", "domain": domain, "prompt": text}
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        lines.write(json.dumps({"id": "x", "domain": "another", "prompt": "?"}) + "\n")
    return file


def save_choice(folder: Path, *ids: str) -> Path:
    file = folder / "chosen.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": "any"}) + "\n" for i in ids))
    return file


def rows(packed: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]


def test_every_domain_is_worded_as_a_request(tmp_path: Path) -> None:
    ids = [f"{domain}-1" for domain in TEXTS]
    made = rows(make_prompts([save_texts(tmp_path)], save_choice(tmp_path, *ids)))
    said = {row["domain"]: [(m["role"], m["content"]) for m in row["messages"]] for row in made}
    assert [row["id"] for row in made] == ids and WORDINGS.keys() == TEXTS.keys()
    assert said == {
        "math": [("user", "How many?")],
        "summarization": [("user", "Meeting transcript:\nA: Well.\n\nSum it up.")],
        "code": [("user", "Write the body of this function.\n\ndef f():")],
        "prose": [("user", "Continue this passage:\n\nROMEO:\nAy me!")],
        "sentence-completion": [("user", "How does this go on? Surfing: A man falls. he")],
        "intent": [("user", "Where is it?")],
        "chat": [("user", "Hi"), ("assistant", "Hello, who is it?"), ("user", "Me")],
    }


def test_the_questions_of_the_shipped_prompts_come_out_again(tmp_path: Path) -> None:
    """The one part of the shipped file whose texts are in the repository."""
    shipped = {p.id: p for p in read_prompts(str(ENGLISH)) if p.domain == "questions"}
    out = tmp_path / "made.jsonl.gz"
    choice = save_choice(tmp_path, *shipped)
    main(["prompts", "--texts", str(QUESTIONS), "--like", str(choice), "--out", str(out)])
    assert len(shipped) == 43 and {p.id: p for p in read_prompts(str(out))} == shipped


def test_others_are_drawn_in_the_shares_of_what_was_chosen(tmp_path: Path) -> None:
    texts = save_texts(tmp_path, count=40)
    chosen = ["math-0", "math-1", "math-2", "code-0"]
    choice = save_choice(tmp_path, *chosen)
    made = make_prompts([texts], choice, more=12, seed=1)
    found = rows(made)
    ids = [row["id"] for row in found]
    assert ids[:4] == chosen and len(set(ids)) == 16
    assert sum(row["domain"] == "math" for row in found) == 12
    assert made == make_prompts([texts], choice, more=12, seed=1)
    assert made != make_prompts([texts], choice, more=12, seed=2)
    with pytest.raises(ConfigError, match=r"--more: .* domain code, which has 39"):
        make_prompts([texts], choice, more=400)
    even = save_choice(tmp_path, "math-0", "code-0")
    assert len(rows(make_prompts([texts], even, more=1))) == 3, "half a text of each"


def test_two_texts_of_one_id_are_refused(tmp_path: Path) -> None:
    """Lines of a text file are numbered; the same texts twice are no matter."""
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("Why?\n")
    second.write_text("How?\n")
    choice = save_choice(tmp_path, "question-0")
    with pytest.raises(ConfigError, match=r"b\.txt has the id 'question-0', and so has another"):
        make_prompts([first, second], choice)
    assert len(rows(make_prompts([first, first], choice))) == 1


def test_texts_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gone-1' among them"):
        make_prompts([save_texts(tmp_path)], save_choice(tmp_path, "math-1", "gone-1"))
    damaged = gzip.compress(b"{}")[:10] + b"\xff" * 20
    for name, held in (("jsonl", b'{"id": 3}'), ("jsonl", b"[" * 100_000), ("jsonl.gz", damaged)):
        (broken := tmp_path / f"broken.{name}").write_bytes(held)
        with pytest.raises(ConfigError, match=rf"--texts: .*broken\.{name} cannot be read"):
            make_prompts([broken], save_choice(tmp_path, "math-1"))
