"""Defaults that tables in the documents give are those of the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.config_reference import rows
from quadriga.config.engine import PoolConfig
from quadriga.config.loader import QuadrigaConfig
from tests.docs.pages import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
DEFAULTS = {
    row.key: row.default.strip("`") for model in (QuadrigaConfig, PoolConfig) for row in rows(model)
}
UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6}
_TABLE = re.compile(r"^\| (?:key|setting) \| default \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.M)


def claims(text: str) -> Iterator[tuple[str, str]]:
    """(key, default) of every row of every table of settings with their defaults."""
    for table in _TABLE.findall(text):
        for line in table.splitlines():
            first, second = (cell.strip() for cell in line.split("|")[1:3])
            keys = re.findall(r"`([a-z][a-z0-9_.]*)`", first)
            values = [part.strip().strip("`") for part in re.split(r"[;.] |, ", second)]
            yield from zip(keys, values, strict=False)


def found(key: str) -> set[str]:
    """The defaults of the keys that one may mean: a section may be left out."""
    return {value for name, value in DEFAULTS.items() if name == key or name.endswith(f".{key}")}


def same(said: str, default: str) -> bool:
    """Whether two ways of writing a value are one: `32 KiB` and `32768`."""
    number = re.match(r"([\d,]*\.?\d+)(?: ([A-Za-z]+))?", said)
    if number is None or not re.fullmatch(r"[\d.e+]+", default):
        return said == default
    value = float(number[1].replace(",", "")) * UNITS.get(number[2] or "", 1)
    return value == float(default)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_defaults_are_those_of_the_configuration(page: Path) -> None:
    for key, said in claims(page.read_text(encoding="utf-8")):
        assert any(same(said, default) for default in found(key)), f"{page.name}: {key} is {said}"


def test_the_check_reads_the_tables() -> None:
    num_claims = {page.stem: len(list(claims(page.read_text()))) for page in PAGES}
    assert num_claims["rescheduling"] >= 12
    assert num_claims["models"] >= 10
    assert num_claims["security"] >= 8


@pytest.mark.parametrize(
    ("said", "default", "is_same"),
    [
        ("32 KiB", "32768", True),
        ("4,000,000", "4000000", True),
        ("100 MB", "100000000", True),
        ("2048 per ingress replica", "2048", True),
        ("none", "none", True),
        ("0.2", "0.15", False),
        ("30 s", "31", False),
        ("true", "false", False),
    ],
)
def test_values_are_compared(said: str, default: str, is_same: bool) -> None:
    assert same(said, default) is is_same
