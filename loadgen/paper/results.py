"""How a paper's experiment ends: everything in a file, one JSON line at the end of the output."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.report import provenance


def publish(
    experiment: str, headline: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """Write `<experiment>.json` with all rows into `folder`; print the headline as one line."""
    result = {
        "experiment": experiment,
        "headline": dict(headline),
        "commit": provenance.commit(),
        "machine": provenance.machine(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    whole = json.dumps(result | {"rows": list(rows)}, indent=1)
    (folder / f"{experiment}.json").write_text(whole + "\n", encoding="utf-8")
    print(json.dumps(result))
    sys.stdout.flush()
