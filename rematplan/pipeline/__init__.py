"""Pipelines whose stages recompute activations as planned: schedules by name, planning, and running under torchrun."""
