"""How many of a partial depth's tokens are others than the whole model's.

What leaves the last loaded exit below its threshold would have gone deeper, and some of it would
have become another token. Perplexity does not see that: a shallow exit is sure of its own errors.
Tokens that leave an exit at or above the threshold are not counted, wherever that exit lies: all
of the model would let them go there, too. Source: ours; the paper counts breaches alone.
"""

from __future__ import annotations

from quadriga.catalogue.records import DepthRecord
from quadriga.policies.helios.history import HistoryRow

UNSURE_CHANGED = 0.5
"""Share of the unsure tokens taken to change where nothing says. Conservative: of the bundled
models' exits it is .1 to .45, as measured."""


def expected_changed(record: DepthRecord | None, coverage: float) -> float:
    """Share of all tokens that change, before the depth has served any.

    Args:
        record: Of the depth. It says how many tokens change when all leave there; those are the
            unsure ones first.
        coverage: Share of the stream's tokens that are sure enough by then.
    """
    unsure = max(0.0, 1.0 - coverage)
    if record is None or record.unchanged is None:
        return UNSURE_CHANGED * unsure
    changed = 1.0 - record.unchanged
    recorded = unsure if record.coverage is None else 1.0 - record.coverage
    sure_ones = max(0.0, changed - recorded)
    share = min(1.0, changed / recorded) if recorded > 0.0 else 0.0
    return min(1.0, unsure * share + sure_ones)


def steadied_changed(expected: float, row: HistoryRow | None, expected_tokens: float) -> float:
    """The expected share together with what answers say that were served there and read again.

    Args:
        row: Of the depth itself; None where it never served.
        expected_tokens: So many sampled tokens the expected share counts for.
    """
    if row is None:
        return expected
    same, seen = row.unchanged.get(row.depth, (0.0, 0.0))
    sampled = sum(n for _, n in row.unchanged.values())
    return (expected * expected_tokens + seen - same) / (expected_tokens + sampled)
