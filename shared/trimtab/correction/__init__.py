"""Corrections for the mismatch between the policy that sampled and the policy that trains, one method a file."""

from trimtab.correction.importance import BOUNDS, importance_weights, weight_total
from trimtab.correction.rejection import STATISTICS, rejection_mask

__all__ = ["BOUNDS", "STATISTICS", "importance_weights", "rejection_mask", "weight_total"]
