"""Placing recomputation on a second lane beside the gradients."""
