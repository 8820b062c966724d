"""Where tokens leave each model, for the terminal view: shares by layers run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from loadgen.report.plain_table import plain_table

UNUSED = {
    "drafts": "drafts",
    "drafts_not_worth_it": "drafts do not pay now",
    "not_worth_it": "does not pay now",
    "full_depth_asked": "full depth asked",
    "not_loaded": "not loaded",
    "off": "off",
}
"""Why no token leaves at an exit; `ExitUse` has all reasons."""


def exits_table(view: Mapping[str, Any], before: Mapping[str, Any] | None) -> Table | None:
    """Return a row per model; None where no replica has told of its exits.

    Args:
        before: An earlier view: tokens are counted from there, and from the start where none came.
    """
    models = sorted(set(_models(view).values()))
    shown, span = _tokens(view), "since the start"
    if not shown:
        return None
    recent = {} if before is None else _tokens(view, before)
    if before is not None and any(tokens.total() for tokens in recent.values()):
        shown, span = recent, f"of the last {view['at_unix_s'] - before['at_unix_s']:.0f} s"
    table = plain_table(f"exits: tokens {span}")
    table.add_column("model", no_wrap=True)
    table.add_column("mean depth", justify="right", no_wrap=True)
    table.add_column("share of tokens by layers run")
    for model in models:
        if model in shown:
            table.add_row(model, *_cells(shown[model], _uses(view, model)))
    return table


def _cells(tokens: Counter[int], uses: Mapping[int, str]) -> tuple[str, Text]:
    """A model's mean depth, and its shares."""
    total = tokens.total()
    depth = f"{sum(layer * n for layer, n in tokens.items()) / total:.1f}" if total else "–"
    shares = [
        (layer, tokens[layer] / total if total else 0.0, _why(tokens, uses, layer))
        for layer in sorted(tokens.keys() | uses.keys())
    ]
    parts = []
    for (share, why), group in groupby(shares, key=lambda s: (s[1], s[2])):
        layers = [layer for layer, *_ in group]
        # Neighbours that are unused for the same reason are said once.
        names = [f"{layers[0]} to {layers[-1]}"] if len(layers) > 1 and not share else layers
        for name in names:
            part = Text(f"{name}: ", style="dim") + Text(f"{share:.0%}")
            parts.append(part + Text(f" ({why})" if why else "", style="dim"))
    return depth, Text("   ").join(parts)


def _why(tokens: Counter[int], uses: Mapping[int, str], layer: int) -> str:
    return UNUSED.get(uses.get(layer, ""), "") if not tokens[layer] else ""


def _models(view: Mapping[str, Any]) -> dict[str, str]:
    """Replica → its model, of those that tell of exits."""
    return {
        r["name"]: r["depth_class"].rpartition("@")[0]
        for r in view.get("replicas", [])
        if r["name"] in view.get("exits", {})
    }


def _tokens(
    view: Mapping[str, Any], before: Mapping[str, Any] | None = None
) -> dict[str, Counter[int]]:
    """Model → layers run → tokens since the start, or since an earlier view.

    Of a replica that the earlier view lacks nobody knows how many are new, so none count. A counter
    that fell belongs to a new process and counts from nought.
    """
    found: dict[str, Counter[int]] = {}
    for name, model in _models(view).items():
        now = view["exits"][name]["tokens"]
        told = {} if before is None else before.get("exits", {}).get(name, {"tokens": now})
        then: Counter[str] = Counter(told.get("tokens"))
        grown = {int(k): int(n - then[k] if n >= then[k] else n) for k, n in now.items()}
        found.setdefault(model, Counter()).update(grown)
    return found


def _uses(view: Mapping[str, Any], model: str) -> dict[int, str]:
    """Exit → what most replicas of a model say of it."""
    said: dict[int, Counter[str]] = {}
    for name, of in _models(view).items():
        if of == model:
            for layer, use in view["exits"][name].get("uses", {}).items():
                said.setdefault(int(layer), Counter())[use] += 1
    return {layer: uses.most_common(1)[0][0] for layer, uses in said.items()}
