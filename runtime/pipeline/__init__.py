"""Pipelines in PyTorch: the action lists of its schedules, and stages that run plans."""
