"""Placing recomputation on a second lane (thread or CUDA stream) while the gradients run on the first."""
