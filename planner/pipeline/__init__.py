"""Pipelines of stages: what each rank does in which order, how many bytes it holds, and plans of its stages."""
