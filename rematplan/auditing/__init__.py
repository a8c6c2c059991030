"""Audit a model's own checkpointing: run its step with and without it, compare, and name the cause of faults."""
