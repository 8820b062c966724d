"""DREX: every token leaves at its own exit, and the batch is regrouped around those that stay.

Source: *Dynamic Rebatching for Early-Exit Inference*; the two-level profit model is ours.
"""

from quadriga.policies.drex.costs import SegmentCosts
from quadriga.policies.drex.plan import RebatchPlan
from quadriga.policies.drex.rebatcher import DrexRebatcher

__all__ = ["DrexRebatcher", "RebatchPlan", "SegmentCosts"]
