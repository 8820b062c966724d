"""While a process loads what stays, its collector does not look at all of it again and again."""

from __future__ import annotations

import gc

import pytest

from quadriga.replica.gc_tuning import collect_rarely


@pytest.mark.parametrize("is_rare", [False, True])
def test_what_stays_is_not_collected_while_it_is_made(is_rare: bool) -> None:
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)  # Python's own
        gc.freeze()
        gc.collect()  # so that few survived the last one, whatever else this process has made
        counted = gc.get_stats()[2]["collections"]
        if is_rare:
            collect_rarely()
        made = [[i] for i in range(300_000)]  # about what torch makes
        assert (gc.get_stats()[2]["collections"] == counted) is is_rare
        del made
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
