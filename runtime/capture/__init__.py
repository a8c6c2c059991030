"""Capture: tracing the forward and the backward of a model as one graph of ATen calls."""
