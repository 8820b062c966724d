from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quadriga.checkpoint.folder import ASSETS
from quadriga.core.output import EngineOutput
from quadriga.text import AnswerText, StopMatcher, load_tokenizer

SMALL = st.text(alphabet="abc", min_size=1, max_size=6)


def run(stops: tuple[str, ...], pieces: list[str], min_pieces: int = 0) -> tuple[str, bool]:
    matcher = StopMatcher(stops, min_pieces)
    shown = ""
    for piece in pieces:
        text, met = matcher.push(piece)
        shown += text
        if met:
            return shown, True
    return shown + matcher.flush(), False


def test_without_stops_everything_passes() -> None:
    assert run((), ["ab", "", "c"]) == ("abc", False)


def test_a_stop_across_pieces_is_never_shown_in_part() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("text E") == ("text ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("X") == ("ENX", False)
    assert matcher.push("EN") == ("", False)
    assert matcher.push("D more") == ("", True)


def test_the_longest_of_those_that_end_together_counts() -> None:
    assert run(("b", "aab"), ["xaab"]) == ("x", True)


def test_a_stop_that_repeats_itself() -> None:
    assert run(("aab",), ["aa", "aa", "b"]) == ("aa", True)
    tables = [StopMatcher(("aab",))._patterns[0].fallback for _ in range(2)]
    assert tables[0] is tables[1], "made once for all choices"


@given(
    st.lists(SMALL, min_size=1, max_size=3),
    st.lists(st.text(alphabet="abc", max_size=5)),
    st.integers(0, 3),
)
def test_equals_a_search_in_the_whole_text(
    stops: list[str], pieces: list[str], min_pieces: int
) -> None:
    """The stop that ends first cuts, wherever the text was cut into pieces.

    One that ends within the first pieces does not, as with vLLM's `min_tokens`.
    """
    whole, first = "".join(pieces), len("".join(pieces[:min_pieces])) + 1
    ends = [
        (end, -len(s))
        for s in stops
        for end in range(first, len(whole) + 1)
        if whole.endswith(s, 0, end)
    ]
    end, minus = min(ends, default=(0, 0))
    expected = (whole[: end + minus], True) if ends else (whole, False)
    assert run(tuple(stops), pieces, min_pieces) == expected


def test_tokens_behind_a_stop_string_are_taken_out_however_many_came_at_once() -> None:
    """Drafts come several at a time, and how many is a matter of time."""
    text = load_tokenizer(ASSETS / "quadriga-s", "quadriga-s")
    ids = text.encode("1 2 3 4 5 6")
    said = EngineOutput("s", 0, token_ids=list(ids), exit_layers=[4] * len(ids))
    answer = AnswerText(text.detokenizer(), ("4",))
    assert answer.read(said) == "1 2 3 " and answer.is_stopped
    assert text.decode(said.token_ids) == "1 2 3 4"
    assert len(said.exit_layers) == len(said.token_ids)
    early = EngineOutput("s", 0, token_ids=list(ids), exit_layers=[4] * len(ids))
    answer = AnswerText(text.detokenizer(), ("4",), min_tokens=len(ids))
    assert answer.read(early).startswith("1 2 3 4 5") and not answer.is_stopped
