"""Ops that are split along an axis: where a captured step allows it, and the step in which they are split."""
