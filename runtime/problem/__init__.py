"""Build the planning problem (ops and tensors with costs and bytes) from a captured step (the ATen calls of a forward
and its backward)."""
