"""Capture: tracing a model's forward and backward as one graph of ATen calls."""
