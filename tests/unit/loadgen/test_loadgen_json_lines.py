"""Files of JSON lines are read strictly; every error says where and what."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from loadgen.load.arrivals import parse_arrivals
from loadgen.load.json_lines import read_objects, read_texts
from loadgen.load.workload import from_prompt_file
from quadriga.errors import ConfigError


def test_rows_come_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n  \n{"a": 2}\n')
    rows = list(read_objects(path, param="rows"))
    assert rows == [(f"{path}, line 1", {"a": 1}), (f"{path}, line 4", {"a": 2})]
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [row for _, row in read_objects(packed, param="rows")] == [{"a": 1}, {"a": 2}]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("Why?\nWhere?\n", encoding="utf-8-sig")
    assert list(read_texts(path, param="prompts")) == ["Why?", "Where?"]
    path.write_text('{"a": 1}', encoding="utf-8-sig")
    assert [row for _, row in read_objects(path, param="rows")] == [{"a": 1}]


def test_what_follows_the_limit_is_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\nbroken\n')
    assert len(list(read_objects(path, param="rows", limit=1))) == 1
    with pytest.raises(ConfigError, match="line 2: not JSON"):
        list(read_objects(path, param="rows", limit=2))


# Parameters name tests: without mtime=0 two workers would not agree on them.
PACKED = gzip.compress(b'{"a": 1}\n' * 99, mtime=0)


def corrupt() -> bytes:
    packed = bytearray(gzip.compress(bytes(range(256)) * 36, mtime=0))
    packed[20] ^= 0xFF
    return bytes(packed)


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        (b"", "x.jsonl", "no rows in it"),
        (b"\n\n", "x.jsonl", "no rows in it"),
        (b"[1]", "x.jsonl", "line 1: must be a JSON object"),
        (b'{"a": "\xff"}', "x.jsonl", "line 1: not UTF-8"),
        (b"[" * 100_000, "x.jsonl", "line 1: not JSON"),
        (b'{"a": 1}\n{"a": 1}\n{"a": 1}', "x.jsonl", "line 3: more than 2 rows"),
        (b'{"a": "' + b"x" * 2000 + b'"}', "x.jsonl", "line 1: over 1000 bytes"),
        (b"plain", "x.jsonl.gz", "line 1: not JSON"),
        (b"\x1f\x8b no gzip", "x.jsonl", "cannot be read"),
        (PACKED[:-9], "x.jsonl.gz", "cannot be read|more than 2 rows"),
        (corrupt(), "x.jsonl.gz", "cannot be read|not JSON|over 1000 bytes"),
    ],
)
def test_bad_files_are_named(data: bytes, name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    limit = 1_000_000 if data.startswith(b"[[") else 1000
    with pytest.raises(ConfigError, match=message):
        list(read_objects(path, param="rows", max_rows=2, max_line_bytes=limit))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "prompt must be a string"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": 7}, "prompt must be a string; got 7"),
        ({"prompt": "x", "answer": 7}, "answer must be a string"),
        ({"prompt": "x", "task": "nonsense"}, "task must be one of .*; got 'nonsense'"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be a whole number in 1.."),
        ({"prompt": "x", "max_tokens": True}, "max_tokens must be a whole number in 1.."),
        ({"prompt": "x", "max_tokens": 10**9}, "max_tokens must be a whole number in 1.."),
    ],
)
def test_bad_prompts_are_named(row: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps(row))
    with pytest.raises(ConfigError, match=f"line 2: {message}"):
        from_prompt_file(path, parse_arrivals("at-once"), limit=None, max_tokens=5, seed=0)
