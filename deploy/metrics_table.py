"""Make docs/metrics.md from the code: `python deploy/metrics_table.py`."""

from __future__ import annotations

from pathlib import Path

from serve_app.ops.metric_catalogue import markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"

if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
    print(f"wrote {PAGE}")
