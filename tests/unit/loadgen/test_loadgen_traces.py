"""The strict trace reader and the scalings."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from loadgen.load.traces import (
    cap_lengths,
    context_factor,
    fit_context,
    read_trace,
    scale_lengths,
    scale_time,
)
from quadriga.errors import ConfigError

HEADER = "arrival_s,input_tokens,output_tokens\n"


def write(tmp_path: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_reads_plain_and_gzip_alike(tmp_path: Path) -> None:
    text = HEADER + "10,5,6\n10.5,7,8\r\n1.25e1,9,10"
    plain = read_trace(write(tmp_path, text))
    packed = read_trace(write(tmp_path, gzip.compress(text.encode()), "trace.csv.gz"))
    for trace in (plain, packed):
        assert trace.arrivals_s is not None
        assert trace.arrivals_s.tolist() == [0.0, 0.5, 2.5]
        assert trace.input_tokens.tolist() == [5, 7, 9]
        assert trace.output_tokens.tolist() == [6, 8, 10]
        assert trace.name == "trace"


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz", "trace", "trace.txt"])
def test_what_a_file_is_says_its_content_and_not_its_name(name: str, tmp_path: Path) -> None:
    text = (HEADER + "0,5,6\n1,7,8\n").encode()
    for data in (text, gzip.compress(text)):
        assert read_trace(write(tmp_path, data, name)).input_tokens.tolist() == [5, 7]


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n\r\n", "\n  \n\n"])
def test_empty_lines_may_follow_the_last_row(end: str, tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, HEADER + "0,5,6\n1,7,8" + end))
    assert trace.input_tokens.tolist() == [5, 7]


def test_lengths_have_no_arrivals(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "input_tokens,output_tokens\n5,6\n"))
    assert trace.arrivals_s is None
    with pytest.raises(ConfigError, match="lengths only"):
        scale_time(trace, 0.5)


def test_limit_stops_reading(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, HEADER + "0,1,1\n1,1,1\nrubbish"), limit=2)
    assert len(trace) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("nan,1,1", r"line 3: arrival_s 'nan' must be a plain number in 0\.\.1e\+08"),
        ("inf,1,1", "arrival_s 'inf'"),
        ("-1,1,1", "arrival_s '-1'"),
        ("1e300,1,1", "arrival_s '1e300'"),
        ("1_0,1,1", "arrival_s '1_0'"),
        ("0.5,1,1", r"arrival_s 0\.5 is before the line above \(1\.0\); sort"),
        ("2,0,1", r"input_tokens '0' must be a whole number in 1\.\.10000000"),
        ("2,-4,1", "input_tokens '-4'"),
        ("2,1.5,1", "input_tokens '1.5'"),
        ("2,1,99999999", "output_tokens '99999999'"),
        ("2,1,", "output_tokens ''"),
        ("2,1,٣", "output_tokens '٣'"),
        ("2,1", "2 fields where arrival_s,input_tokens,output_tokens are wanted"),
        ("2,1,1,1", "4 fields"),
        ("", "line 3: empty, and rows follow in line 4"),
        ("  ", "line 3: empty, and rows follow"),
        ("2,1," + "1" * 300, "over 200 bytes"),
    ],
)
def test_bad_row_is_named(row: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, HEADER + "1,1,1\n" + row + "\n9,1,1\n"))


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        (b"", "trace.csv", "line 1: the header must be"),
        (b"a,b,c\n1,2,3\n", "trace.csv", "line 1: the header must be"),
        (HEADER.encode(), "trace.csv", "no rows"),
        (HEADER.encode() + b"1,1,\xff\n", "trace.csv", "line 2: not UTF-8"),
        (b"no gzip", "trace.csv.gz", "line 1: the header must be"),
    ],
)
def test_bad_file_is_named(data: bytes, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, data, name))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.csv: cannot be read"):
        read_trace(tmp_path / "nowhere.csv")


def test_scalings(tmp_path: Path) -> None:
    rows = "".join(f"{i},{100 * (i + 1)},{10 * (i + 1)}\n" for i in range(100))
    trace = read_trace(write(tmp_path, HEADER + rows))
    assert scale_time(trace, 0.25).arrivals_s.tolist()[:3] == [0.0, 0.25, 0.5]  # type: ignore[union-attr]
    small = scale_lengths(trace, 0.001)
    assert small.input_tokens.min() == 1 and small.output_tokens.tolist() == [1] * 100
    capped = cap_lengths(trace, max_input=500, max_output=None)
    assert capped.input_tokens.max() == 500
    assert np.array_equal(capped.output_tokens, trace.output_tokens)


def test_fit_leaves_every_row_room_for_some_of_both(tmp_path: Path) -> None:
    rows = "0,5,9000\n1,9000,5\n2,9000,9000\n3,10,20\n4,999,1\n"
    fitted = fit_context(read_trace(write(tmp_path, HEADER + rows)), 1000)
    pairs = list(zip(fitted.input_tokens.tolist(), fitted.output_tokens.tolist(), strict=True))
    assert pairs == [(5, 500), (995, 5), (500, 500), (10, 20), (999, 1)]


def test_context_factor_fits_all_but_a_percent(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i + 1},{i + 1}\n" for i in range(1000))
    trace = read_trace(write(tmp_path, HEADER + rows))
    scaled = scale_lengths(trace, context_factor(trace, 500))
    over = (scaled.input_tokens + scaled.output_tokens > 500).mean()
    assert 0 < over <= 0.011
    assert context_factor(trace, 10_000) == 1.0
