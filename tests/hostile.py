"""Input that means harm: how much of it is tried, and how well-formed bytes are broken.

`make test` tries a little each time, always the same; `QUADRIGA_FUZZ_EXAMPLES=20000` (`make fuzz`)
tries that many per test, other ones each time.
"""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("QUADRIGA_FUZZ_EXAMPLES", "0"))


def tried(quick: int) -> settings:
    """So many examples where nobody asks for more."""
    return settings(
        max_examples=EXAMPLES or quick,
        derandomize=not EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


NUMBERS = st.one_of(
    st.integers(-3, 70), st.sampled_from([2**31, 2**63, -(2**63), 10**30, -1, 0]), st.floats()
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@st.composite
def broken(draw: st.DrawFn, whole: bytes) -> bytes:
    """Well-formed bytes with a few cut out, put in, exchanged or flipped."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["cut", "flip", "insert", "drop", "repeat"]))
        if kind == "cut":
            del data[at:]
        elif kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=12))
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 12))]
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


@st.composite
def garbled(draw: st.DrawFn, whole: dict[str, Any]) -> bytes:
    """An object's JSON with fields exchanged for others, or lacking; or merely broken bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(broken(json.dumps(whole).encode()))
    made = dict(whole)
    for name in draw(st.lists(st.sampled_from(sorted(whole)), min_size=1, max_size=3)):
        if draw(st.booleans()):
            made[name] = draw(VALUES)
        else:
            made.pop(name, None)
    return json.dumps(made).encode()


DEEP = b"[" * 100_000
"""Deeper than any parser goes."""
