"""The planner's arithmetic against HELIOS's figures, and what it says of other models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from loadgen.model_costs.published import PAPER_BATCH_RATIO, PUBLISHED
from loadgen.plan import GIB, find_sizes, paper_checks, plan_row, saved_gib
from quadriga.catalogue.sizes import sizes_of
from quadriga.checkpoint.folder import ASSETS


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_table_6_is_met_within_4_per_cent() -> None:
    checks = paper_checks()
    assert {c.model for c in checks} == {
        "codellama-34b",
        "llama-2-70b",
        "llama-2-7b",
        "llama-3-8b",
        "llama-2-13b",
    }
    for check in checks:
        assert abs(check.error) < 0.04, check


def test_savings_of_the_introduction_are_met() -> None:
    """3.37 and 17.25 GB for six of 24 and nine of 32 layers: GiB of 32-bit weights, exactly."""
    for model, _, paper_gb, ours in saved_gib():
        assert ours == pytest.approx(paper_gb, abs=0.01), model


def test_the_largest_batch_is_that_of_figure_9() -> None:
    """15.14 lies between what a quarter of the depth gives the two large models."""
    ratios = {c.model: c.batch_ratio for c in paper_checks()}
    assert ratios["codellama-34b"] < PAPER_BATCH_RATIO < ratios["llama-2-70b"]
    assert ratios["codellama-34b"] == pytest.approx(PAPER_BATCH_RATIO, rel=0.04)
    assert ratios["llama-2-70b"] == pytest.approx(PAPER_BATCH_RATIO, rel=0.07)
    assert max(r for m, r in ratios.items() if m.startswith("llama-2-") and "70" not in m) < 9


def test_a_row_by_hand() -> None:
    """Llama-2-7B on 24 GiB, 16 layers, 4,096 tokens each."""
    sizes = sizes_of(PUBLISHED["llama-2-7b"].config)
    row = plan_row("m", sizes, 16, device_bytes=24 * GIB, context=4096, value_bytes=2)
    params = 2 * 32000 * 4096 + 4096 + 16 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert row.weights_gib == pytest.approx(2 * params / GIB)
    assert row.kv_bytes_per_token == 16 * 2 * 4096 * 2
    assert row.batch == (24 * GIB - 2 * params) // (4096 * 16 * 2 * 4096 * 2) == 17
    full = plan_row("m", sizes, 32, device_bytes=24 * GIB, context=4096, value_bytes=2)
    assert full.batch == 5
    assert row.batch_ratio is not None
    assert 17 / 6 < row.batch_ratio < 18 / 5, "unrounded"


def test_what_does_not_fit_holds_none() -> None:
    sizes = sizes_of(PUBLISHED["llama-2-70b"].config)
    row = plan_row("m", sizes, 80, device_bytes=40 * GIB, context=1, value_bytes=2)
    assert (row.batch, row.batch_ratio) == (0, None)


def test_depths_default_to_the_exits_or_to_quarters(capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(capsys, "opt-6.7b", str(ASSETS / "quadriga-s"))["rows"]
    assert [(r["depth"], r["num_layers"]) for r in rows] == [
        (8, 32),
        (16, 32),
        (24, 32),
        (32, 32),
        (2, 8),
        (4, 8),
        (8, 8),
    ]
    rows = planned(capsys, "opt-6.7b", "--depth", "9", "17", "32", "--context", "1024")["rows"]
    assert [r["depth"] for r in rows] == [9, 17, 32]
    batches = [r["batch"] for r in rows]
    assert batches == sorted(batches, reverse=True)


def test_a_config_file_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    short = PUBLISHED["llama-3-8b"].config | {"max_position_embeddings": 512}
    file.write_text(json.dumps(short))
    assert find_sizes(str(file))[0].total_params == 8_030_261_248
    (row,) = planned(capsys, str(file), "--depth", "32", "--dtype", "float32")["rows"]
    assert row["weights_gib"] == pytest.approx(8_030_261_248 * 4 / GIB)
    assert row["context"] == 512


def test_a_bundled_model_is_known_by_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert [r["depth"] for r in planned(capsys, "quadriga-l")["rows"]] == [3, 6, 12]


def test_without_models_the_paper_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    line = planned(capsys)
    assert len(line["table_6"]) == 5
    assert line["max_error"] < 0.04
    assert line["assumptions"]
