"""Where the stream's tokens leave, what such a token costs, and how many tokens a depth changes.

Both are known from live requests and, for models that were profiled before, from the catalogue:
the same prompts for all models, where five requests of a profile are a matter of luck. So what is
on record counts as one more profile; the live requests that come after outweigh it.

A changed token is one that differs from the whole model's. A token that leaves the last loaded exit
below its threshold would have gone deeper, and might have become another token. Perplexity does not
show that: a shallow exit is sure of its own errors. Tokens that leave an exit at or above the
threshold are not counted, wherever that exit lies: the whole model would let them go there, too.
Source: ours; the paper counts breaches alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

from quadriga.catalogue.records import CatalogueModel, DepthRecord
from quadriga.policies.helios.history import HistoryRow

Exits = Mapping[int, float]
"""Layers run → tokens, or their share."""


def recorded_exits(model: CatalogueModel) -> dict[int, float] | None:
    """Share of tokens by where they leave, as on record; None where an exit's is not."""
    shares: dict[int, float] = {}
    before = 0.0
    for depth in model.exits.layers:
        record = model.record(depth)
        if record is None or record.coverage is None:
            return None
        shares[depth] = max(0.0, record.coverage - before)
        before = max(before, record.coverage)
    shares[model.num_layers] = 1.0 - before
    return shares


def steadied(model: CatalogueModel, live: Exits, record_tokens: float) -> dict[int, float]:
    """Where tokens leave: those of live requests, and as many of the record's as it counts for."""
    recorded = recorded_exits(model)
    exits = {k: n for k, n in live.items() if n > 0.0}
    if recorded is not None:
        depth = max(exits, default=model.num_layers)
        for k, share in recorded.items():
            exits[min(k, depth)] = exits.get(min(k, depth), 0.0) + share * record_tokens
    return {k: n for k, n in exits.items() if n > 0.0}


def cut(exits: Exits, depth: int) -> dict[int, float]:
    """Where tokens leave that can go no deeper: the others leave at `depth`."""
    found: dict[int, float] = {}
    for k, n in exits.items():
        found[min(k, depth)] = found.get(min(k, depth), 0.0) + n
    return found


def deepened(model: CatalogueModel, part: HistoryRow, full: HistoryRow) -> dict[int, float]:
    """Where tokens would leave at full depth, by what a partial depth served of them.

    What was a breach there would go on, and leave where the profile's deep tokens did.
    """
    exits = {k: n for k, n in part.exit_tokens.items() if n > 0.0}
    breaches = min(part.breaches, exits.get(part.depth, 0.0))
    deeper = {k: n for k, n in full.exit_tokens.items() if k > part.depth and n > 0.0}
    deeper = deeper or {model.num_layers: 1.0}
    exits[part.depth] = exits.get(part.depth, 0.0) - breaches
    for k, n in deeper.items():
        exits[k] = exits.get(k, 0.0) + breaches * n / sum(deeper.values())
    return exits


def cost_ratio(model: CatalogueModel, new: Exits, old: Exits, batch: float) -> float:
    """Cost of the mean token that leaves as `new` says, over one that leaves as `old` says."""
    costs = _costs(model, {*new, *old}, batch)
    return _mean(new, costs) / _mean(old, costs)


def recorded_token_s(model: CatalogueModel, exits: Exits, batch: float) -> float | None:
    """Seconds of the mean token as on record; None where that is not known of all these exits."""
    seconds = {k: _token_s(model.record(k), batch) for k in exits}
    known = {k: s for k, s in seconds.items() if s is not None}
    return _mean(exits, known) if exits and len(known) == len(seconds) else None


def speed(rows: Iterable[tuple[CatalogueModel, HistoryRow]]) -> float | None:
    """Seconds here over seconds on record, of all tokens served; None where it cannot be said.

    One for all models: what differs between them is on record.
    """
    here_s = recorded_s = 0.0
    for model, row in rows:
        exits = {k: n for k, n in row.exit_tokens.items() if n > 0.0}
        token_s = recorded_token_s(model, exits, row.batch)
        if token_s is not None and row.decoded > 0.0:
            here_s += row.decode_s
            recorded_s += row.decoded * token_s
    return here_s / recorded_s if recorded_s > 0.0 else None


def step_s(record: DepthRecord | None, batch: float) -> float | None:
    """A recorded step's seconds at a batch: between two recorded ones linear, outside held."""
    if record is None or not record.step_s:
        return None
    steps = record.step_s
    if batch <= steps[0][0]:
        return steps[0][1]
    for (low, low_s), (high, high_s) in pairwise(steps):
        if batch <= high:
            return low_s + (high_s - low_s) * (batch - low) / (high - low)
    return steps[-1][1]


def _token_s(record: DepthRecord | None, batch: float) -> float | None:
    """Seconds of a served step whose tokens leave there.

    Alone it was measured; what it took beyond the bare step, it takes once in any batch.
    """
    if record is None or record.token_s is None:
        return None
    bare_s, alone_s = step_s(record, batch), step_s(record, 1.0)
    if bare_s is None or alone_s is None:
        return record.token_s
    return bare_s + max(0.0, record.token_s - alone_s)


def _costs(model: CatalogueModel, layers: Collection[int], batch: float) -> dict[int, float]:
    """What tokens cost by where they leave: served steps on record, bare ones, or layers."""
    for known in (_token_s, step_s):
        found = {k: known(model.record(k), batch) for k in layers}
        costs = {k: s for k, s in found.items() if s is not None}
        if len(costs) == len(found):
            return costs
    return {k: float(k) for k in layers}


def _mean(exits: Exits, costs: Mapping[int, float]) -> float:
    return sum(n * costs[k] for k, n in exits.items()) / sum(exits.values())


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
