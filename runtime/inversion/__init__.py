"""Inverses: ops that recompute a tensor from tensors that were computed from it."""
